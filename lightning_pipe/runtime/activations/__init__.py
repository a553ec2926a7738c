"""Offloading of saved tensors: memory of the device is copied to the host after F, and back before the backward."""

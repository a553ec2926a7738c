"""Hydra plug-in: presets of lightning_pipe on the search path, strategy "dapple" known to Lightning."""

"""Move tensors between ranks."""

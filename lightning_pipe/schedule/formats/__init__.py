"""Programs and orders as text: our own notation, and the CSV files of torch.distributed.pipelining."""

"""What stages give up to fit into memory: recomputation, offload, warm-up."""

"""Plan and run hybrid data and pipeline parallel training of unmodified LightningModules."""

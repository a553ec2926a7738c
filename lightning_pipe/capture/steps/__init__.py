"""The step itself, shared by both routes of capture: batch, calls of `log`, metrics, state, hazards, stage programs."""

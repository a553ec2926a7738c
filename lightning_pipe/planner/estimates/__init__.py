"""Fast estimates of candidates: costs of stages, a recurrence over them, and lower bounds."""

"""The replay route: every rank plays the Python of the step with the units that are its own."""

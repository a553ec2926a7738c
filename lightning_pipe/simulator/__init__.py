"""Price a verified program: the only judge of plans."""

"""The laws of a correct program, stated without the code that makes programs."""

"""Readers of published layer profiles (PipeDream, DAPPLE, Piper), as graph and profile of a captured step."""

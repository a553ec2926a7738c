"""Operations of a captured step, timed where they stand."""

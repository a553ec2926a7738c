"""MadPipe's planner (Beaumont et al., 2022): chains, contiguous stages, special processors, periodic patterns."""

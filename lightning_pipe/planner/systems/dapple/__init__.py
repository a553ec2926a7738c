"""DAPPLE's planner (Fan et al., PPoPP 2021): latency formula, recursion, placement policies."""

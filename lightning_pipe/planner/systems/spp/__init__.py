"""The planner of SPP (Luo et al., INFOCOM 2022): device order, partition, and its bound."""

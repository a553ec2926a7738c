"""Price a verified program: the only judge of plans."""

from lightning_pipe.simulator.ahead import period, steps_ahead
from lightning_pipe.simulator.memory import MemoryCurve, memory_curves
from lightning_pipe.simulator.simulate import simulate
from lightning_pipe.simulator.unit_prices import UnitPrices

__all__ = ["MemoryCurve", "UnitPrices", "memory_curves", "period", "simulate", "steps_ahead"]

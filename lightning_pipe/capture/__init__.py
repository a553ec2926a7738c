"""Turn a step of a LightningModule into one graph, and the graph into stage programs.

tensors, structure = flatten(batch)
capture = capture_step(Request(module, "training_step", structure, samples=4))
split = capture.split((17, 40))      # three stages
"""

from lightning_pipe.capture.batch import Structure, flatten
from lightning_pipe.capture.capture import Capture, capture_step
from lightning_pipe.capture.tables import canonical_names
from lightning_pipe.capture.trace import Request, real_answers

__all__ = [
    "Capture",
    "Request",
    "Structure",
    "canonical_names",
    "capture_step",
    "flatten",
    "real_answers",
]

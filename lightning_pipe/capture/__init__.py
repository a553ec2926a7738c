"""Turn a step of a LightningModule into one graph, and the graph into stage programs.

tensors, structure = flatten(batch)
capture = capture_step(Request(module, "training_step", structure, samples=4))
split = capture.split((17, 40))      # three stages
"""

from lightning_pipe.capture.capture import Capture
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.real_answers import real_answers
from lightning_pipe.capture.route import Route
from lightning_pipe.capture.sliced_capture import capture_step
from lightning_pipe.capture.steps.batch import Structure, flatten
from lightning_pipe.capture.steps.module_tables import canonical_names

__all__ = [
    "Capture",
    "Request",
    "Route",
    "Structure",
    "canonical_names",
    "capture_step",
    "flatten",
    "real_answers",
]

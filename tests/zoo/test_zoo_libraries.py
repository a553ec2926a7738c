"""Models of other libraries are pipelined by one of the two routes, with the gradients of the plain module.

They need `pip install -e '.[libraries]'`.
"""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.errors import CaptureError
from zoo.libraries import LIBRARIES
from zoo.replaying import traced
from zoo.test_zoo_pipelines import SAMPLES, captured, captured_to_fit, check_joint, sizes_of
from zoo.test_zoo_replay import check_replayed

ANIMALS = [(package, name) for package, entries in LIBRARIES.items() for name in entries]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), ANIMALS, ids=[name for _, name in ANIMALS])
def test_a_model_of_a_library_has_its_gradients_by_the_first_route_that_takes_it(package, name):
    pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[libraries]'")
    entry = LIBRARIES[package][name]
    torch.manual_seed(0)
    module, batch = entry.make_module().train(), entry.make_batch(SAMPLES)
    if entry.expected == "joint":
        check_joint(name, captured_to_fit(module, batch), counts=(2, 3))
        return
    with pytest.raises(CaptureError, match=entry.expected):
        captured(module, batch, sizes_of(batch))
    check_replayed(traced(module, batch, sizes_of(batch)))

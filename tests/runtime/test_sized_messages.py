"""Messages whose sizes go before their values."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.capture.steps.stage_program import Value
from lightning_pipe.runtime.exchanges.sized_messages import SizedMessage, SizedReceive
from lightning_pipe.runtime.transport.local import Hub

CPU = torch.device("cpu")
SIZED = Value("nodes", torch.float64, lambda samples: (samples, 3), None, order=(1, 0), sizes_travel=True)
FIXED = Value("rows", torch.float64, lambda samples: (samples,), 0)


@pytest.mark.parametrize("first", [0, 1])
def test_messages_keep_their_order_whichever_is_waited_for_first(first: int) -> None:
    """A message without sizes is posted behind one whose sizes are still to come."""
    hub = Hub()
    sender, receiver = hub.endpoint(0), hub.endpoint(1)
    sized, fixed = SizedMessage((SIZED, FIXED), 2, 2, CPU), SizedMessage((FIXED,), 2, 2, CPU)
    one = SizedReceive(sized, receiver, 0, behind=None)
    receives = [one, SizedReceive(fixed, receiver, 0, behind=one)]
    assert not any(receive.wait(0) for receive in receives)
    nodes, rows, later = torch.rand(7, 2).double(), torch.rand(2).double(), torch.rand(2).double()
    sender.send([sized.sizes_of([nodes, rows])], peer=1)
    sender.send(sized.views([nodes, rows]), peer=1)
    sender.send(fixed.views([later]), peer=1)
    assert receives[first].wait(0)
    assert receives[1 - first].wait(0)
    torch.testing.assert_close(list(one.tensors), [nodes, rows])
    torch.testing.assert_close(list(receives[1].tensors), [later])


def test_a_message_that_is_given_up_has_nothing_in_it() -> None:
    message = SizedMessage((SIZED, FIXED), 2, 2, CPU)
    assert [tuple(buffer.shape) for buffer in message.buffers(message.no_sizes)] == [(0, 0), (2,)]

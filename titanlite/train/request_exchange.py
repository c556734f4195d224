"""Let all ranks agree on the actions after a step: stop, save, validate, or finish the run."""

from __future__ import annotations

import functools
import operator
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.hooks.hook import Request
from titanlite.runtime.world import gathered

REQUEST_DELAY = {"cpu": 0, "cuda": 1}
"""Number of steps between sending a request and receiving it on all ranks, by device type.

When a run ends on a GPU, the request that was sent last is dropped.
"""


class RequestExchange:
    """Exchanges requests between all ranks, nearly always without a collective of its own.

    Ranks must agree on the actions after a step, because saves and validations use collectives.
    Most steps have no request on any rank. So the all-reduce of the gradient norm also counts the
    ranks with a request, and the ranks gather their requests only if this count is not 0.

    On a CPU, a request that is sent with a step is received after this step. On a GPU it is
    received one step later: the CPU launches the next step before it waits for the count, so the
    GPU always has work. Therefore it is sent one step early:

        when          | CPU (`delay` 0)             | GPU (`delay` 1)
        before step 1 |                             | send for step 1
        in step 1     | send and receive for step 1 | send for step 2, receive for step 1
        in step 2     | send and receive for step 2 | send for step 3, receive for step 2

    Attributes:
        delay: Number of steps between sending and receiving a request; see `REQUEST_DELAY`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Create an exchange between the ranks of `group`."""
        self.delay = REQUEST_DELAY[device.type]
        self._group = group
        self._sent = deque[_SentRequest]()

    def send(self, request: Request, num_requests: Tensor | None = None) -> None:
        """Send the request of this rank.

        A later `receive` combines it with the requests of all ranks.

        Args:
            request: Request of this rank, empty in most cases.
            num_requests: Number of ranks with a request, from the `StepResult` of the step that has
                just been launched; a scalar on the device. None before the first step.
        """
        # Before the first step, no step has counted the requests, so `receive` gathers them.
        if num_requests is None:
            self._sent.append(_SentRequest(request))
            return

        # Copy the count to pinned memory asynchronously, so that the CPU can launch the next step
        # meanwhile. An event records when the copy is complete.
        count = num_requests.to("cpu", non_blocking=True)
        copied = None
        if num_requests.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._sent.append(_SentRequest(request, count, copied))

    def receive(self) -> Request:
        """Return the combination of the oldest requests that the ranks have sent.

        All ranks call this together, and all receive the same result. The CPU waits until the step
        that counted the requests has computed its gradient norm.
        """
        sent = self._sent.popleft()
        if sent.copied is not None and not sent.copied.query():
            sent.copied.synchronize()
        if sent.count is not None and sent.count.item() == 0:
            return Request()

        requests = gathered(sent.request, self._group)
        return functools.reduce(operator.or_, requests)


class _SentRequest(NamedTuple):
    """A request between `RequestExchange.send` and `RequestExchange.receive`.

    Attributes:
        request: Actions, such as a save, that this rank asked all ranks to take.
        count: CPU tensor with the number of ranks that requested an action. None before the first
            step, because no step has counted them.
        copied: CUDA event at which the copy of `count` from the GPU is complete. None on a CPU.
    """

    request: Request
    count: Tensor | None = None
    copied: torch.cuda.Event | None = None

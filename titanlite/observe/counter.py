"""Counts what operators do while a step runs: bytes alive, FLOPs, bytes moved, bytes of collectives.

Invariant: it sees storages and not tensors, so that views and writes in place count nothing. It works on real tensors
as on fake ones, and changes neither.
"""

from __future__ import annotations

import weakref
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from titanlite.observe.kernels import WRAPPED, Collective, Kernel, copied, describe
from titanlite.observe.kinds import COUNTED

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)  # what other subclasses hold is counted where they use it
_DEVICE = torch.ops.prim.device.default
NUMBER = {kind: number for number, kind in enumerate(COUNTED)}


class Place(NamedTuple):
    """A part of the step. All that happens in the same place of two models that differ in blocks only is alike.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        name: "block", "embedding", "loss", "gradient norm", ...
        stage: Number of the pipeline stage.
        block: Number of the block within its stage; -1 outside of the blocks.
        microbatch: Number of the microbatch.
    """

    phase: str
    name: str
    stage: int = 0
    block: int = -1
    microbatch: int = 0


class Counter(TorchDispatchMode):
    """Within it, every operator is counted in the current place.

    Attributes:
        place: Where the step is. Whoever runs the step sets it.
        in_loss: Whether the fused loss runs.
        events: (number of the storage, its change in bytes, number of the place) in the order in which they happen. The
            number of the place is -1 for what was alive before the step.
        places: The places in the order in which the step came to them; the last is the current one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_loss = False
        self.places: list[Place] = [Place("forward", "start")]
        self.events: list[tuple[int, int, int]] = []
        self.kinds: list[int] = []  # of each storage
        self.work: Tally[tuple[int, Kernel]] = Tally()
        self.traffic: Tally[tuple[int, Collective]] = Tally()
        self._asked_for_shapes = False
        self._known: dict[int, tuple[int, Any]] = {}  # address of a storage -> its number, and a reference to it
        self._sizes: list[int] = []
        self._microbatches: Tally[int] = Tally()

    # ------------------------------------------------------------------------------------------------------- places

    def begin(self) -> None:
        """A new step begins. What is alive stays; what was counted of earlier steps is forgotten."""
        self.places = [Place("forward", "start")]
        self.events = [(number, self._sizes[number], -1) for number, _ in self._known.values()]
        self.work.clear()
        self.traffic.clear()
        self._microbatches.clear()

    def next_microbatch(self, stage: int) -> int:
        """The number of the forward pass of `stage` that begins."""
        self._microbatches[stage] += 1
        return self._microbatches[stage] - 1

    def go_to(self, place: Place) -> None:
        """What follows happens in `place`."""
        if place != self.places[-1]:
            self.places.append(place)

    # ------------------------------------------------------------------------------------------------------ storages

    def mark(self, tensors: Iterable[Tensor | None], kind: str, over: Iterable[str] = COUNTED) -> None:
        """Say what kind of memory these tensors are, if they are of a kind of `over` so far."""
        from_kinds = {NUMBER[name] for name in over}
        for tensor in tensors:
            for plain in parts(tensor):
                number = self._storage(plain)
                if self.kinds[number] in from_kinds:
                    self.kinds[number] = NUMBER[kind]

    def _storage(self, tensor: Tensor) -> int:
        """Number of the tensor's storage. A new one is counted as allocated now."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._known.get(address)
        if known is not None:
            return known[0]
        number, size = len(self.kinds), storage.nbytes()
        in_backward = torch._C._current_graph_task_id() != -1
        place = self.places[-1]
        if place.phase == "optimizer" or place.name == "start":
            kind = NUMBER["other"]
        else:
            kind = NUMBER["loss"] if self.in_loss and not in_backward else NUMBER["activations"]
        self.kinds.append(kind)
        self._sizes.append(size)
        self.events.append((number, size, len(self.places) - 1))
        self._known[address] = number, weakref.ref(storage, lambda _: self._freed(address))
        return number

    def _freed(self, address: int) -> None:
        number, _ = self._known.pop(address)
        self._resized(number, 0)

    def _resized(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self.events.append((number, size - self._sizes[number], len(self.places) - 1))
            self._sizes[number] = size

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count, and see what FSDP2 frees by resizing a storage to nothing.

        Not counted is how DTensor finds the shape of a result: it runs the operator on whole tensors without memory,
        in torch 2.11 at each call if the tensors are fake.
        """
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._known.get(storage._cdata)) is not None:
                self._resized(known[0], storage.nbytes())
            return result

        def propagated(propagator: ShardingPropagator, schema: Any) -> Any:
            self._asked_for_shapes = True
            try:
                return propagate(propagator, schema)
            finally:
                self._asked_for_shapes = False

        shapes = patch.object(ShardingPropagator, propagate.__name__, propagated)
        with patch.object(torch.UntypedStorage, "resize_", resized), shapes, self:
            yield
        self._known.clear()  # otherwise weights, which outlive the step, would keep this counter alive

    # ----------------------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            self.work[len(self.places) - 1, WRAPPED] += 1
            return NotImplemented
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # more than half of all calls: do not pass it on
            return args[0].fake_device
        kwargs = kwargs or {}
        result = copied(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if self._asked_for_shapes:
            return result
        self.count(func, args, kwargs, result)
        return result

    def count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count a call that returned `result`."""
        what = describe(func, args, kwargs, result)
        if what is None:  # a view, or a question
            return
        for tensor in what.results:
            self._storage(tensor)
        for kind, tensors in what.marks.items():
            self.mark(tensors, kind, ("activations", "other", "loss"))
        here = len(self.places) - 1
        if isinstance(what.key, Collective):
            self.traffic[here, what.key] += 1
        elif what.key is not None:
            self.work[here, what.key] += 1


def parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: the shard of a DTensor, the data and scale of an FP8 weight."""
    if not isinstance(tensor, Tensor):  # none, or the mesh of a DTensor
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts(getattr(tensor, name))

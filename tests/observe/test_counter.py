"""What a counter of operators sees of a step that it does not see on plain tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.observe.counter import Counter
from titanlite.observe.gpus import WRAPPER


class Wrapped(Tensor):
    """A tensor subclass. Its matmul copies both sides first, as one of FP8 does."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        outer = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        a, b = (each.inner for each in args)
        return torch.mm(a.contiguous().to(torch.float32), b.t().contiguous().to(torch.float32))


def test_copies_that_a_tensor_subclass_makes_are_counted():
    a, b = (torch.zeros(4, 6, dtype=torch.bfloat16) for _ in range(2))
    counter = Counter()
    with counter.watching():
        torch.mm(Wrapped(a), Wrapped(b))
    counted = {kernel.op: (count, kernel.bytes) for (_, kernel), count in counter.work.items()}
    assert counted == {
        WRAPPER: (1, 0),
        "aten.clone": (1, 24 * (2 + 2)),  # of b alone: a is contiguous
        "aten._to_copy": (2, 24 * (2 + 4)),
        "aten.mm": (1, 4 * (24 + 24 + 16)),
    }
    # The copy of b in bfloat16, both in float32, and the product.
    assert sorted(change for _, change, _ in counter.events if change > 0) == [48, 64, 96, 96]

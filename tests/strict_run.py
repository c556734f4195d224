"""Steps that fail if they do what costs time: `arm` has a run take them.

reads: a step that reads a tensor, and does not log. recompiles: a step after the second one that compiles anything.
"""

from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.observe.logged_step import LoggedStep
from titanlite.train.loop import Trainer


class NoReads(TorchDispatchMode):
    """What `.item()`, `bool()`, `int()`, `float()` come down to, whoever calls them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step read a tensor"
        return func(*args, **(kwargs or {}))


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a step read a tensor")


plain_step = Trainer.step


def without_recompiling(self: Trainer) -> LoggedStep | None:
    torch._dynamo.config.error_on_recompile = self.steps_done >= 2  # pyright: ignore
    return plain_step(self)


def without_reading(self: Trainer) -> LoggedStep | None:
    if self.meter.is_log_step(self.steps_done + 1):
        return plain_step(self)
    with NoReads(), patch.object(Tensor, "cpu", refuse), patch.object(Tensor, "tolist", refuse):
        return plain_step(self)


def arm(forbidden: str) -> None:
    """Let no step of this process do what is `forbidden`: reads or recompiles."""
    Trainer.step = {"reads": without_reading, "recompiles": without_recompiling}[forbidden]

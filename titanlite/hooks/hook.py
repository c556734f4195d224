"""The doors of the training loop: the class that a hook is made of, and what it may use of the trainer.

Invariant: the loop calls each method of all hooks on every rank, in the same order and at the same step, so a hook may
use collectives, except in `failed`. A hook changes no number that it was not made to change, and reads nothing from the
device between two logged steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.llama import Llama
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.meter import Meter, Part
from titanlite.optim.clip import StepSums
from titanlite.parallel.forward_backward import ForwardBackward
from titanlite.parallel.mesh import Mesh

P = ParamSpec("P")


class Request(NamedTuple):
    """What is asked for after a step. What any rank asks for, all ranks do."""

    stop: int = 0
    """Number of the signal that stops the run; 0: none does."""
    save: bool = False
    validate: bool = False
    data_fails: bool = False
    """A rank cannot read its data for the next step."""
    last: bool = False
    """The run ends here. The loop says so; no hook asks for it."""

    def __or__(self, other: Request) -> Request:
        return Request._make(map(max, self, other))


class StepResult(NamedTuple):
    """What an optimizer step tells, on the device.

    Attributes:
        loss: This rank's share of the loss: see `ForwardBackward.__call__`.
        grad_norm: Norm of the whole gradient before clipping.
        num_valid_tokens: Tokens of the global batch that have a label.
        seconds: The host's time for each part. The device may still compute.
        skipped: 1.0 where weights and optimizer were left as they are, because a number was not finite or a hook asked
            for it; else 0.0. The same on all ranks.
        squares: See `StepSums`.
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid_tokens: Tensor
    seconds: dict[Part, float]
    skipped: Tensor
    squares: Tensor


class Hook:
    """Something that a run does beside its steps. A subclass overrides the methods that it needs."""

    def built(self, training: Training) -> None:
        """The model is sharded and the optimizer exists. No weights are loaded yet."""

    def load(self) -> None:
        """The time to load what an earlier start has saved."""

    def started(self, step: int) -> None:
        """Everything is built. `step` steps are done: 0, or those of the checkpoint that was loaded."""

    def train_begins(self, step: int) -> None:
        """`Trainer.train` begins its loop. A program with a loop of its own never calls this, `wants` or `ended`."""

    def before_step(self, step: int) -> None:
        """Step number `step` begins, before its data is there."""

    def gradients(self, step: int) -> None:
        """The gradients of the step are whole and not clipped. Must not wait for the device."""

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """The gradients are clipped, and the optimizer comes next. Must not wait for the device.

        Args:
            skip: 1.0 if the optimizer will leave all as it is, else 0.0. Set it in place, on all ranks, to skip a step.
        """

    def updated(self, step: int) -> None:
        """The optimizer has stepped, and the gradients are still there. Must not wait for the device."""

    def after_step(self, step: int, result: StepResult) -> None:
        """The host is done with the step. Must not wait for the device."""

    def numbers(self, step: int) -> Mapping[str, Any]:
        """More fields of the `LoggedStep` of a step that is logged, known or new ones. The host waits for the device
        anyway."""
        return {}

    def logged(self, entry: LoggedStep) -> None:
        """A step was logged: the host has its numbers, which are the same on all ranks."""

    def wants(self, step: int) -> Request:
        """What this rank asks for after step number `step`, which begins now. All ranks get it in `act`."""
        return Request()

    def stopping(self) -> int:
        """Number of the signal that has asked this rank to stop, or 0. Asked several times a second while this rank
        waits for its data."""
        return 0

    def act(self, step: int, asked: Request) -> None:
        """The time after a step to do what takes time. `asked` is what the ranks have agreed on."""

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """The weights after `step` were scored. `score` has the keys of `VALIDATION_CURVES`."""

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """The model completed texts after `step`: JSON values with the keys `prompt` and `completion`."""

    def saving(self, step: int) -> None:
        """A checkpoint of `step` is about to be written. An exception prevents it."""

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is complete. With an async mode this is known at the next save or at the end."""

    def ended(self, step: int, stopped: str) -> UserError | None:
        """The loop has ended after `step`. Hooks end in the reverse order.

        Args:
            stopped: Words for what stopped it early, or "".

        Returns:
            Why the run may not end as if all was well, if there is a reason.
        """

    def failed(self, error: BaseException) -> None:
        """An exception ends this rank. The others may not know of it, so no collectives."""

    def state_dict(self) -> dict[str, Any]:
        """A small JSON value for the checkpoint, the same on all ranks. Empty: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Called before `started`, if the checkpoint has something."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for the checkpoint, sharded or not, by name. They are saved as they are and loaded in place. They
        become NaN where a run goes back (guards.on_spike) to a checkpoint that lacks them."""
        return {}


class Training:
    """A run on one rank, as its hooks see it.

    Attributes:
        hosts: Name and address of the machine of each rank.
        opened: What closes with the trainer, in reverse order.
        identity: Of the run, the same after a resume.
        steps_done: Number of optimizer steps since the beginning of the run, including those of earlier starts.
        resumed: Whether a checkpoint was loaded.
        model: The part of the model on this rank. Its parameters are sharded (DTensor).
        loader: The training data.
        alive: To be called now and then by what can take longer than a step may.
    """

    run: Run
    device: torch.device
    rank: int
    mesh: Mesh
    hosts: list[str]
    hooks: list[Hook]
    tokenizer: Tokenizer
    loader: Loader
    model: Llama
    optimizer: torch.optim.Optimizer
    forward_backward: ForwardBackward
    meter: Meter

    def __init__(self) -> None:
        self.opened = ExitStack()
        self.alive: Callable[[], None] = lambda: None
        self.identity, self.steps_done, self.resumed = "", 0, False

    def log(self, line: str) -> None:
        """A line for the log. An `Event` is one of events.jsonl, too."""
        logging.getLogger("titanlite").info(line)

    def tell(self, method: Callable[Concatenate[Hook, P], object], *values: P.args, **_: P.kwargs) -> None:
        """Call a method of `Hook` for all hooks, in their order."""
        for hook in self.hooks:
            getattr(hook, method.__name__)(*values)

    def hook_tensors(self) -> dict[str, Tensor]:
        """The tensors of all hooks, by hook and name."""
        found = [(type(hook).__name__, hook.tensors()) for hook in self.hooks]
        return {f"{hook}.{name}": tensor for hook, tensors in found for name, tensor in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside tensors: a small JSON value. All ranks call it together."""
        states = {type(hook).__name__: state for hook in self.hooks if (state := hook.state_dict())}
        return {
            "step": self.steps_done,
            "tokens": self.meter.tokens_so_far(),
            "data": self.loader.state_dict(),
            "run": self.identity,
            **({"hooks": states} if states else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Without "data" the data begins anew."""
        self.steps_done, self.resumed = state["step"], True
        self.identity = state.get("run", self.identity)
        self.meter.tokens = state["tokens"]
        if "data" in state:
            self.loader.load_state_dict(state["data"])
        for hook in self.hooks:
            if found := state.get("hooks", {}).get(type(hook).__name__):
                hook.load_state_dict(found)

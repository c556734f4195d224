"""Tells a counter where the step is, and which tensors are weights, gathered weights and gradients.

Invariant: hooks only look. They change no tensor, keep none alive, and are gone after the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.model.llama import Llama
from titanlite.observe.counter import Counter, Place
from titanlite.parallel.parallelize import ShardedModel
from titanlite.train.step import TrainStep


@contextmanager
def followed(counter: Counter, sharded: ShardedModel, update: TrainStep, reduced: str = "gradients") -> Iterator[None]:
    """Let `counter` know what the steps within do. `reduced` is the kind of memory of gradients that are reduced."""
    with ExitStack() as hooks:
        for number, stage in sharded.stages.items():
            _follow_stage(counter, number, stage, hooks)
        optimizer, forward_backward = update.optimizer, update.forward_backward

        def and_norm(*args: Any) -> Tensor:
            loss = forward_backward(*args)
            counter.go_to(Place("optimizer", "gradient norm"))
            return loss

        def before(*_: Any) -> None:
            counter.mark((parameter.grad for parameter in update.model.parameters()), reduced)
            counter.go_to(Place("optimizer", "optimizer"))

        hooks.enter_context(patch.object(update, "forward_backward", and_norm))
        _add(hooks, optimizer.register_step_pre_hook(before))
        _add(hooks, optimizer.register_step_post_hook(lambda *_: counter.go_to(Place("optimizer", "end"))))
        yield


class _LiveCounter(Counter):
    """A counter that is no danger to a run: after a failure it counts nothing more."""

    failure: Exception | None = None

    def count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self.failure is None:
            try:
                super().count(func, args, kwargs, result)
            except Exception as error:
                self.failure = error


def check_countable(run: Run, device: torch.device) -> None:
    """Raises UserError: the job asks for a count of bytes that cannot be made."""
    if run.job.profiling.enable_memory_snapshot and run.job.compile.enable and device.type == "cpu":
        raise UserError(
            "profiling.enable_memory_snapshot = true: on a CPU bytes are counted operator by operator, and compiled "
            "code has none. Leave it out, or compile.enable."
        )


@contextmanager
def counted(sharded: ShardedModel, update: TrainStep) -> Iterator[Counter]:
    """Count a step of a run. Raises at the end what failed in the counting."""
    counter = _LiveCounter()
    with counter.watching(), followed(counter, sharded, update):
        counter.mark(update.model.parameters(), "weights")
        mark_optimizer_state(counter, update)
        counter.begin()
        yield counter
        mark_optimizer_state(counter, update)
    if counter.failure is not None:
        raise counter.failure


def mark_optimizer_state(counter: Counter, update: TrainStep, kind: str = "optimizer state") -> None:
    """Say which tensors the optimizer keeps, and of which kind of memory they are."""
    for state in update.optimizer.state.values():
        counter.mark(state.values(), kind)


def _add(hooks: ExitStack, *handles: RemovableHandle) -> None:
    for handle in handles:
        hooks.callback(handle.remove)


def _follow_stage(counter: Counter, number: int, stage: Llama, hooks: ExitStack) -> None:
    microbatch = -1

    def place(phase: str, name: str, block: int = -1) -> Place:
        return Place(phase, name, number, block, microbatch)

    def begins(*_: Any) -> None:
        nonlocal microbatch
        microbatch = counter.next_microbatch(number)
        counter.go_to(place("forward", "forward"))

    def watch(module: nn.Module, name: str, block: int = -1) -> None:
        def before(*_: Any) -> None:
            counter.go_to(place("forward", name, block))

        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                backward = place("backward", name, block)
                output.register_hook(lambda _: counter.go_to(backward))

        _add(hooks, module.register_forward_pre_hook(before, prepend=True))
        _add(hooks, module.register_forward_hook(after, prepend=True))

    _add(hooks, stage.register_forward_pre_hook(begins, prepend=True))
    if stage.tok_embeddings is not None:
        watch(stage.tok_embeddings, "embedding")
    for block, module in enumerate(stage.layers.values()):
        watch(module, "block", block)
    if stage.norm is not None:
        watch(stage.norm, "norm")
    loss = stage.loss

    def counted_loss(*args: Tensor) -> Tensor:
        assert loss is not None
        counter.go_to(place("forward", "loss"))
        counter.in_loss = True
        value = loss(*args)
        counter.in_loss = False
        backward = place("backward", "loss")
        value.register_hook(lambda _: counter.go_to(backward))
        return value

    hooks.enter_context(patch.object(stage, "loss", counted_loss))
    for module in stage.modules():
        if any(True for _ in module.parameters(recurse=False)):
            _add(hooks, module.register_forward_pre_hook(_gathered(counter, hooks)))


def _gathered(counter: Counter, hooks: ExitStack) -> Callable[..., None]:
    """A hook for a module with parameters of its own: before its forward pass they are gathered."""
    seen: set[int] = set()

    def mark_gradient(parameter: Tensor) -> None:
        counter.mark((parameter.grad,), "gradients", ("activations", "loss", "other"))

    def before(module: nn.Module, _inputs: Any) -> None:
        parameters = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        for parameter in parameters:
            seen.add(id(parameter))
            if parameter.requires_grad:
                _add(hooks, parameter.register_post_accumulate_grad_hook(mark_gradient))
        counter.mark(parameters, "gathered weights", ("activations", "loss", "other"))

    return before

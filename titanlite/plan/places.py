"""Tells a counter where the step is, and which tensors are weights, gathered weights and gradients.

Invariant: hooks only look. They change no tensor and keep none alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from titanlite.model.llama import Llama
from titanlite.parallel.parallelize import ShardedModel
from titanlite.plan.counter import Counter, Place
from titanlite.train.update import Update


def follow(counter: Counter, sharded: ShardedModel, update: Update, reduced: str) -> None:
    """Let `counter` know what the step does. `reduced` is the kind of memory of the gradients that are reduced."""
    for number, stage in sharded.stages.items():
        _follow_stage(counter, number, stage)
    optimizer = update.optimizer
    forward_backward = update.forward_backward.__call__

    def and_norm(*args: Any) -> Tensor:
        loss = forward_backward(*args)
        counter.go_to(Place("optimizer", "gradient norm"))
        return loss

    update.forward_backward = and_norm  # pyright: ignore[reportAttributeAccessIssue]

    def before(*_: Any) -> None:
        counter.mark((parameter.grad for parameter in update.model.parameters()), reduced)
        counter.go_to(Place("optimizer", "optimizer"))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: counter.go_to(Place("optimizer", "end")))


def _follow_stage(counter: Counter, number: int, stage: Llama) -> None:
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

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, prepend=True)

    stage.register_forward_pre_hook(begins, prepend=True)
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

    stage.loss = counted_loss
    for module in stage.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_gathered(counter))


def _gathered(counter: Counter) -> Callable[..., None]:
    """A hook for a module with parameters of its own: before its forward pass they are gathered."""
    seen: set[int] = set()

    def mark_gradient(parameter: Tensor) -> None:
        counter.mark((parameter.grad,), "gradients", ("activations", "loss", "other"))

    def before(module: nn.Module, _inputs: Any) -> None:
        parameters = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        for parameter in parameters:
            seen.add(id(parameter))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(mark_gradient)
        counter.mark(parameters, "gathered weights", ("activations", "loss", "other"))

    return before

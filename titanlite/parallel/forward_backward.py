"""Forward and backward passes of one optimizer step. The call is the same for every layout.

Invariant: the gradients are those of (sum of cross entropy over all valid tokens of the global batch) / (their
number), however rows, positions, vocabulary and blocks are spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from titanlite.config.run import Run
from titanlite.model.attention import document_mask
from titanlite.optim.loss import linear_cross_entropy_sum
from titanlite.parallel.context import context_mask, own_chunks
from titanlite.parallel.fsdp import free_gathered, set_gradient_sync
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parallelize import ShardedModel
from titanlite.parallel.pipeline import build_schedule, forward_only
from titanlite.parallel.tensor import vocab_parallel

# (hidden states (B, T, C), output matrix (V, C), labels (B, T), scale) -> scale times the sum of cross entropy
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass. The tensors are on the device."""

    input_ids: Tensor
    """(B, T) int64."""
    labels: Tensor
    """(B, T) int64: the token after each input; -100 where none is to be predicted."""
    document_ids: Tensor | None = None
    """(B, T) int32 with dataset.document_mask: 0, 1, 2, ... in each row. A token attends to tokens of the same id."""
    positions: Tensor | None = None
    """(B, T) int64 with dataset.document_mask: restarts at 0 with each document, or piece of one, in a row."""


class ForwardBackward:
    """Without a pipeline: one microbatch after the other. Gradients are reduced with the last microbatch, or with
    each."""

    def __init__(self, model: ShardedModel, mesh: Mesh, run: Run, device: torch.device) -> None:
        loss = partial(linear_cross_entropy_sum, z_loss=run.job.training.z_loss, compiled=run.compiles("loss"))
        self._loss_fn: LossFunction = loss if mesh.tensor is None else vocab_parallel(loss, mesh.tensor)
        self._model, self._mesh, self._window = model.whole, mesh, run.arch.sliding_window
        self._reduce_each = run.job.parallelism.fsdp_reduce == "microbatch"
        self._denominator = torch.ones((), device=device)
        for stage in (model.whole, *model.stages.values()):
            stage.loss = self._loss

    def __call__(self, microbatches: Sequence[Microbatch], num_valid_tokens: Tensor) -> Tensor:
        """Accumulate gradients, and return this rank's share of the loss, a scalar on the device.

        The shares of the ranks of `mesh.loss_group` add up to the loss.

        Args:
            num_valid_tokens: Number of tokens with a loss in the global batch, on the device. It may still be in
                computation: it is first used with the first loss.
        """
        self._denominator = num_valid_tokens
        total = torch.zeros((), device=num_valid_tokens.device)
        for i, microbatch in enumerate(microbatches):
            last = i == len(microbatches) - 1
            set_gradient_sync(self._model, reduce=last or self._reduce_each, last_microbatch=last)
            with record_function("forward"):
                loss = self._forward(microbatch)
            with record_function("backward"):
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch], loss_fn: LossFunction | None = None) -> Tensor:
        """This rank's share of the sum of cross entropy, in float64. No gradients are computed.

        Args:
            loss_fn: Is called instead of the loss, for each microbatch in order, on the ranks that have the output.
        """
        own, self._loss_fn = self._loss_fn, loss_fn or self._loss_fn
        self._denominator = torch.ones_like(self._denominator)
        try:
            return self._sum_of(microbatches)
        finally:
            self._loss_fn = own
            free_gathered(self._model)

    def _sum_of(self, microbatches: Sequence[Microbatch]) -> Tensor:
        return torch.stack([self._forward(microbatch).double() for microbatch in microbatches]).sum()

    def _forward(self, microbatch: Microbatch) -> Tensor:
        tokens, rest = local_inputs([microbatch], self._mesh, self._window)
        return self._model(tokens, **rest)

    def _loss(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with record_function("loss"):
            return self._loss_fn(hidden, weight, labels, self._denominator.float().reciprocal())


class PipelineForwardBackward(ForwardBackward):
    """With a pipeline: the schedule decides when each microbatch runs. Only the last stage has a loss."""

    def __init__(self, model: ShardedModel, mesh: Mesh, run: Run, device: torch.device) -> None:
        super().__init__(model, mesh, run, device)
        self._microbatches = run.microbatches
        # One for each number of microbatches that a step has, which stages of the run change.
        self._schedules = cache(partial(build_schedule, run, mesh, model.stages, device))
        self._schedules(run.microbatches)

    def __call__(self, microbatches: Sequence[Microbatch], num_valid_tokens: Tensor) -> Tensor:
        self._denominator = num_valid_tokens
        with record_function("pipeline"):
            return self._run(self._schedules(len(microbatches))[0].step, microbatches)

    def _sum_of(self, microbatches: Sequence[Microbatch]) -> Tensor:
        total = torch.zeros_like(self._denominator, dtype=torch.float64)
        schedule, stages = self._schedules(self._microbatches)
        for i in range(0, len(microbatches), self._microbatches):
            part = microbatches[i : i + self._microbatches]
            missing = self._microbatches - len(part)  # the schedule needs that many, so rows without labels are added
            with forward_only(schedule, stages):
                total += self._run(schedule.eval, [*part, *[part[-1]] * missing], missing)
        return total

    def _run(self, run: Callable[..., Any], microbatches: Sequence[Microbatch], missing: int = 0) -> Tensor:
        tokens, rest = local_inputs(microbatches, self._mesh, self._window)
        if missing:
            rest["labels"] = rest["labels"].clone()
            rest["labels"][-missing * len(tokens) // len(microbatches) :] = -100
        if "positions" not in rest:  # a stage cannot count them, because its input may be cut along the sequence
            rest["positions"] = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        losses: list[Tensor] = []
        inputs = (tokens,) if self._model.tok_embeddings is not None else ()
        target = {"target": rest["labels"], "losses": losses} if self._model.norm is not None else {}
        run(*inputs, **target, **rest, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=tokens.device)


def build_forward_backward(model: ShardedModel, mesh: Mesh, run: Run, device: torch.device) -> ForwardBackward:
    """The one that fits the layout."""
    return (ForwardBackward if mesh.pipeline is None else PipelineForwardBackward)(model, mesh, run, device)


def local_inputs(microbatches: Sequence[Microbatch], mesh: Mesh, window: int) -> tuple[Tensor, dict[str, Any]]:
    """These microbatches as one: tokens (B, T), labels, and positions and mask if the model needs them.

    Under context parallelism, T is this rank's part of the row, and its positions are not consecutive.
    """

    def joined(name: str) -> Tensor:
        parts = [getattr(microbatch, name) for microbatch in microbatches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    tokens, rest = joined("input_ids"), {"labels": joined("labels")}
    documents = None if microbatches[0].document_ids is None else joined("document_ids")
    if documents is None and 0 < window < tokens.shape[1]:
        documents = torch.zeros_like(tokens)  # a window is a mask, and a row one document
    if microbatches[0].positions is not None:
        rest["positions"] = joined("positions")
    if mesh.context is None:
        mask = None if documents is None else document_mask(documents, window)
    else:
        mask = context_mask(tokens, documents, mesh.context, window)
        rest.setdefault("positions", torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        rest = {name: own_chunks(x, mesh.context) for name, x in rest.items()}
        tokens = own_chunks(tokens, mesh.context)
    return tokens, rest if mask is None else rest | {"mask": mask}

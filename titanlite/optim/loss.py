"""The training loss, fused with the output projection.

Invariant: the loss is a sum over valid tokens, never a mean, so that the ranks and microbatches of a batch add up to
the same number however it is split. The logits of all tokens never exist at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

IGNORE_INDEX = -100  # label of a position that has no loss
# Number of classes that are converted between fp32 and a lower precision at a time. A CPU's cache can hold so many. A
# GPU converts all at once, in one kernel.
VOCAB_BLOCK = {"cpu": 2048, "cuda": 2**20}
TOKENS_OF_FULL_CHUNKS = 4 * 4096  # from which on a chunk of the loss has the same size: see `tokens_per_chunk`


def tokens_per_chunk(num_tokens: int, fewer_launches: bool = False) -> int:
    """The number of tokens whose logits exist at a time.

    It is an eighth of the tokens, so that the logits take an eighth of the memory. It is at least 512, because each
    chunk reads and writes the whole gradient of the weight, and because a matmul with few rows is slow. It is at most
    1536, where the loss of a large model takes no more than the backward pass of a block.

    Args:
        fewer_launches: Twice as many, and at most 4096, because each chunk launches as many kernels.
    """
    eighth = max(512, num_tokens // 8)
    return min(4096, 2 * eighth) if fewer_launches else min(1536, eighth)


def _reduced(x: Tensor, operation: str, group: dist.ProcessGroup | None) -> Tensor:
    return x if group is None else collectives.wait_tensor(collectives.all_reduce(x, operation, group))


@functools.cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for all that call it."""
    return torch.compile(function)


class Targets(NamedTuple):
    """What the labels of n tokens ask of the classes of this rank. It is computed once, for all chunks."""

    column: Tensor
    """(n, 1), of the label. That of a label that is not `mine` is valid, but has no meaning."""
    mine: Tensor
    """(n,), whether the label is one of the classes. One that is ignored is none."""
    factor: Tensor
    """(n,), of the token's loss: 0 if the label is ignored."""
    label_part: Tensor
    """(n, 1), what is added to the gradient of the label's logit."""


def targets_of(labels: Tensor, scale: Tensor, first_class: int, num_classes: int) -> Targets:
    """Of labels (n,) of the whole vocabulary, where this rank has `num_classes` from `first_class` on."""
    column = labels - first_class
    mine, factor = (column >= 0) & (column < num_classes), torch.where(labels == IGNORE_INDEX, 0.0, scale)
    return Targets(column.clamp(0, num_classes - 1)[:, None], mine, factor, torch.where(mine, -factor, 0.0)[:, None])


def softmax_loss(
    logits: Tensor, at_label: Tensor, targets: Targets, needs_grad: bool, z_loss: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor | None]:
    """Loss of each token (n,), without its factor, and without meaning where the label is ignored. If asked for, the
    gradient of the logits, too, which has their dtype and overwrites them.

    In eager mode the logits are fp32. A compiled graph takes any dtype, reads the logits twice, for the sums and for
    the gradient, and stores nothing else of their size.

    Args:
        logits: (n, V).
        at_label: (n,), the logits of the labels, an argument because torch 2.11 overwrote the logits before it read
            them.
        needs_grad: Whether the gradient is computed. Without it, z_loss is left out.

    The other arguments are those of `linear_cross_entropy_sum`.
    """
    in_graph, given, logits = torch.compiler.is_compiling(), logits, logits.float()
    peak = _reduced(logits.amax(-1), "max", group)  # (n,)
    target = at_label.float() - peak
    exp = (logits - peak[:, None]).exp() if in_graph else logits.sub_(peak[:, None]).exp_()
    total = exp.sum(-1)
    if group is not None:  # without a group no stack, so that a compiled graph can write the gradient over the logits
        total, target = _reduced(torch.stack((total, torch.where(targets.mine, target, 0.0))), "sum", group)
    log_total = total.log()
    loss, factor = log_total - target, targets.factor
    if not needs_grad:
        return loss, None
    if z_loss:
        normalizer = log_total + peak  # log(sum(exp(logits)))
        loss, factor = loss + z_loss * normalizer.square(), factor * (1.0 + 2.0 * z_loss * normalizer)
    if not in_graph:
        return loss, exp.mul_((factor / total)[:, None]).scatter_add_(1, targets.column, targets.label_part)
    # The exponential is computed again, because a graph on CPU would otherwise store all of the first one.
    softmax = (logits - peak[:, None] - log_total[:, None]).exp()
    at_column = torch.arange(logits.shape[1], device=logits.device) == targets.column
    return loss, given.copy_(softmax * factor[:, None] + torch.where(at_column, targets.label_part, 0.0))


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    *,
    z_loss: float = 0.0,
    first_class: int = 0,
    group: dist.ProcessGroup | None = None,
    compiled: bool = False,
) -> Tensor:
    """Cross entropy of the logits `hidden @ weight.T`, summed over the valid labels, times `scale`; fp32.

    Both gradients are computed along with the loss, chunk by chunk of tokens, so that nothing is computed twice
    (as in https://arxiv.org/abs/2410.10989). That of `hidden` is written over `hidden`. Softmax, sums and the weight's
    gradient are in fp32 for any input.

    Args:
        hidden: (B, T, C).
        weight: (V, C). Under vocabulary parallelism it has the rows of this rank only, and the gradient of `hidden` is
            then a part of the sum over the ranks.
        labels: (B, T), of the whole vocabulary; IGNORE_INDEX where there is no loss.
        scale: Scalar on the device.
        z_loss: Adds this times the squared log of the softmax's denominator (https://arxiv.org/abs/2204.02311) if
            gradients are computed. An evaluation computes none and returns the cross entropy alone.
        first_class: The class of the first row of `weight`.
        group: The ranks that have the other rows. All of them return the same loss.
        compiled: Compile the softmax, its loss and its gradient.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    softmax = compiled_once(softmax_loss) if compiled else softmax_loss
    rows, matrix, labels = hidden.detach().flatten(0, -2), weight.detach(), labels.flatten()  # (N, C), (V, C), (N,)
    # One kernel of a GPU instead of 13. On a CPU it is not worth the seconds that its compilation takes.
    make_targets = compiled_once(targets_of) if compiled and hidden.is_cuda else targets_of
    targets = make_targets(labels, scale, first_class, len(matrix))
    # Before the first logits, because it is larger, and fits where the weights were received.
    weight_grad = torch.empty_like(matrix, dtype=torch.float32) if needs_grad else None

    def loss_of(part: slice) -> Tensor:
        chunk, asked = rows[part], Targets(*(x[part] for x in targets))  # (n, C)
        logits = chunk @ matrix.T if compiled else fp32_logits(chunk, matrix)  # (n, V)
        at_label = logits.gather(1, asked.column).squeeze(1)
        loss, logits_grad = softmax(logits, at_label, asked, needs_grad, z_loss, group)
        if weight_grad is not None and logits_grad is not None:
            _gradients(logits_grad, chunk, matrix, weight_grad, first=part.start == 0)
        return loss

    # Before the hidden states change, so that autograd refuses a backward pass that needs them again. Two nodes,
    # because pipeline schedules that split the backward pass need each gradient at another time.
    nothing = torch.zeros((), device=rows.device)
    nodes = ((hidden, rows.view_as(hidden)), (weight, weight_grad)) if needs_grad else ()
    parts = [_WithGradient.apply(tensor, nothing, gradient) for tensor, gradient in nodes]
    # A part of the vocabulary has smaller logits. An eager step on a GPU has the memory.
    size = tokens_per_chunk(len(rows), group is not None or (hidden.is_cuda and not compiled))
    with torch.no_grad():
        losses = torch.cat([loss_of(slice(start, start + size)) for start in range(0, len(rows), size)])
        total = losses.masked_fill_(labels == IGNORE_INDEX, 0.0).sum() * scale
    return sum(parts, total)


def fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (n, C) @ weight (V, C).T in fp32, for a softmax that is not compiled. A compiled one converts the logits
    of the matmul itself; this one would need a second copy of them."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.T
    logits = torch.empty(len(hidden), len(weight), device=hidden.device)
    block = VOCAB_BLOCK[hidden.device.type]
    for columns, rows in zip(logits.split(block, dim=1), weight.split(block), strict=True):
        if hidden.is_cuda:  # it sums in fp32, and out_dtype keeps the sums from being rounded
            torch.mm(hidden, rows.T, out_dtype=torch.float32, out=columns)
        else:
            columns.copy_(hidden @ rows.T)
    return logits


def _gradients(logits_grad: Tensor, hidden: Tensor, weight: Tensor, weight_grad: Tensor, first: bool) -> None:
    """Adds logits_grad.T @ hidden (n, C) to `weight_grad`, and writes logits_grad (n, V) @ weight (V, C) over `hidden`.
    The first chunk writes `weight_grad`, because it was not initialised."""
    if hidden.dtype == torch.float32:
        weight_grad.addmm_(logits_grad.T, hidden, beta=not first)
        torch.mm(logits_grad, weight, out=hidden)
        return
    block = VOCAB_BLOCK[hidden.device.type]
    if logits_grad.dtype != hidden.dtype and len(weight) <= block:
        logits_grad = logits_grad.to(hidden.dtype)
    elif logits_grad.dtype != hidden.dtype:  # in place: the memory of a row has twice the space that it needs
        converted = logits_grad.view(hidden.dtype)[:, : len(weight)]
        for new, old in zip(converted.split(block, dim=1), logits_grad.split(block, dim=1), strict=True):
            new.copy_(old.to(new.dtype))
        logits_grad = converted
    if hidden.is_cuda:
        torch.addmm(weight_grad, logits_grad.T, hidden, beta=int(not first), out_dtype=torch.float32, out=weight_grad)
    else:
        for columns, rows_grad in zip(logits_grad.split(block, dim=1), weight_grad.split(block), strict=True):
            (rows_grad.copy_ if first else rows_grad.add_)(columns.T @ hidden)
    torch.mm(logits_grad, weight, out=hidden)


class _WithGradient(torch.autograd.Function):
    """A value whose gradient with respect to `tensor` is already known. The gradient's memory is handed over, once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, tensor.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        if ctx.gradient is None:
            raise RuntimeError("The gradient of this loss was computed once and has been handed out.")
        gradient, ctx.gradient = ctx.gradient, None
        result = gradient if gradient.dtype == ctx.dtype else torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, grads[0], out=result), None, None  # one kernel multiplies and converts

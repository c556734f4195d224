"""The training loss, fused with the output projection.

Invariant: it is a sum over valid tokens, never a mean, so that any split of a batch into ranks and microbatches
adds up to the same number; and the logits of all tokens never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

IGNORE_INDEX = -100  # label of a position that has no loss
# Classes that are converted between fp32 and a lower precision at a time: so few that a CPU's cache holds them.
VOCAB_BLOCK = {"cpu": 2048, "cuda": 8192}


def tokens_per_chunk(num_tokens: int, logit_bytes: int) -> int:
    """How many tokens' logits exist at a time: an eighth of the tokens, so that they are a small part of what they
    would be at once; but 512 to 2048, as each chunk passes once over the weight's gradient and a matmul needs rows to
    be fast. Of logits in two bytes, not four, twice as many take the same memory."""
    return max(512, min(2048, num_tokens // 8) * 4 // logit_bytes)


def _reduced(x: Tensor, operation: str, group: dist.ProcessGroup | None) -> Tensor:
    return x if group is None else collectives.wait_tensor(collectives.all_reduce(x, operation, group))


def softmax_loss(
    logits: Tensor,
    at_label: Tensor,
    labels: Tensor,
    scale: Tensor,
    needs_grad: bool,
    z_loss: float,
    first_class: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor | None]:
    """Loss of logits (n, V), computed in fp32, and their gradient if asked for, in the logits' dtype; it may overwrite
    them. See `linear_cross_entropy_sum`.

    `at_label` (n,) are the logits of the labels, read before. A compiled graph then reads the logits only for what
    their gradient needs, so that no order in which it overwrites them can change the loss: torch 2.11 overwrote them
    before it read the labels' logits.
    """
    in_place = not torch.compiler.is_compiling()  # a graph makes two passes, and keeps nothing between them
    given, logits = logits, logits.float()
    valid, (mine, index) = labels != IGNORE_INDEX, _classes(labels, first_class, logits.shape[1])
    peak = _reduced(logits.amax(-1), "max", group)  # (n,)
    target = torch.where(mine, at_label.float() - peak, 0.0)
    exp = logits.sub_(peak[:, None]).exp_() if in_place else (logits - peak[:, None]).exp()
    total = exp.sum(-1)
    if group is not None:  # a stack would keep a graph from writing the gradient over the logits
        total, target = _reduced(torch.stack((total, target)), "sum", group)
    log_total = total.log()
    normalizer = log_total + peak  # log(sum(exp(logits)))
    z = z_loss if needs_grad else 0.0
    loss = torch.where(valid, log_total - target + z * normalizer.square(), 0.0).sum() * scale
    if not needs_grad:
        return loss, None
    factor = torch.where(valid, scale, 0.0)
    label_part, factor = torch.where(mine, -factor, 0.0)[:, None], factor * (1.0 + 2.0 * z * normalizer)
    if in_place:
        return loss, exp.mul_((factor / total)[:, None]).scatter_add_(1, index, label_part).to(given.dtype)
    # Another exponential than above, or a graph on CPU would store all of them in between.
    softmax = (logits - peak[:, None] - log_total[:, None]).exp()
    label_part = torch.where(torch.arange(logits.shape[1], device=index.device) == index, label_part, 0.0)
    return loss, given.copy_(softmax * factor[:, None] + label_part)


def _classes(labels: Tensor, first_class: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Which labels (n,) are among the classes from `first_class` on, and where, (n, 1); anywhere for the others."""
    column = labels - first_class
    mine = (labels != IGNORE_INDEX) & (column >= 0) & (column < num_classes)
    return mine, column.clamp(0, num_classes - 1)[:, None]


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    *,
    z_loss: float = 0.0,
    first_class: int = 0,
    group: dist.ProcessGroup | None = None,
    softmax: Callable[..., tuple[Tensor, Tensor | None]] = softmax_loss,
) -> Tensor:
    """Cross entropy of the logits `hidden @ weight.T`, summed over the valid labels, times `scale`; fp32.

    Both gradients are computed along with the loss, chunk by chunk of tokens, so that nothing is computed twice
    (as in https://arxiv.org/abs/2410.10989). Softmax, sums and the weight's gradient are in fp32 for any input.

    Args:
        hidden: (B, T, C).
        weight: (V, C); under vocabulary parallelism this rank's rows, and the gradient of `hidden` is then its part.
        labels: (B, T), of the whole vocabulary; IGNORE_INDEX where there is no loss.
        scale: Scalar on the device.
        z_loss: Adds this times the squared log of the softmax's denominator (https://arxiv.org/abs/2204.02311) where
            gradients are computed; an evaluation without them is cross entropy alone.
        first_class: The class of the first row of `weight`.
        group: Ranks that hold the other rows; all of them return the same loss.
        softmax: `softmax_loss`, or the same compiled.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    rows, matrix = hidden.detach().flatten(0, -2), weight.detach()  # (N, C), (V, C)
    gradients = (torch.empty_like(rows), torch.zeros_like(matrix, dtype=torch.float32)) if needs_grad else None

    def loss_of(part: slice) -> Tensor:
        chunk, chunk_labels = rows[part], labels.flatten()[part]  # (n, C), (n,)
        logits = _logits(chunk, matrix, whole=softmax is not softmax_loss)  # (n, V)
        at_label = logits.gather(1, _classes(chunk_labels, first_class, len(matrix))[1]).squeeze(1)
        loss, logits_grad = softmax(logits, at_label, chunk_labels, scale, needs_grad, z_loss, first_class, group)
        if gradients is not None:
            assert logits_grad is not None
            gradients[0][part] = _gradients(logits_grad, chunk, matrix, gradients[1])
        return loss

    size = tokens_per_chunk(len(rows), 4 if softmax is softmax_loss else rows.element_size())
    with torch.no_grad():
        total = torch.stack([loss_of(slice(start, start + size)) for start in range(0, len(rows), size)]).sum()
    if gradients is None:
        return total
    # Two nodes, not one: schedules that split the backward pass ask for each gradient at another time.
    with_hidden: Tensor = _WithGradient.apply(hidden, total, gradients[0].view_as(hidden))  # pyright: ignore
    with_weight: Tensor = _WithGradient.apply(weight, torch.zeros_like(total), gradients[1])  # pyright: ignore
    return with_hidden + with_weight


def _logits(hidden: Tensor, weight: Tensor, whole: bool) -> Tensor:
    """hidden (n, C) @ weight (V, C).T in fp32; `whole`: in the matmul's own dtype. A compiled softmax converts them in
    passing, where an eager one would need a copy of them all."""
    if hidden.dtype == torch.float32 or whole:
        return hidden @ weight.T
    logits = torch.empty(len(hidden), len(weight), device=hidden.device)
    block = VOCAB_BLOCK[hidden.device.type]
    for columns, rows in zip(logits.split(block, dim=1), weight.split(block), strict=True):
        if hidden.is_cuda:  # its sums, which are in fp32, come without being rounded
            torch.mm(hidden, rows.T, out_dtype=torch.float32, out=columns)
        else:
            columns.copy_(hidden @ rows.T)
    return logits


def _gradients(logits_grad: Tensor, hidden: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
    """Returns logits_grad (n, V) @ weight (V, C), and adds logits_grad.T @ hidden (n, C) to `weight_grad`."""
    if hidden.dtype == torch.float32:
        weight_grad.addmm_(logits_grad.T, hidden)
        return logits_grad @ weight
    block = VOCAB_BLOCK[hidden.device.type]
    if logits_grad.dtype != hidden.dtype:  # each row goes into the front of its own memory, which has been read by then
        converted = logits_grad.view(hidden.dtype)[:, : len(weight)]
        for new, old in zip(converted.split(block, dim=1), logits_grad.split(block, dim=1), strict=True):
            new.copy_(old.to(new.dtype))
        logits_grad = converted
    if hidden.is_cuda:
        torch.addmm(weight_grad, logits_grad.T, hidden, out_dtype=torch.float32, out=weight_grad)
    else:
        for columns, rows_grad in zip(logits_grad.split(block, dim=1), weight_grad.split(block), strict=True):
            rows_grad.add_(columns.T @ hidden)
    return logits_grad @ weight


class _WithGradient(torch.autograd.Function):
    """A value whose gradient with respect to `tensor` is known already. Its memory is handed over: once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, tensor.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        if ctx.gradient is None:
            raise RuntimeError("The gradient of this loss was computed once and has been handed out.")
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grads[0]).to(ctx.dtype), None, None

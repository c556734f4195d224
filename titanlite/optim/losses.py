"""Losses for `training.loss`, and base classes for plugin losses.

Invariant: A loss is a sum over valid tokens, never a mean, so the losses of all ranks and
microbatches add up to the same number however a batch is split. The fused cross entropy never holds
the logits of all tokens at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from titanlite.config.errors import UserError
from titanlite.model.attention import compile_once
from titanlite.model.llama import soft_cap
from titanlite.model.microbatch import IGNORE_INDEX

VOCAB_BLOCK = 2048
"""Number of classes that a CPU converts between fp32 and a lower precision at once, so that a block
fits into its cache. A GPU converts all classes with one kernel."""
TOKENS_OF_FULL_CHUNKS = 4 * 4096
"""Smallest number of tokens in a microbatch at which chunks reach their maximum size; see
`tokens_per_chunk`."""


@dataclass(frozen=True)
class LossRecipe:
    """Options that the constructor of a loss receives.

    Attributes:
        z_loss: Weight of the z-loss, from `training.z_loss`.
        compiled: Whether the job compiles the loss.
        tensor: 1-D mesh of the tensor parallel ranks. None without tensor parallelism.
        softcap: Limit of the logits, from `model.logit_softcap`. 0 means no limit.
    """

    z_loss: float
    compiled: bool
    tensor: DeviceMesh | None
    softcap: float = 0.0


class Loss(ABC):
    """Base class of losses that are computed from the hidden states after the final norm.

    If your loss needs logits, as most losses do, subclass `LogitsLoss` instead.

    Args:
        recipe: Options of the loss.
    """

    backward_reads_weight: ClassVar[bool] = True
    """Whether the backward pass reads the output matrix. If so, FSDP keeps the matrix unsharded
    or gathers it again. Set this to False only if the forward pass already computes all gradients:
    FSDP frees the matrix between the two passes, and reading it would give wrong gradients.
    """

    def __init__(self, recipe: LossRecipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` times the sum of the losses of all tokens that have a label.

        The result is a sum, never a mean, so that it does not depend on how a batch is split.

        Args:
            hidden: Hidden states, shape (B, T, C). With tensor parallelism, a DTensor sharded along
                T.
            weight: Output matrix, shape (V, C). With tensor parallelism, a DTensor sharded along V.
            labels: Token ids, shape (B, T). IGNORE_INDEX marks tokens without a loss.
            scale: Scalar on the device, usually 1 / number of valid tokens in the global batch.

        Returns:
            Scalar in fp32, the same on all tensor parallel ranks.
        """


class CrossEntropy(Loss):
    """Cross entropy, fused with the output projection and computed in chunks of tokens.

    With tensor parallelism, each rank computes the logits of its shard of the vocabulary.
    """

    backward_reads_weight = False

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` times the summed cross entropy. See `Loss.__call__` for the arguments."""
        first_class = 0
        group = None
        tensor_mesh = self.recipe.tensor
        if tensor_mesh is not None:
            # Each tensor parallel rank computes the logits of all tokens for its rows of the output
            # matrix, and therefore the whole gradient of these rows.
            assert isinstance(weight, DTensor)
            hidden = _gather_sequence(hidden)
            first_class = _find_first_class(weight, tensor_mesh)
            weight = weight.to_local()
            group = tensor_mesh.get_group()

        return linear_cross_entropy_sum(
            hidden,
            weight,
            labels,
            scale,
            z_loss=self.recipe.z_loss,
            softcap=self.recipe.softcap,
            first_class=first_class,
            group=group,
            compiled=self.recipe.compiled,
        )


class LogitsLoss(Loss):
    """Base class of losses that are computed from logits. Override `token_losses`.

    The logits of all tokens of a microbatch exist at once in fp32.
    """

    def __init__(self, recipe: LossRecipe) -> None:
        super().__init__(recipe)
        self._sum: Callable[[Tensor, Tensor], Tensor] = self._sum_token_losses
        if recipe.compiled:
            self._sum = torch.compile(self._sum_token_losses)

    @abstractmethod
    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token, shape (N,), without reduction.

        Args:
            logits: Logits in fp32, shape (N, V).
            labels: Token ids, shape (N,). Losses of tokens with the label IGNORE_INDEX are ignored.
        """

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` times the sum of `token_losses`. See `Loss.__call__` for the arguments."""
        logits = _project(hidden, weight)  # (B, T, V)
        return self._sum(logits.flatten(0, 1), labels.flatten()) * scale

    def _sum_token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of all tokens that have a label, including the z-loss.

        Args:
            logits: Logits in any dtype, shape (N, V).
            labels: Token ids, shape (N,). Tokens with the label IGNORE_INDEX do not count.

        Raises:
            UserError: If `token_losses` does not return one loss per token.
        """
        logits = soft_cap(logits.float(), self.recipe.softcap)
        losses = self.token_losses(logits, labels)
        if losses.shape != labels.shape:  # broadcasting would scale the loss without an error
            raise UserError(
                f"training.loss: {type(self).__name__}.token_losses returned shape "
                f"{tuple(losses.shape)}, but must return one loss per token, shape "
                f'{tuple(labels.shape)}. Use reduction="none".'
            )

        if self.recipe.z_loss:
            losses = losses + self.recipe.z_loss * logits.logsumexp(-1).square()
        return losses.masked_fill(labels == IGNORE_INDEX, 0.0).sum()


class Reference(LogitsLoss):
    """Cross entropy from unfused torch functions, as a simple reference to check other losses."""

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of each token, shape (N,)."""
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")


def _find_first_class(weight: DTensor, mesh: DeviceMesh) -> int:
    """Return the first class (token id) in this rank's shard of the output matrix.

    Args:
        weight: Output matrix, shape (V, C), sharded along V, with one row per class.
        mesh: 1-D mesh of the tensor parallel ranks.
    """
    classes_per_rank = math.ceil(len(weight) / mesh.size())  # the last rank may have fewer
    return classes_per_rank * mesh.get_local_rank()


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits (B, T, V) of the whole vocabulary on every tensor parallel rank.

    Args:
        hidden: Hidden states, shape (B, T, C), possibly a DTensor sharded along T.
        weight: Output matrix, shape (V, C), possibly a DTensor sharded along V.
    """
    if not isinstance(weight, DTensor):
        return F.linear(hidden, weight)

    local_logits = F.linear(_gather_sequence(hidden), weight.to_local())  # (B, T, V / ranks)
    return gather_logits(local_logits, weight)


def gather_logits(local_logits: Tensor, weight: DTensor) -> Tensor:
    """All-gather logits that are sharded along the vocabulary, and return them, shape (..., V).

    Args:
        local_logits: Logits of this rank's part of the vocabulary, shape (..., V / ranks).
        weight: Output matrix, shape (V, C), sharded along V.
    """
    full_shape = torch.Size((*local_logits.shape[:-1], weight.shape[0]))
    full_stride = torch.empty(full_shape, device="meta").stride()
    vocab_dim = local_logits.ndim - 1
    logits = DTensor.from_local(
        local_logits, weight.device_mesh, [Shard(vocab_dim)], shape=full_shape, stride=full_stride
    )
    return logits.full_tensor()


def _gather_sequence(hidden: Tensor) -> Tensor:
    """All-gather hidden states (B, T, C) that are sharded along T by tensor parallelism."""
    assert isinstance(hidden, DTensor)
    whole = hidden.redistribute(placements=[Replicate()])
    # Each rank computes the gradient of `hidden` from its shard of the vocabulary only. The sum
    # over the ranks is the whole gradient.
    return whole.to_local(grad_placements=[Partial()])


def tokens_per_chunk(num_tokens: int, fewer_launches: bool) -> int:
    """Return the chunk size of the fused loss: the number of tokens whose logits exist at once.

    Usually this is an eighth of the microbatch, which takes an eighth of the memory. A chunk has at
    least 512 tokens, because each chunk reads and writes the whole weight gradient, and small
    matmuls are slow. It has at most 2048 tokens, because a chunk of a large model should not take
    more memory than the backward pass of a block.

    Args:
        num_tokens: Number of tokens in the microbatch.
        fewer_launches: Double the chunk size and allow up to 4096 tokens, for fewer kernel
            launches.
    """
    chunk_size = max(512, num_tokens // 8)
    if fewer_launches:
        return min(4096, 2 * chunk_size)
    return min(2048, chunk_size)


class Targets(NamedTuple):
    """The labels of n tokens, converted to the form that `softmax_loss` needs.

    Without z-loss and softcap, the loss of a token is `loss_factor * (logsumexp(logits) -
    logits[column])`. Its gradient is `loss_factor * softmax(logits)`, plus `label_grad` at
    `column`. Labels are converted once for all tokens, and the result is then split into chunks.

    Attributes:
        column: Column of each label in the logits of this rank, shape (n, 1). Any valid column if
            the class belongs to another rank.
        is_local: Whether the class of each label belongs to this rank, shape (n,).
        loss_factor: Factor that multiplies the loss of each token, shape (n,). 0 for ignored
            labels.
        label_grad: `-loss_factor` if the class belongs to this rank, else 0, shape (n, 1).
    """

    column: Tensor
    is_local: Tensor
    loss_factor: Tensor
    label_grad: Tensor


def prepare_targets(labels: Tensor, scale: Tensor, first_class: int, num_classes: int) -> Targets:
    """Convert labels to `Targets` for a rank that holds a contiguous range of the classes.

    With tensor parallelism, each rank computes the logits of only some classes. For example, on a
    rank with the classes 100 to 199, label 105 becomes column 5 of the logits, and label 7 is not
    local.

    Args:
        labels: Classes of the whole vocabulary, shape (n,). IGNORE_INDEX marks tokens without a
            loss.
        scale: Factor that multiplies the loss, a scalar on the device.
        first_class: First class of this rank.
        num_classes: Number of classes of this rank.
    """
    # Find the column of each label in the logits of this rank.
    column = labels - first_class
    is_local = (column >= 0) & (column < num_classes)
    valid_column = column.clamp(0, num_classes - 1)  # `gather` fails for any other column

    # Without z-loss and softcap, the gradient with respect to the logits is
    # loss_factor * (softmax(logits) - one_hot(label)). The label gradient is the second term, which
    # is zero except in the column of a local label.
    loss_factor = torch.where(labels == IGNORE_INDEX, 0.0, scale)
    label_grad = torch.where(is_local, -loss_factor, 0.0)

    # `gather` and `scatter_add_` on the logits (n, V) need columns and label gradients of the shape
    # (n, 1).
    return Targets(
        column=valid_column.unsqueeze(1),
        is_local=is_local,
        loss_factor=loss_factor,
        label_grad=label_grad.unsqueeze(1),
    )


def softmax_loss(
    logits: Tensor,
    label_logits: Tensor,
    targets: Targets,
    needs_grad: bool,
    z_loss: float,
    softcap: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute unscaled token losses, and overwrite the logits with the gradient of the scaled loss.

    In eager mode the logits must be fp32. A compiled graph accepts any dtype, reads the logits
    twice (for the sums and for the gradient), and stores no other tensor of their size.

    Args:
        logits: Logits of this rank's classes, shape (n, V).
        label_logits: Logits of the labels, shape (n,). This function does not gather them from
            `logits` itself, because the compiler could overwrite `logits` first.
        targets: Prepared labels.
        needs_grad: Whether to compute the gradient. Without it, `z_loss` is ignored.
        z_loss: Weight of the z-loss; see `linear_cross_entropy_sum`.
        softcap: Limit of the logits, or 0 for no limit.
        group: Ranks that hold the other classes, or None.

    Returns:
        The losses, shape (n,), and the gradient of the logits, shape (n, V), in the memory and
        dtype of `logits`. Losses of ignored labels are undefined. The gradient is None if
        `needs_grad` is False.
    """
    # In eager mode, `x`, `exp` and `gradient` below share the memory of `logits`.
    x, slope = _cap_in_place(logits.float(), softcap)

    # The softmax of a row x is exp(x - max) / denominator. The maximum is also subtracted from the
    # label logit, so the loss is log(denominator) - label logit.
    row_max = _all_reduce(x.amax(-1), "max", group)  # (n,)
    label_logit = soft_cap(label_logits.float(), softcap) - row_max
    is_compiling = torch.compiler.is_compiling()
    if is_compiling:
        exp = (x - row_max[:, None]).exp()
    else:
        exp = x.sub_(row_max[:, None]).exp_()
    denominator = exp.sum(-1)
    # Without a group nothing is stacked, so that a compiled graph can write the gradient in place.
    if group is not None:
        sums = torch.stack((denominator, torch.where(targets.is_local, label_logit, 0.0)))
        denominator, label_logit = _all_reduce(sums, "sum", group)
    log_denominator = denominator.log()
    loss = log_denominator - label_logit
    if not needs_grad:
        return loss, None

    factor = targets.loss_factor
    if z_loss:
        log_sum_exp = log_denominator + row_max
        loss = loss + z_loss * log_sum_exp.square()
        factor = factor * (1.0 + 2.0 * z_loss * log_sum_exp)

    if is_compiling:
        # Compute the exponential again, because a graph on a CPU would otherwise store all of it.
        softmax = (x - row_max[:, None] - log_denominator[:, None]).exp()
        is_label = torch.arange(x.shape[1], device=x.device) == targets.column
        gradient = softmax * factor[:, None] + torch.where(is_label, targets.label_grad, 0.0)
        return loss, logits.copy_(gradient if slope is None else gradient * slope)

    gradient = exp.mul_((factor / denominator)[:, None])
    gradient.scatter_add_(1, targets.column, targets.label_grad)
    return loss, gradient if slope is None else gradient.mul_(slope)


def _cap_in_place(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Apply `soft_cap` to logits in place.

    Returns:
        The capped logits and their derivative with respect to the logits. Without a softcap, the
        derivative is None.
    """
    if not softcap:
        return logits, None
    tanh = logits.div_(softcap).tanh_()
    slope = 1.0 - tanh.square()  # before the next line overwrites `tanh`
    return tanh.mul_(softcap), slope


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    first_class: int = 0,
    group: dist.ProcessGroup | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return `scale` times the summed cross entropy of the logits `hidden @ weight.T`, in fp32.

    The logits exist for one chunk of tokens at a time. The forward pass computes the gradients
    together with the loss, so nothing is computed twice (https://arxiv.org/abs/2410.10989). The
    gradient of `hidden` overwrites `hidden`. Softmax and sums over chunks are in fp32 for any
    input; the backward pass returns each gradient in the dtype of its tensor.

    Args:
        hidden: Hidden states, shape (B, T, C). Overwritten if gradients are computed, so nothing
            may read them afterward.
        weight: Output matrix, shape (V, C). With a group, the rows of this rank only. The caller
            must then sum the gradient of `hidden` over the ranks of the group.
        labels: Classes of the whole vocabulary, shape (B, T). IGNORE_INDEX marks tokens without a
            loss.
        scale: Scalar on the device.
        z_loss: Weight of the squared log of the softmax denominator
            (https://arxiv.org/abs/2204.02311). Ignored if no gradients are computed, as in an
            evaluation.
        softcap: If not 0, replace each logit x with `softcap` * tanh(x / `softcap`).
        first_class: Class of the first row of `weight`.
        group: Ranks that hold the other rows of the output matrix. All of them return the same
            loss.
        compiled: Compile the softmax with its loss and gradient.
    """
    # Overwriting `tokens` overwrites `hidden`. Autograd detects this, and raises an error if an
    # operator, such as another head, has already saved `hidden` for its backward pass.
    tokens = hidden.detach().flatten(0, -2)  # (N, C)
    matrix = weight.detach()
    labels = labels.flatten()
    # On a GPU the compiled function is one kernel instead of 13. On a CPU the compile time would
    # exceed the gain.
    prepare = compile_once(prepare_targets) if compiled and hidden.is_cuda else prepare_targets
    targets = prepare(labels, scale, first_class, len(matrix))
    compute_loss = compile_once(softmax_loss) if compiled else softmax_loss

    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    weight_grad = torch.empty_like(matrix, dtype=torch.float32) if needs_grad else None
    # The carriers are zeros that are added to the loss at the end, so that its backward pass
    # returns the gradients that the chunks compute. Create them before `hidden` is overwritten,
    # because autograd can reject `hidden` afterward.
    hidden_grad = tokens.view_as(hidden)  # each chunk overwrites its tokens with their gradient
    carriers = _carry_gradients(hidden, hidden_grad, weight, weight_grad)

    def compute_chunk(chunk: slice) -> Tensor:
        """Return the token losses of one chunk, shape (n,), and accumulate its gradients."""
        x = tokens[chunk]  # (n, C)
        chunk_targets = Targets(*(tensor[chunk] for tensor in targets))
        logits = x @ matrix.T if compiled else fp32_logits(x, matrix)  # (n, V)
        label_logits = logits.gather(1, chunk_targets.column).squeeze(1)
        loss, logits_grad = compute_loss(
            logits, label_logits, chunk_targets, needs_grad, z_loss, softcap, group
        )
        if weight_grad is not None and logits_grad is not None:
            _backpropagate(logits_grad, x, matrix, weight_grad, is_first=chunk.start == 0)
        return loss

    # Use larger chunks if a shard of the vocabulary makes the logits smaller. An eager step on a
    # GPU also has the memory for them.
    larger_chunks = group is not None or (hidden.is_cuda and not compiled)
    size = tokens_per_chunk(len(tokens), larger_chunks)
    chunks = [slice(start, start + size) for start in range(0, len(tokens), size)]
    with torch.no_grad():
        losses = torch.cat([compute_chunk(chunk) for chunk in chunks])  # (N,)
        total = losses.masked_fill_(labels == IGNORE_INDEX, 0.0).sum() * scale
    return sum(carriers, start=total)


def _carry_gradients(
    hidden: Tensor, hidden_grad: Tensor, weight: Tensor, weight_grad: Tensor | None
) -> list[Tensor]:
    """Create zeros that attach precomputed gradients to a loss.

    After you add the zeros to a loss, its backward pass returns the gradients. Until it runs, you
    can still write to `hidden_grad` and `weight_grad`.

    Args:
        hidden: Hidden states.
        hidden_grad: Gradient of `hidden`.
        weight: Output matrix.
        weight_grad: Gradient of `weight`. None if no gradients are needed.

    Returns:
        One zero per gradient, or an empty list if no gradients are needed.
    """
    if weight_grad is None:
        return []

    # Some pipeline schedules compute the two gradients at different times, so they need separate
    # zeros.
    return [
        _GradientCarrier.apply(hidden, hidden_grad),
        _GradientCarrier.apply(weight, weight_grad),
    ]


def fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits `hidden @ weight.T` in fp32, shape (n, V).

    A plain matmul would first store all logits in bfloat16. Compiled losses do not call this
    function, because the compiler fuses the conversion.

    Args:
        hidden: Hidden states, shape (n, C).
        weight: Output matrix, shape (V, C).
    """
    if hidden.dtype == torch.float32:
        return hidden @ weight.T

    logits = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
    if hidden.is_cuda:
        # With out_dtype, the kernel returns its fp32 sums unrounded.
        return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits)

    # A CPU has no such kernel. Compute the logits of some classes at a time, so that only these
    # exist in bfloat16.
    logits_blocks = logits.split(VOCAB_BLOCK, dim=1)
    weight_blocks = weight.split(VOCAB_BLOCK)
    for logits_block, weight_block in zip(logits_blocks, weight_blocks, strict=True):
        logits_block.copy_(hidden @ weight_block.T)
    return logits


def _backpropagate(
    logits_grad: Tensor, hidden: Tensor, weight: Tensor, weight_grad: Tensor, is_first: bool
) -> None:
    """Add a chunk's weight gradient to `weight_grad`, and overwrite `hidden` with its gradient.

    Args:
        logits_grad: Gradient of the logits, shape (n, V). Overwritten.
        hidden: Hidden states, shape (n, C). Overwritten with the gradient of the hidden states.
        weight: Output matrix, shape (V, C).
        weight_grad: Sum of the weight gradients, shape (V, C), fp32.
        is_first: Initialize `weight_grad` instead of adding to it.
    """
    logits_grad = _convert_logits_grad(logits_grad, hidden.dtype)
    _add_weight_grad(weight_grad, logits_grad, hidden, is_first)
    torch.mm(logits_grad, weight, out=hidden)


def _convert_logits_grad(logits_grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the logits gradient, shape (n, V), to `dtype`.

    On a CPU, a gradient of more than `VOCAB_BLOCK` classes is converted in its own memory, because
    a copy would be large.
    """
    num_tokens, num_classes = logits_grad.shape
    if logits_grad.dtype == dtype or logits_grad.is_cuda or num_classes <= VOCAB_BLOCK:
        return logits_grad.to(dtype)
    # Store the rows of the result without gaps. If each row were converted in its own place, old
    # values would remain between the rows. On CPUs with AMX, the bf16 matmul of oneDNN 3.12 reads
    # these values, which can be NaN.
    return _convert_in_place(logits_grad, dtype, num_tokens * VOCAB_BLOCK)


def _add_weight_grad(
    weight_grad: Tensor, logits_grad: Tensor, hidden: Tensor, is_first: bool
) -> None:
    """Add a chunk's weight gradient, `logits_grad.T @ hidden`, to `weight_grad` in fp32.

    On a CPU, a bfloat16 product is rounded to bfloat16 before it is added.

    Args:
        weight_grad: Sum of the weight gradients, shape (V, C), fp32.
        logits_grad: Gradient of the logits, shape (n, V).
        hidden: Hidden states, shape (n, C), in the dtype of `logits_grad`.
        is_first: Initialize `weight_grad` instead of adding to it.
    """
    beta = 0 if is_first else 1  # factor of the old values of `weight_grad`
    if hidden.dtype == torch.float32:
        weight_grad.addmm_(logits_grad.T, hidden, beta=beta)
    elif hidden.is_cuda:
        # One kernel multiplies bfloat16 matrices and adds the products in fp32.
        torch.addmm(
            weight_grad,
            logits_grad.T,
            hidden,
            beta=beta,
            out_dtype=torch.float32,
            out=weight_grad,
        )
    else:
        _add_rounded_weight_grad(weight_grad, logits_grad, hidden, is_first)


def _add_rounded_weight_grad(
    weight_grad: Tensor, logits_grad: Tensor, hidden: Tensor, is_first: bool
) -> None:
    """Add the weight gradient of a chunk to `weight_grad` on a CPU.

    A CPU has no matmul of bfloat16 matrices with an fp32 result, so the gradient of the chunk is
    rounded to bfloat16. See `_add_weight_grad` for the arguments.
    """
    # Compute some rows at a time, so that only these rows exist in bfloat16.
    weight_blocks = weight_grad.split(VOCAB_BLOCK)
    logits_blocks = logits_grad.split(VOCAB_BLOCK, dim=1)
    for weight_block, logits_block in zip(weight_blocks, logits_blocks, strict=True):
        product = logits_block.T @ hidden
        if is_first:
            weight_block.copy_(product)
        else:
            weight_block.add_(product)


def _convert_in_place(x: Tensor, dtype: torch.dtype, block_size: int) -> Tensor:
    """Convert a matrix to a smaller dtype, and store the result at the start of its memory.

    Blocks of values are converted in order, so a block only overwrites values that have already
    been converted. For example, converting 8 values from fp32 to bfloat16 in blocks of 4 reads the
    bytes 0-15 and writes the bytes 0-7, then reads the bytes 16-31 and writes the bytes 8-15.

    Args:
        x: Contiguous matrix. Overwritten.
        dtype: A smaller dtype than the dtype of `x`.
        block_size: Number of values to convert at once.

    Returns:
        The converted matrix, which shares the memory of `x`.
    """
    values = x.view(-1)
    memory = x.view(dtype).view(-1)  # has more than x.numel() elements of the smaller dtype
    result = memory[: x.numel()]

    for block, result_block in zip(values.split(block_size), result.split(block_size), strict=True):
        # Convert to a copy first, because a block can overlap its result.
        result_block.copy_(block.to(dtype))
    return result.view(x.shape)


def _all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce a tensor over a group.

    Args:
        x: Tensor to reduce.
        operation: Reduction, such as "sum" or "max".
        group: Ranks to reduce over. None returns `x` unchanged.
    """
    if group is None:
        return x
    return collectives.wait_tensor(collectives.all_reduce(x, operation, group))


class _GradientCarrier(torch.autograd.Function):
    """Autograd function that returns a zero and, in the backward pass, a precomputed gradient.

    Add the zero to a loss to attach the gradient to it. The backward pass of the loss multiplies
    `gradient` by the incoming gradient, converts it to the dtype of `tensor`, and returns it as the
    gradient of `tensor`. Until then, you can still write to `gradient`. The backward pass can run
    only once, because it may overwrite `gradient`, and then frees it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        ctx.dtype = tensor.dtype
        return torch.zeros((), device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        gradient = ctx.gradient
        if gradient is None:
            raise RuntimeError("This loss supports only one backward pass. Compute the loss again.")
        ctx.gradient = None
        result = gradient
        if gradient.dtype != ctx.dtype:
            result = torch.empty_like(gradient, dtype=ctx.dtype)
        torch.mul(gradient, grads[0], out=result)  # one kernel multiplies and converts
        return result, None

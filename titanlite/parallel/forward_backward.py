"""Forward and backward passes of one optimizer step, for every parallel layout.

Invariant: The loss of a step is the summed loss of all valid tokens in the global batch, divided by
the number of valid tokens. Neither this loss nor its gradients depend on how sequences, positions,
vocabulary and blocks are distributed over ranks, for a given global batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import record_function

from titanlite.config.registry import LOSSES
from titanlite.config.run import Run
from titanlite.model.attention import DocumentBounds, document_mask, equal_bounds
from titanlite.model.llama import Llama
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch
from titanlite.optim.losses import CrossEntropy, LossRecipe
from titanlite.parallel.context import flex_mask, local_chunks
from titanlite.parallel.fsdp import configure_microbatch
from titanlite.parallel.memory_savers import frees_output_after_forward, fsdp_modules
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.offloaded_gradients import OffloadedGradients
from titanlite.parallel.parallelize import ShardedModel
from titanlite.parallel.pipeline import build_schedule, forward_only

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.nn.attention.flex_attention import BlockMask

    from titanlite.model.attention import Mask

ScaledLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function that computes a loss, such as `Loss.__call__`.

Its arguments are the hidden states (B, T, C), the output matrix (V, C), the labels (B, T), and a
scale, which multiplies the sum of the token losses.
"""


class TokenCount:
    """Number of valid labels in the global batch, computed by an asynchronous all-reduce.

    The all-reduce sums the counts of all data parallel ranks. It overlaps with the forward pass of
    the model, because the count is first needed to compute the loss.
    """

    def __init__(
        self, num_valid_tokens: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Start an asynchronous all-reduce of the number of valid labels.

        Args:
            num_valid_tokens: Number of valid labels on this rank.
            group: Data parallel group of this rank. Its ranks read different sequences.
            device: Device of this rank.
        """
        self._total = torch.full((), num_valid_tokens, dtype=torch.int64, device=device)
        self._all_reduce = dist.all_reduce(self._total, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the all-reduce, and return the global number, a scalar on the device.

        On a GPU, only the current stream waits, not the CPU. The method can be called repeatedly.
        """
        assert self._all_reduce is not None  # this rank is in the group
        self._all_reduce.wait()
        return self._total


@dataclass(frozen=True)
class NormalizedLoss:
    """A loss divided by the number of valid labels of the global batch, or by 1 in evaluation.

    All microbatches on all ranks divide by the same number, so you can add their losses.

    Attributes:
        loss_fn: Function that returns a scaled sum of token losses, such as `CrossEntropy`.
        get_divisor: Function that returns the divisor, a scalar on the device. It is called after
            the forward pass of the blocks, because it can wait for an all-reduce.
        requires_grad: Always False. The zero-bubble schedules of torch 2.12 read `requires_grad`
            and `grad_fn` from all arguments of a stage, as if they were tensors.
        grad_fn: Always None; see `requires_grad`.
    """

    loss_fn: ScaledLoss
    get_divisor: Callable[[], Tensor]
    requires_grad: ClassVar[bool] = False
    grad_fn: ClassVar[None] = None

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one microbatch, a scalar on the device.

        Args:
            hidden: Hidden states after the final norm, shape (B, T, C).
            weight: Output matrix, shape (V, C).
            labels: Labels, shape (B, T).
        """
        scale = self.get_divisor().float().reciprocal()
        return self.loss_fn(hidden, weight, labels, scale)


class LossHead(NamedTuple):
    """Model head that computes the loss of a microbatch instead of its logits.

    `Llama.forward` receives it as `head`, and calls it while FSDP holds the unsharded output
    matrix. A chunked loss can therefore compute the logits of a few tokens at a time.

    The calls are nested in this order: `Llama.forward`, `Output.forward` (unless embeddings are
    tied), this head, `NormalizedLoss` (which sets the scale), and a `Loss`. The default `Loss` is
    `CrossEntropy`, which calls `linear_cross_entropy_sum`.

    A pipeline schedule splits the arguments of the model into microbatches, including the tensors
    inside tuples. It therefore splits `labels`, but passes on `loss` unchanged, because a
    `NormalizedLoss` is neither a tensor nor a tuple.

    Attributes:
        labels: Labels, shape (B, T).
        loss: Function of hidden states, output matrix and labels.
    """

    labels: Tensor
    loss: NormalizedLoss

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the loss of one microbatch for `self.labels`, a scalar on the device.

        Args:
            hidden: Hidden states after the final norm, shape (B, T, C).
            weight: Output matrix, shape (V, C).
        """
        with record_function("loss"):
            return self.loss(hidden, weight, self.labels)


class ForwardBackward:
    """Runs the forward and backward passes of one optimizer step, one microbatch after another.

    Gradients accumulate over the microbatches. FSDP reduces them over the ranks once per step, or
    after each microbatch if `parallelism.fsdp_reduce` is "microbatch". It all-gathers the blocks
    for each microbatch, but the output matrix only once per step.

    Attributes:
        loss_fn: The training loss, called once per microbatch.
        offloaded_gradients: Accumulates the gradients of several microbatches on the CPU. None
            unless the job uses CPU offload and reduces gradients after each microbatch.
    """

    def __init__(self, model: ShardedModel, mesh: Mesh, run: Run, device: torch.device) -> None:
        """Build the training loss that the job selects with `training.loss`.

        Args:
            model: This rank's part of the model.
            mesh: Layout of the ranks.
            run: The validated job and the number of ranks.
            device: Device of this rank.
        """
        self._model = model.whole
        self._mesh = mesh
        self._device = device
        self._run = run.resolve_attention_backend(on_gpu=device.type == "cuda")

        recipe = LossRecipe(
            run.job.training.z_loss, run.compiles("loss"), mesh.tensor, run.arch.logit_softcap
        )
        self.loss_fn: ScaledLoss = LOSSES.make(run.job.training.loss, recipe, job=run.job)
        self._cross_entropy = CrossEntropy(recipe)
        self._frees_output_after_forward = frees_output_after_forward(run)

        self._reduces_each_microbatch = run.fsdp_reduce == "microbatch"
        self.offloaded_gradients: OffloadedGradients | None = None
        if self._reduces_each_microbatch and run.job.training.enable_cpu_offload:
            self.offloaded_gradients = OffloadedGradients(model.whole.parameters())

    def __call__(self, microbatches: Sequence[Microbatch], global_tokens: TokenCount) -> Tensor:
        """Accumulate the gradients of all microbatches and return this rank's part of the loss.

        FSDP sums gradients over the ranks in the last microbatch, or in every microbatch; see
        `Run.fsdp_reduce`. The losses of all ranks in `mesh.loss_group` add up to the global loss.

        Args:
            microbatches: This rank's sequences of the global batch.
            global_tokens: Number of valid labels in the global batch.
        """
        loss_fn = NormalizedLoss(self.loss_fn, global_tokens.wait)
        total_loss = torch.zeros((), device=self._device)
        for i, microbatch in enumerate(microbatches):
            is_last = i == len(microbatches) - 1
            self._configure_fsdp(is_last)
            with record_function("forward"):
                loss = self._forward(microbatch, loss_fn)
            self._backward(loss)
            total_loss += loss.detach()

        if self.offloaded_gradients is not None:
            # This first adds the gradients of the last microbatch to the sums.
            self.offloaded_gradients.move_sums_to_parameters()
        return total_loss

    def _backward(self, loss: Tensor) -> None:
        """Run the backward pass of one microbatch.

        With offloaded gradients, first add the gradients of the previous microbatch to the sums on
        the CPU, while the GPU computes the forward pass of this microbatch.
        """
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.move_gradients_to_sums()
        with record_function("backward"):
            loss.backward()

    def _configure_fsdp(self, is_last: bool) -> None:
        """Configure when FSDP reduces gradients and frees the output matrix in the next microbatch.

        The output matrix, the largest parameter, stays unsharded until the last microbatch of the
        step (`is_last`). In that microbatch, FSDP frees it after the forward pass if
        `frees_output_after_forward` allows it, and otherwise after the backward pass.
        """
        configure_microbatch(
            self._model,
            reduces_gradients=is_last or self._reduces_each_microbatch,
            frees_output_after_forward=is_last and self._frees_output_after_forward,
            frees_output_after_backward=is_last,
        )

    def _forward(self, microbatch: Microbatch, loss_fn: NormalizedLoss) -> Tensor:
        """Return the loss of one microbatch."""
        inputs = local_inputs([microbatch], self._mesh, self._run)
        return self._model(inputs.tokens, **inputs.forward_options(loss_fn))

    @torch.no_grad()
    def evaluate(
        self, microbatches: Sequence[Microbatch], loss_fn: ScaledLoss | None = None
    ) -> Tensor:
        """Return this rank's part of a summed loss in float64, without gradients.

        By default, compute the cross entropy even if `training.loss` selects another loss, so that
        the results of different runs are comparable.

        Args:
            microbatches: This rank's sequences, in any number of microbatches.
            loss_fn: Another loss to compute. On ranks with the output layer, it is called once per
                microbatch, in order. A pipeline schedule also calls it for padding microbatches,
                which come last.
        """
        if loss_fn is None:
            loss_fn = self._cross_entropy
        summed_loss = _build_summed_loss(loss_fn, self._device)
        with _evaluation_mode(self._model):
            return self._sum_losses(microbatches, summed_loss)

    def _sum_losses(self, microbatches: Sequence[Microbatch], loss_fn: NormalizedLoss) -> Tensor:
        """Return the sum of the losses of all microbatches, a float64 scalar."""
        losses = [self._forward(microbatch, loss_fn) for microbatch in microbatches]
        return torch.stack(losses).double().sum()


def _build_summed_loss(loss_fn: ScaledLoss, device: torch.device) -> NormalizedLoss:
    """Build a loss that sums the token losses without normalizing them."""
    one = torch.ones((), device=device)  # the divisor of all microbatches
    return NormalizedLoss(loss_fn, get_divisor=lambda: one)


@contextmanager
def _evaluation_mode(model: Llama) -> Iterator[None]:
    """Turn off dropout in a `with` block, and then free the parameters that FSDP has gathered."""
    model.eval()
    try:
        yield
    finally:
        model.train()
        for module in fsdp_modules(model):
            module.reshard()  # FSDP frees some parameters only in the backward pass


class PipelineForwardBackward(ForwardBackward):
    """Runs the microbatches of one optimizer step with a pipeline schedule, such as 1F1B.

    The rank with the last stage computes the loss. All other ranks return a loss of 0.
    """

    def __init__(self, model: ShardedModel, mesh: Mesh, run: Run, device: torch.device) -> None:
        """Build the training loss, and the pipeline schedule for `run.microbatches` microbatches.

        See `ForwardBackward` for the arguments.
        """
        super().__init__(model, mesh, run, device)
        self._num_microbatches = run.microbatches
        # A schedule has a fixed number of microbatches. Each data stage of the job may set a
        # different number, so build schedules on demand and keep them.
        self._schedule_for = cache(partial(build_schedule, run, mesh, model.stages, device))
        self._schedule_for(run.microbatches)

    @property
    def pipeline_stages(self) -> list[PipelineStage]:
        """Return this rank's `PipelineStage` objects in the schedule of a training step."""
        _, stages = self._schedule_for(self._num_microbatches)
        return stages

    def __call__(self, microbatches: Sequence[Microbatch], global_tokens: TokenCount) -> Tensor:
        """Accumulate the gradients of all microbatches and return this rank's part of the loss."""
        schedule, _ = self._schedule_for(len(microbatches))
        loss_fn = NormalizedLoss(self.loss_fn, global_tokens.wait)
        with record_function("pipeline"):
            return self._run_schedule(schedule.step, microbatches, loss_fn)

    def _sum_losses(self, microbatches: Sequence[Microbatch], loss_fn: NormalizedLoss) -> Tensor:
        """Return the sum of the losses of all microbatches, a float64 scalar.

        A schedule runs a fixed number of microbatches, so its last run is padded with microbatches
        without labels.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        schedule, _ = self._schedule_for(self._num_microbatches)
        for start in range(0, len(microbatches), self._num_microbatches):
            part = microbatches[start : start + self._num_microbatches]
            padded = _pad(part, self._num_microbatches)
            with forward_only(schedule):
                total += self._run_schedule(schedule.eval, padded, loss_fn)
        return total

    def _run_schedule(
        self,
        run_schedule: Callable[..., Any],
        microbatches: Sequence[Microbatch],
        loss_fn: NormalizedLoss,
    ) -> Tensor:
        """Run a pipeline schedule and return the sum of this rank's losses.

        The last stage computes the loss of each microbatch. Ranks without this stage return 0.

        Args:
            run_schedule: Method of a torch schedule: `step` for training, `eval` for validation.
            microbatches: Exactly as many microbatches as the schedule runs.
            loss_fn: Function that computes the loss of a microbatch.
        """
        inputs = local_inputs(microbatches, self._mesh, self._run)
        # Only the first stage has the embedding. All others get hidden states from other ranks.
        stage_inputs = [] if self._model.tok_embeddings is None else [inputs.tokens]
        model_options = inputs.forward_options(loss_fn)
        losses: list[Tensor] = []  # the schedule appends the loss of each microbatch
        run_schedule(
            *stage_inputs,
            **model_options,  # passed to `Llama.forward`
            losses=losses,
            target=inputs.labels,  # required by torch, but not used: the model has the labels
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=inputs.tokens.device)
        return torch.stack(losses).detach().sum()


def _pad(microbatches: Sequence[Microbatch], length: int) -> list[Microbatch]:
    """Repeat the last microbatch with ignored labels until there are `length` microbatches."""
    num_padding = length - len(microbatches)
    if num_padding == 0:
        return list(microbatches)
    last = microbatches[-1]
    padding = replace(last, labels=torch.full_like(last.labels, IGNORE_INDEX))
    return [*microbatches, *[padding] * num_padding]


def build_forward_backward(
    model: ShardedModel, mesh: Mesh, run: Run, device: torch.device
) -> ForwardBackward:
    """Create the object that runs the forward and backward passes of each step.

    Args:
        model: This rank's part of the model.
        mesh: Layout of the ranks. If it has pipeline ranks, the object runs a pipeline schedule.
        run: The validated job and the number of ranks.
        device: Device of this rank.
    """
    if mesh.pipeline is None:
        return ForwardBackward(model, mesh, run, device)
    return PipelineForwardBackward(model, mesh, run, device)


class LocalInputs(NamedTuple):
    """This rank's part of one or more microbatches.

    With context parallelism, T is the length of this rank's part of each sequence.

    Attributes:
        tokens: Token ids, shape (B, T).
        labels: Labels, shape (B, T).
        attention: Keyword arguments for `Llama.forward`: `mask`, `full_mask` and `positions`.
            Arguments that the model does not need are left out.
    """

    tokens: Tensor
    labels: Tensor
    attention: dict[str, Any]

    def forward_options(self, loss_fn: NormalizedLoss) -> dict[str, Any]:
        """Return keyword arguments that make `Llama.forward` return the loss of these labels."""
        return {"head": LossHead(self.labels, loss_fn), **self.attention}


def local_inputs(microbatches: Sequence[Microbatch], mesh: Mesh, run: Run) -> LocalInputs:
    """Concatenate microbatches and select this rank's part of each sequence.

    Args:
        microbatches: Microbatches of equal shape that all set the same optional fields, such as
            `document_ids`.
        mesh: Layout of the ranks. With `mesh.context`, this rank has two chunks of each sequence.
        run: The run, whose attention backend and sliding windows determine the masks.
    """
    batch = _add_needed_positions(_join(microbatches), mesh)
    local_batch = batch if mesh.context is None else _select_local_chunks(batch, mesh.context)

    # Masks depend on whole sequences, because this rank's queries attend to the keys of all ranks.
    masks = _build_masks(microbatches, batch, mesh.context, run)
    attention = {**masks, "positions": local_batch.positions}
    needed = {name: value for name, value in attention.items() if value is not None}
    return LocalInputs(local_batch.input_ids, local_batch.labels, needed)


def _add_needed_positions(batch: Microbatch, mesh: Mesh) -> Microbatch:
    """Return `batch`, with default positions if it has none and the layout of the ranks needs them.

    With context parallelism, the model cannot derive positions, because it gets only chunks of each
    sequence. With a pipeline, later stages get hidden states, which may be sharded along T.
    """
    needs_positions = mesh.context is not None or mesh.pipeline is not None
    if needs_positions and batch.positions is None:
        return replace(batch, positions=_default_positions(batch.input_ids))
    return batch


def _build_masks(
    microbatches: Sequence[Microbatch], batch: Microbatch, context: DeviceMesh | None, run: Run
) -> dict[str, Mask | None]:
    """Build the attention mask of all layers, or two masks if only some layers have a window.

    Args:
        microbatches: Microbatches with whole sequences.
        batch: The same sequences, concatenated by `_join`.
        context: Mesh of the context parallel ranks, or None.
        run: The run, which selects the sliding window and the attention backend.

    Returns:
        Arguments of `Llama.forward`: "mask", and "full_mask" if some layers have no sliding window.
        A mask is None if plain causal attention is enough.
    """
    window = run.arch.sliding_window
    masks = {"mask": _build_mask(microbatches, batch, context, run, window)}
    if run.arch.full_attention_interval > 0:
        masks["full_mask"] = _build_mask(microbatches, batch, context, run, window=0)  # no window
    return masks


def _build_mask(
    microbatches: Sequence[Microbatch],
    batch: Microbatch,
    context: DeviceMesh | None,
    run: Run,
    window: int,
) -> Mask | None:
    """Build the mask for one window in the format of the attention backend; see `_build_masks`."""
    if run.job.model.uses_document_bounds:  # variable-length attention
        return _build_bounds(microbatches, window)
    if run.job.model.attention_backend == "flex":
        return _build_flex_mask(batch, context, window)
    return _build_boolean_mask(batch, context, window)


def _join(microbatches: Sequence[Microbatch]) -> Microbatch:
    """Concatenate microbatches along the batch dimension.

    A single microbatch is returned unchanged. Otherwise, the result has no `cu_seqlens`, which
    `_join_bounds` concatenates instead.
    """
    if len(microbatches) == 1:
        return microbatches[0]

    fields: dict[str, Tensor] = {}
    for name in ("input_ids", "labels", "document_ids", "positions"):
        tensors = [getattr(microbatch, name) for microbatch in microbatches]
        if tensors[0] is not None:
            fields[name] = torch.cat(tensors)
    return Microbatch(**fields)


def _select_local_chunks(batch: Microbatch, mesh: DeviceMesh) -> Microbatch:
    """Select the tokens, labels and positions that this context parallel rank holds."""
    assert batch.positions is not None
    return Microbatch(
        input_ids=local_chunks(batch.input_ids, mesh),
        labels=local_chunks(batch.labels, mesh),
        positions=local_chunks(batch.positions, mesh),
    )


def _build_bounds(microbatches: Sequence[Microbatch], window: int) -> DocumentBounds | None:
    """Return the document bounds of all microbatches, or None if plain causal attention is enough.

    Args:
        microbatches: Microbatches of equal shape. Either all or none of them have `cu_seqlens`.
        window: Number of tokens that a token attends to, including itself. 0 means all.
    """
    if microbatches[0].cu_seqlens is not None:
        return DocumentBounds(_join_bounds(microbatches), window)

    tokens = microbatches[0].input_ids
    batch_size, seq_len = tokens.shape
    if not 0 < window < seq_len:
        return None  # every token attends to all earlier tokens of its sequence
    # Treat each sequence as one document.
    bounds = equal_bounds(batch_size, seq_len, tokens.device)
    return DocumentBounds(bounds.repeat(len(microbatches)), window)


def _join_bounds(microbatches: Sequence[Microbatch]) -> Tensor:
    """Concatenate the `cu_seqlens` of microbatches, padded to equal length.

    A pipeline schedule splits the result into equal parts, one per microbatch. Microbatches with
    fewer documents therefore get empty documents at the end. For example, [0, 3, 8] and
    [0, 2, 5, 8] become [0, 3, 8, 8, 0, 2, 5, 8].
    """
    bounds = [cast(Tensor, microbatch.cu_seqlens) for microbatch in microbatches]
    last_bound = microbatches[0].input_ids.numel()
    return pad_sequence(bounds, batch_first=True, padding_value=last_bound).flatten()


def _build_flex_mask(
    batch: Microbatch, context: DeviceMesh | None, window: int
) -> BlockMask | None:
    """Build the block mask of flex attention, or return None if plain causal attention is enough.

    See `_build_boolean_mask` for the arguments.
    """
    is_plain_causal = _is_plain_causal(batch, window)
    # With context parallelism, flex attention is causal only with a mask.
    if is_plain_causal and context is None:
        return None
    document_ids = None if is_plain_causal else _get_document_ids(batch)
    return flex_mask(batch.input_ids, document_ids, context, window)


def _build_boolean_mask(
    batch: Microbatch, context: DeviceMesh | None, window: int
) -> Tensor | None:
    """Build a boolean mask, or return None if plain causal attention is enough.

    Args:
        batch: Whole sequences.
        context: Mesh of the context parallel ranks, or None.
        window: Number of tokens that a token attends to, including itself. 0 means all.

    Returns:
        Mask from this rank's queries to all keys, shape (B, 1, T / context parallel degree, T).
    """
    if _is_plain_causal(batch, window):
        return None
    mask = document_mask(_get_document_ids(batch), window)  # (B, 1, T, T): queries, keys
    if context is None:
        return mask
    return local_chunks(mask, context, dim=2)  # the queries of this rank


def _is_plain_causal(batch: Microbatch, window: int) -> bool:
    """Return whether every token attends to all earlier tokens of its sequence."""
    seq_len = batch.input_ids.shape[1]
    has_short_window = 0 < window < seq_len
    return batch.document_ids is None and not has_short_window


def _get_document_ids(batch: Microbatch) -> Tensor:
    """Return the document of each token, (B, T). By default, each sequence is one document."""
    if batch.document_ids is None:
        return torch.zeros_like(batch.input_ids)
    return batch.document_ids


def _default_positions(tokens: Tensor) -> Tensor:
    """Return positions that count from 0 in each sequence, shape (B, T) like `tokens`."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

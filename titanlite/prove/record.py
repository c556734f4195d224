"""Train the small job in its layout, and record what each step reads and computes.

Invariant: Recording does not change the training. Each rank records digests of its shards, and the
first rank of each pipeline stage records unsharded tensors, so that they can be compared without a
process group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.live_state import LiveState, to_local, to_plain
from titanlite.config.registry import resolve
from titanlite.config.run import Run
from titanlite.data.batch import RankBatch
from titanlite.hooks.hook import Hook
from titanlite.hooks.hook_state import hook_tensors
from titanlite.model.llama import INIT_STD, Llama
from titanlite.model.microbatch import Microbatch
from titanlite.optim.adamw import shard_slices
from titanlite.optim.clip import is_fp8_wrapper
from titanlite.parallel.activation_checkpoint import draws_random_numbers
from titanlite.train.trainer import Trainer

NamedTensors = dict[str, Tensor]
FIELDS = ("input_ids", "labels", "document_ids", "positions")


class ShardKey(NamedTuple):
    """Key of a shard of a tensor, equal on all ranks that have a replica (copy) of this shard.

    Attributes:
        tensor: Name of the tensor.
        bounds: For each dimension, the range (start, stop) of the indices that the shard covers;
            `stop` is exclusive. Empty for a tensor that is not a DTensor.
    """

    tensor: str
    bounds: tuple[tuple[int, int], ...]


@dataclass
class Snapshot:
    """Tensors of a model at one moment, such as after a step.

    Attributes:
        unsharded: Unsharded tensors on the CPU, by name. Empty except on the first rank of each
            pipeline stage.
        digests: SHA-256 digests of this rank's shards, to find replicas that differ.
    """

    unsharded: NamedTensors = field(default_factory=dict)
    digests: dict[ShardKey, str] = field(default_factory=dict)


@dataclass
class StepRecord:
    """Values that one rank has recorded in one step.

    Attributes:
        sequences: Fields of the sequences that the rank has read, such as "input_ids", each of
            shape (sequences, T).
        gradients: Gradients before clipping, by parameter name.
        state: Weights, optimizer state and tensors of hooks after the step, by their names in a
            checkpoint.
        scales: FP8 scale of each weight that FSDP gathers in FP8, by parameter name.
        loss: Logged loss.
        grad_norm: Logged gradient norm.
    """

    sequences: NamedTensors = field(default_factory=dict)
    gradients: Snapshot = field(default_factory=Snapshot)
    state: Snapshot = field(default_factory=Snapshot)
    scales: NamedTensors = field(default_factory=dict)
    loss: float = float("nan")
    grad_norm: float = float("nan")


StepRecords = dict[int, StepRecord]
"""Records of one rank, by step number."""


class Recorder(Hook):
    """Records sequences, gradients, weights and optimizer state of each training step.

    Attributes:
        steps: Records of this rank by step number. The first entry is the state before training.
        record: The entry of `steps` that is being filled.
    """

    observes_only = True

    def __init__(self) -> None:
        self.steps: StepRecords = {}
        self.record = StepRecord()

    def built(self, trainer: Trainer) -> None:
        """Wrap the data loader of the trainer to record each batch that it returns."""
        self.trainer = trainer
        self._keeps_unsharded = dist.get_rank(trainer.mesh.stage_group) == 0
        read_batch = trainer.loader.next_global_batch

        def read_and_record() -> RankBatch:
            batch = read_batch()
            self.record.sequences = stack_sequences(batch.microbatches)
            return batch

        trainer.loader.next_global_batch = read_and_record

    def started(self, step: int) -> None:
        """Record the weights and the optimizer state before the first step."""
        self.record = self.steps[step] = StepRecord(state=self.snapshot_state())

    def amplify_weights(self) -> None:
        """Amplify the initial weights, and replace the recorded initial state with the new one."""
        amplify(self.trainer.model)
        self.trainer.train_step.precompute_scales()
        self.record.state = self.snapshot_state()

    def before_step(self, step: int) -> None:
        """Create an empty record for this step."""
        self.record = self.steps[step] = StepRecord()

    def gradients(self, step: int) -> None:
        """Record the gradients, which are not clipped yet."""
        gradients = {
            name: parameter.grad
            for name, parameter in self.trainer.model.named_parameters()
            if parameter.grad is not None
        }
        self.record.gradients = self._snapshot(gradients)

    def train_and_record(self) -> None:
        """Train one step, then record its loss, gradient norm, resulting state and FP8 scales."""
        entry = self.trainer.step()
        assert entry is not None  # every step is logged
        self.record.loss = entry.loss
        self.record.grad_norm = entry.grad_norm
        self.record.state = self.snapshot_state()
        self.record.scales = _float8_scales(self.trainer)

    def train_and_record_until(self, last_step: int) -> None:
        """Train and record all steps up to `last_step`."""
        while self.trainer.steps_done < last_step:
            self.train_and_record()

    def snapshot_state(self) -> Snapshot:
        """Record the current weights, optimizer state and tensors of hooks in a snapshot."""
        trainer = self.trainer
        hooks = partial(hook_tensors, trainer.hooks)
        live = LiveState(trainer.model, trainer.optimizer, hook_tensors=hooks)
        return self._snapshot(live.tensors())

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Return a snapshot with a digest of each shard of this rank.

        On the first rank of each pipeline stage, the snapshot also has the unsharded tensors. All
        ranks must call this together.
        """
        snapshot = Snapshot()
        for name, tensor in tensors.items():
            tensor = to_plain(tensor)
            shard = to_local(tensor).contiguous().cpu()
            content = shard.flatten().view(torch.uint8).numpy().tobytes()
            snapshot.digests[ShardKey(name, _bounds(tensor))] = hashlib.sha256(content).hexdigest()
            whole = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else shard
            if self._keeps_unsharded:
                snapshot.unsharded[name] = whole.clone()
        return snapshot


@torch.no_grad()
def amplify(model: Llama) -> None:
    """Multiply the matrices of all blocks by a power of two, so that mistakes change the loss.

    With the usual small initial weights, attention is nearly uniform, so a wrong mask or position
    would hardly change the loss. A power of two causes no rounding errors.
    """
    # The standard deviation INIT_STD becomes about 1 / sqrt(dim). A matmul then keeps the scale of
    # its inputs.
    exponent = -math.log2(INIT_STD * math.sqrt(model.arch.dim))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name.startswith("layers."):
            to_plain(parameter).mul_(2.0 ** round(exponent))


def stack_sequences(microbatches: list[Microbatch]) -> NamedTensors:
    """Concatenate the sequences of microbatches along the batch dimension.

    Returns:
        Tensors of shape (sequences, T) by field name, such as "input_ids".
    """
    stacked = {}
    for name in FIELDS:
        values = [getattr(microbatch, name) for microbatch in microbatches]
        if values[0] is not None:
            stacked[name] = torch.cat(values).cpu()
    return stacked


def train_and_resume(run: Run, device: torch.device, folder: Path) -> None:
    """Train a run, then resume it from its checkpoint, and write the records of both runs.

    Each rank writes the files "first-RANK.pt" and "resumed-RANK.pt". All ranks must call this
    together, within a process group.

    Args:
        run: The tested run on several ranks.
        device: Device of this rank.
        folder: Existing folder that all ranks share.
    """
    rank = dist.get_rank()
    num_steps = run.job.training.steps
    recorder = Recorder()
    with Trainer(run, device, [recorder]) as trainer:
        turn_dropout_off(trainer)
        recorder.amplify_weights()  # so that a wrong mask or position changes the loss
        recorder.train_and_record_until(find_save_step(run))
        trainer.save()
        recorder.train_and_record_until(num_steps)
    torch.save(recorder.steps, folder / f"first-{rank}.pt")

    # A new trainer of the same run resumes from the checkpoint in the output folder.
    recorder = Recorder()
    with Trainer(run, device, [recorder]) as trainer:
        turn_dropout_off(trainer)
        recorder.train_and_record_until(num_steps)
    torch.save(recorder.steps, folder / f"resumed-{rank}.pt")
    dist.barrier()


def find_save_step(run: Run) -> int:
    """Return the step after which the tested run saves its checkpoint, about halfway through."""
    return max(1, run.job.training.steps // 2)


def turn_dropout_off(trainer: Trainer) -> None:
    """Disable dropout in the model of a trainer.

    Dropout masks depend on the number of ranks, so losses with dropout would not be comparable.
    """
    if has_random_numbers(trainer.run):
        trainer.model.eval()


def has_random_numbers(run: Run) -> bool:
    """Return whether the forward pass of the model may draw random numbers, as dropout does."""
    return draws_random_numbers(resolve(run.arch.model))


def _bounds(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return where this rank's shard lies within the unsharded tensor; see `ShardKey.bounds`."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple((part.start, part.stop) for part in shard_slices(tensor))


def _float8_scales(trainer: Trainer) -> NamedTensors:
    """Return the precomputed FP8 scales of weights, by parameter name.

    The result is empty if the job does not precompute scales.
    """
    if not trainer.job.float8.precompute_float8_dynamic_scale_for_fsdp:
        return {}
    scales = {}
    for name, parameter in trainer.model.named_parameters():
        # `to_local` would return a copy of the torchao wrapper without the scale.
        shard = _inner_tensors(parameter)[0] if isinstance(parameter, DTensor) else parameter
        if is_fp8_wrapper(shard):
            # The wrapper contains the weight and, if it is precomputed, the scale.
            for scale in _inner_tensors(shard)[1:]:
                scales[name] = scale.detach().cpu().clone()
    return scales


def _inner_tensors(tensor: Any) -> list[Tensor]:
    """Return the tensors that a tensor subclass wraps."""
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]

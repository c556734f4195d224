"""Pipeline parallelism: each rank has some of the blocks, and microbatches pass through the ranks
(https://arxiv.org/abs/2104.04473; zero bubble: https://arxiv.org/abs/2401.10241).

Invariant: a stage is a part of the model under the names of the whole model, so weights, checkpoints and optimizer
groups do not depend on stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanlite.config.flavors import Architecture
from titanlite.config.run import Run, stage_rank
from titanlite.model.llama import Llama
from titanlite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def own_stages(run: Run, mesh: Mesh) -> dict[int, range]:
    """Stage number -> its blocks, for the stages that this rank runs. Without a pipeline there is one stage."""
    schedule, ranks = run.job.parallelism.pipeline_parallel_schedule, run.degrees.pipeline
    rank = 0 if mesh.pipeline is None else mesh.pipeline.get_local_rank()
    owner = [stage_rank(i, len(run.stages), ranks, schedule) for i in range(len(run.stages))]
    return {i: part for i, part in enumerate(run.stages) if owner[i] == rank}


def join_stages(stages: Sequence[Llama]) -> Llama:
    """One module with all stages of this rank, for optimizer and checkpoints. Names are those of the whole model."""
    if len(stages) == 1:
        return stages[0]
    whole = type(stages[0])(stages[0].arch, range(-1, -1))
    for stage in stages:
        whole.layers.update(dict(stage.layers.items()))
        whole.tok_embeddings = stage.tok_embeddings or whole.tok_embeddings
        whole.norm, whole.output = stage.norm or whole.norm, stage.output or whole.output
    return whole


def build_schedule(
    run: Run, mesh: Mesh, stages: dict[int, Llama], device: torch.device, microbatches: int
) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[PipelineStage]]:
    """The schedule of one optimizer step over this rank's stages, and these stages as it runs them.

    The shapes are declared, because torch would otherwise find them out by a trial run that computes and communicates.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    assert mesh.pipeline is not None
    count, group = len(run.stages), mesh.pipeline.get_group()
    pipeline_stages = []
    for i, stage in stages.items():
        shapes: dict[str, Any] = {
            "input_args": _input(run, stage.arch, first=i == 0),
            "output_args": _input(run, stage.arch, first=False),
        }
        if i == count - 1:  # the loss: no stage receives it, but its shape must be declared
            shapes["output_args"] = torch.empty((), device="meta", requires_grad=True)
        pipeline_stages.append(PipelineStage(stage, i, count, device, group=group, **shapes))
    schedule: Any = get_schedule_class(run.job.parallelism.pipeline_parallel_schedule)
    own: Any = pipeline_stages[0] if issubclass(schedule, PipelineScheduleSingle) else pipeline_stages
    # What the last stage returns is the loss already.
    return schedule(own, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False), pipeline_stages


@contextmanager
def forward_only(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: Sequence[PipelineStage]
) -> Iterator[None]:
    """Leave out the backward passes.

    The method `eval` of torch's schedules is meant for that, but torch 2.13 fails in it if the next stage is on the
    same rank (ZBVZeroBubble). In torch 2.11, after an `eval` before the first step, the tensors that a stage receives
    never require a gradient.
    """
    runs: Any = schedule
    orders = getattr(runs, "pipeline_order_with_comms", None)
    if orders is not None:
        forward = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
        kept = ((rank, [a for a in order if a.computation_type.name in forward]) for rank, order in orders.items())
        runs.pipeline_order_with_comms = dict(kept)
    yield
    if orders is not None:
        runs.pipeline_order_with_comms = orders
    for stage in stages:
        for received in chain.from_iterable(stage.args_recv_info.values()):
            buffer = getattr(received, "buffer", None)
            if isinstance(buffer, Tensor):
                buffer.requires_grad_(True)


def _input(run: Run, arch: Architecture, first: bool) -> Tensor:
    """The shape and dtype of a stage's input: token ids (B, T) for the first stage, (B, T / tensor degree, C) for the
    others."""
    rows, length = run.job.training.local_batch_size, run.job.training.seq_len // run.degrees.context
    if first:
        return torch.empty(rows, length, dtype=torch.int64, device="meta")
    dtype = getattr(torch, run.job.training.mixed_precision_param)
    return torch.empty(rows, length // run.degrees.tensor, arch.dim, dtype=dtype, device="meta", requires_grad=True)

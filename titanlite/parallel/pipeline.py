"""Pipeline parallelism: each rank holds some of the blocks, microbatches flow through
(https://arxiv.org/abs/2104.04473; zero bubble: https://arxiv.org/abs/2401.10241).

Invariant: a stage is a part of the model under the whole model's names, so weights, checkpoints and optimizer groups
know nothing of stages. May import torch, model, config and parallel.layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import JobConfig
from titanlite.model.flavors import Architecture, architecture
from titanlite.model.llama import Llama
from titanlite.parallel.layout import stage_parts, stage_rank
from titanlite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def own_stages(job: JobConfig, mesh: DeviceMesh) -> dict[int, range]:
    """Stage number -> its blocks, for the stages that this rank runs."""
    parallelism = job.parallelism
    parts = stage_parts(parallelism, architecture(job.model), job.training.seq_len)
    schedule, rank = parallelism.pipeline_parallel_schedule, mesh.get_local_rank()
    owner = [stage_rank(i, len(parts), mesh.size(), schedule) for i in range(len(parts))]
    return {i: part for i, part in enumerate(parts) if owner[i] == rank}


def join_stages(stages: Sequence[Llama]) -> Llama:
    """One module with all that this rank holds, for optimizer and checkpoints: names are those of the whole model."""
    if len(stages) == 1:
        return stages[0]
    whole = Llama(stages[0].arch, range(-1, -1))
    for stage in stages:
        whole.layers.update(dict(stage.layers.items()))
        whole.tok_embeddings = stage.tok_embeddings or whole.tok_embeddings
        whole.norm, whole.output = stage.norm or whole.norm, stage.output or whole.output
    return whole


def build_schedule(
    job: JobConfig, mesh: Mesh, stages: dict[int, Llama], device: torch.device, microbatches: int
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The schedule of one optimizer step over this rank's stages.

    Shapes are declared, not found out by torch's trial run, which would compute and communicate.

    Args:
        microbatches: How many of them a data-parallel rank has in a step.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    assert mesh.pipeline is not None
    count = len(stage_parts(job.parallelism, architecture(job.model), job.training.seq_len))
    group = mesh.pipeline.get_group()
    pipeline_stages = []
    for i, stage in stages.items():
        given = _input(job, mesh, stage.arch, first=i == 0)
        output = _input(job, mesh, stage.arch, first=False)
        if i == count - 1:  # the loss: nobody receives it, but its shape must be declared
            output = torch.empty((), device="meta", requires_grad=True)
        pipeline_stages.append(
            PipelineStage(stage, i, count, device, input_args=given, output_args=output, group=group)
        )
    schedule: Any = get_schedule_class(job.parallelism.pipeline_parallel_schedule)
    single = issubclass(schedule, PipelineScheduleSingle)
    return schedule(
        pipeline_stages[0] if single else pipeline_stages,
        microbatches,
        loss_fn=lambda loss, _labels: loss,  # what the last stage returns is the loss already
        scale_grads=False,
    )


@contextmanager
def forward_only(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> Iterator[None]:
    """Leave the backward passes out. `eval` is meant to skip them, but torch 2.13 asserts in it where the next stage is
    on the same rank (ZBVZeroBubble); and where it comes before the first step, torch 2.11 receives into tensors that
    never ask for a gradient."""
    runs: Any = schedule
    orders = getattr(runs, "pipeline_order_with_comms", None)
    if orders is not None:
        forward = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
        runs.pipeline_order_with_comms = {
            rank: [action for action in order if action.computation_type.name in forward]
            for rank, order in orders.items()
        }
    yield
    if orders is not None:
        runs.pipeline_order_with_comms = orders
    for stage in getattr(runs, "_stages", None) or [runs._stage]:
        for received in chain.from_iterable(stage.args_recv_info.values()):
            if isinstance(getattr(received, "buffer", None), Tensor):
                received.buffer.requires_grad_(True)


def _input(job: JobConfig, mesh: Mesh, arch: Architecture, first: bool) -> Tensor:
    """What a stage receives, without its data: token ids (B, T) for the first one, else (B, T / tensor degree, C)."""
    rows, length = job.training.local_batch_size, job.training.seq_len // mesh.degrees.context
    if first:
        return torch.empty(rows, length, dtype=torch.int64, device="meta")
    shape = (rows, length // mesh.degrees.tensor, arch.dim)
    dtype = getattr(torch, job.training.mixed_precision_param)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

"""Pipeline parallelism: each rank holds some blocks, and microbatches pass from rank to rank.

See https://arxiv.org/abs/2104.04473, and https://arxiv.org/abs/2401.10241 for zero-bubble
schedules.

A stage is a consecutive part of the model. Its parameters have the same names as in the whole
model, so weights, checkpoints and optimizer groups do not depend on the division into stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanlite.config.run import Run, stage_rank
from titanlite.model.llama import Llama
from titanlite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

FORWARD_ACTIONS = ("FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""Names of the forward pass actions in a torch schedule. torch 2.15 has all of them."""


def local_stages(run: Run, mesh: Mesh) -> dict[int, range]:
    """Return the block indices of each pipeline stage on this rank, by stage number.

    For example, with 8 blocks and an interleaved schedule, rank 0 of 2 has the stages
    {0: range(0, 2), 2: range(4, 6)}. Without a pipeline, stage 0 has all blocks.
    """
    schedule = run.job.parallelism.pipeline_parallel_schedule
    num_stages = len(run.stages)
    rank = 0 if mesh.pipeline is None else mesh.pipeline.get_local_rank()

    stages = {}
    for stage, blocks in enumerate(run.stages):
        if stage_rank(stage, num_stages, run.degrees.pipeline, schedule) == rank:
            stages[stage] = blocks
    return stages


def join_stages(stages: Sequence[Llama]) -> Llama:
    """Combine the stages of this rank into one module, for the optimizer and checkpoints.

    The module shares the parameters of the stages, with the parameter names of the whole model. If
    there is only one stage, return it unchanged. Do not run the forward pass of joined stages.
    """
    if len(stages) == 1:
        return stages[0]

    model_class = type(stages[0])
    joined = model_class(stages[0].arch, blocks=range(-1, -1))  # an empty stage
    for stage in stages:
        joined.layers.update(dict(stage.layers.items()))
        joined.tok_embeddings = stage.tok_embeddings or joined.tok_embeddings
        joined.norm = stage.norm or joined.norm
        joined.output = stage.output or joined.output
    return joined


def build_schedule(
    run: Run, mesh: Mesh, stages: dict[int, Llama], device: torch.device, num_microbatches: int
) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[PipelineStage]]:
    """Create the torch pipeline schedule that runs this rank's stages in one optimizer step.

    Declare the input and output shapes of the stages, because torch would otherwise infer them with
    a trial run that computes and communicates.

    Args:
        run: The validated job and the number of ranks.
        mesh: Layout of the ranks, with `mesh.pipeline`.
        stages: Modules of this rank's stages, by stage number.
        device: Device of this rank.
        num_microbatches: Number of microbatches per step. The schedule runs exactly this many.

    Returns:
        The schedule, and this rank's stages as the `PipelineStage` objects that the schedule runs.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    assert mesh.pipeline is not None
    num_stages = len(run.stages)
    tokens, hidden = _create_stage_tensors(run)
    pipeline_stages = []
    for index, module in stages.items():
        # The last stage outputs the loss. No stage receives it, but its shape must be declared.
        loss = torch.empty((), device="meta", requires_grad=True)
        stage = PipelineStage(
            module,
            index,
            num_stages,
            device,
            input_args=tokens if index == 0 else hidden,
            output_args=loss if index == num_stages - 1 else hidden,
            group=mesh.pipeline.get_group(),
        )
        pipeline_stages.append(stage)

    schedule_class: Any = get_schedule_class(run.job.parallelism.pipeline_parallel_schedule)
    takes_one_stage = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(
        pipeline_stages[0] if takes_one_stage else pipeline_stages,
        num_microbatches,
        loss_fn=lambda loss, _target: loss,  # the last stage has already computed the loss
        scale_grads=False,
    )
    return schedule, pipeline_stages


@contextmanager
def forward_only(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> Iterator[None]:
    """Remove the backward passes from a pipeline schedule in a `with` block, for validation.

    Call the `eval` method of the schedule in this block. Up to torch 2.15, `eval` alone also runs
    backward actions if ranks have several stages. They reduce FSDP gradients, or raise an error if
    consecutive stages are on the same rank.
    """
    any_schedule: Any = schedule
    # The actions of each rank in the order of execution, a private attribute of torch.
    all_actions = getattr(any_schedule, "pipeline_order_with_comms", None)
    if all_actions is None:
        # Schedules with one stage per rank have no list of actions, and `eval` is correct.
        yield
        return

    forward_actions = {}
    for rank, actions in all_actions.items():
        forward_actions[rank] = [
            action for action in actions if action.computation_type.name in FORWARD_ACTIONS
        ]
    any_schedule.pipeline_order_with_comms = forward_actions
    try:
        yield
    finally:
        any_schedule.pipeline_order_with_comms = all_actions


def _create_stage_tensors(run: Run) -> tuple[Tensor, Tensor]:
    """Return meta tensors with the shapes and dtypes of stage inputs: token ids and hidden states.

    The first pipeline stage receives token ids, shape (B, T). All others receive hidden states,
    shape (B, T / tensor parallel degree, C), because tensor parallelism shards the sequence between
    blocks. With context parallelism, T is the length of a rank's part of each sequence.
    """
    training = run.job.training
    batch_size = training.local_batch_size
    seq_len = training.seq_len // run.degrees.context
    hidden_shape = batch_size, seq_len // run.degrees.tensor, run.arch.dim
    dtype = getattr(torch, training.mixed_precision_param)

    tokens = torch.empty(batch_size, seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    return tokens, hidden

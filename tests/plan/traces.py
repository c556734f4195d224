"""Traces made by hand, for what is computed from traces."""

from typing import Any

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.plan.trace import RankTrace, Work

GIB = 2**30


def run(world_size: int = 8, **sections: dict[str, Any]) -> Run:
    """A job of Llama 8b with 8,192 tokens in a row, which recomputes nothing."""
    training = {"seq_len": 8192, "local_batch_size": 2, "steps": 1000, **sections.pop("training", {})}
    recompute = {"mode": "none", **sections.pop("activation_checkpoint", {})}
    job = {"model": {"flavor": "8b"}, "training": training, "activation_checkpoint": recompute, **sections}
    return Run(JobConfig.model_validate(job), world_size)


def matmul(m: int, k: int, n: int, dtype: str = "bfloat16", count: int = 1) -> Work:
    size = 2 * (m * k + k * n + m * n)
    return Work("forward", "aten.mm", dtype, (m, k, n), None, count, count * 2 * m * k * n, count * size)


def moving(size: int, phase: str = "forward") -> Work:
    return Work(phase, "aten.add", "bfloat16", (), None, 1, 0, size)


def sent(op: str, size: int, group: str, ranks: int = 8, span: int = 8, count: int = 1) -> Work:
    return Work("forward", op, "", (), (group, ranks, span), count, 0, size)


def trace(*work: Work, peak: float = 40.0, rank: int = 0) -> RankTrace:
    """A rank whose peak is so many GiB."""
    kinds = {"weights": int(peak * GIB / 4), "activations": int(peak * GIB) - int(peak * GIB / 4), "loss": 0}
    return RankTrace(rank, int(peak * GIB), "backward of a block", kinds, 0, work)


def trace_of_rows(run: Run, *_: object) -> tuple[RankTrace, ...]:
    """10 GiB, 20 more for each row that is not recomputed and 2 for one that is; a second for each row of the step."""
    training = run.job.training
    again = run.job.activation_checkpoint.mode == "full"
    state = 5 if training.dtype == "bfloat16" else 10
    tokens = run.microbatches * training.local_batch_size * (1.3 if again else 1.0)
    work = matmul(4096, 4096, 4096, count=max(1, int(5000 * tokens)))
    return (trace(work, peak=state + training.local_batch_size * (2 if again else 20)),)

"""The bytes of a step that is really computed, counted as a plan counts them."""

from typing import Any

import torch
import torch.distributed as dist
from train_variants import TINY, merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.trace import count_step
from titanlite.train.step import TrainStep

Bytes = dict[str, int]


def tiny_run(overrides: dict[str, Any], world_size: int) -> Run:
    return Run(JobConfig.model_validate(merge(TINY, overrides)), world_size)


def real_bytes(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of a job -> the peak of the calling rank and its kinds.

    On several ranks the lowest of three counts: a thread of gloo may hold a buffer a moment longer than the step does.
    """
    counted = {}
    for name, overrides in jobs.items():
        run = tiny_run(overrides, dist.get_world_size())
        mesh = build_mesh(run.degrees, "cpu")
        sharded = build_model(run, mesh, torch.device("cpu"), lambda _: None)
        update = TrainStep(run, mesh, sharded, torch.device("cpu"))
        counts = [count_step(run, sharded, update).peak() for _ in range(1 if dist.get_world_size() == 1 else 3)]
        place, kinds = min(counts, key=lambda peak: peak[1].sum())
        counted[name] = {"moment": place, "kinds": kinds.tolist(), "peak": int(kinds.sum())}
    return counted

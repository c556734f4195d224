"""Bytes of all-gathers and number of reductions of a rank in one step, for each of many jobs."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from train_variants import TINY, global_batch, merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.train.step import TrainStep


class Traffic(TorchDispatchMode):
    """The size of what every all-gather of more than scalars delivers, and the number of reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_allgather_base_":  # the one that FSDP calls; (output, input, group, ...)
            self.bytes.append(args[0].numel() * args[0].element_size())
        self.reductions += func.name() == "c10d::_reduce_scatter_base_"
        return func(*args, **(kwargs or {}))


def count_bytes(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the calling rank sends, by the name of the job, whose overrides of TINY are given."""
    counts = {}
    for name, overrides in jobs.items():
        job = JobConfig.model_validate(merge(TINY, overrides))
        run = Run(job, dist.get_world_size())
        mesh = build_mesh(run.degrees, "cpu")
        sharded = build_model(run, mesh, torch.device("cpu"), lambda _: None)
        update = TrainStep(run, mesh, sharded, torch.device("cpu"))
        update.precompute_scales()
        rows = global_batch(job, sharded.whole.arch.vocab_size, False)
        with Traffic() as traffic:
            update.forward_backward([rows[i : i + 1] for i in range(job.training.global_batch_size)], torch.tensor(10))
        sizes = {name: parameter.numel() for name, parameter in sharded.whole.named_parameters()}
        linear = sum(size for name, size in sizes.items() if "attention.w" in name or "feed_forward.w" in name)
        rest = sum(sizes.values()) - linear
        output = sizes["output.weight"] + sizes["norm.weight"]
        embedding, blocks = sizes["tok_embeddings.weight"], len(sharded.whole.layers)
        counted = {"bytes": traffic.bytes, "reductions": traffic.reductions, "embedding": embedding, "blocks": blocks}
        counts[name] = {**counted, "linear": linear, "rest": rest, "output": output}
    return counts

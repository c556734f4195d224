"""What FSDP puts on the wire: one byte a weight with FP8 instead of two, and the output matrix once a step."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from train_variants import TINY, global_batch, merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.train.step import TrainStep

FP8 = {"enable": True, "enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
BF16 = {
    "training": {"mixed_precision_param": "bfloat16", "global_batch_size": 1},
    "parallelism": {"fsdp_reshard_after_forward": "never"},
}
LEAST = (0, 60_000, 120_000, 1_000_000)  # parameters of a group
JOBS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp8": BF16 | {"float8": FP8},
    "step": {"training": {"global_batch_size": 3}},
    "microbatch": {"training": {"global_batch_size": 3}, "parallelism": {"fsdp_reduce": "microbatch"}},
    **{str(n): {"training": {"global_batch_size": 1}, "parallelism": {"fsdp_min_num_params": n}} for n in LEAST},
}


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


def count_bytes() -> dict[str, tuple[list[int], int, dict[str, int]]]:
    """Of each job what the calling rank receives, how often it reduces, and the sizes of its parameters."""
    counts = {}
    for name, overrides in JOBS.items():
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
        counts[name] = traffic.bytes, traffic.reductions, sizes
    return counts


@pytest.mark.slow
def test_what_travels() -> None:
    counts = run_ranks(2, count_bytes)[0]
    sizes = counts["bf16"][2]
    linear = sum(size for name, size in sizes.items() if "attention.w" in name or "feed_forward.w" in name)
    rest = sum(sizes.values()) - linear  # the embedding, the norms, the output
    assert sum(counts["bf16"][0]) == 2 * (linear + rest)
    assert sum(counts["fp8"][0]) == linear + 2 * rest  # scales do not travel: they were computed on all ranks alike

    for name in ("step", "microbatch"):
        found = Counter(counts[name][0])
        assert found[4 * (sizes["output.weight"] + sizes["norm.weight"])] == 1  # the output matrix stays gathered
        assert found[4 * sizes["tok_embeddings.weight"]] == 3  # in each microbatch: forward, as no gradient needs it
        assert 3 * 2 * 3 in found.values()  # in each of three microbatches forward and backward, three blocks
    assert counts["microbatch"][1] == 3 * counts["step"][1] > 0

    # 3 blocks of 37,000 parameters; besides them the embedding, and norm with output
    grouped = [counts[str(least)] for least in LEAST]
    assert [len(sent) for sent, _, _ in grouped] == [2 + 2 * 3, 2 + 2 * 2, 2 + 1, 1]  # again when backward
    assert [reductions for _, reductions, _ in grouped] == [2 + 3, 2 + 2, 2 + 1, 1]

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

pytestmark = pytest.mark.slow
ALL_GATHER = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
BF16 = {
    "training": {"mixed_precision_param": "bfloat16", "global_batch_size": 1},
    "parallelism": {"fsdp_reshard_after_forward": "never"},
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


def test_weights_travel_in_one_byte_each() -> None:
    jobs = {"bf16": BF16, "fp8": BF16 | {"float8": {"enable": True} | ALL_GATHER}}
    counts = run_ranks(2, count_bytes, jobs)[0]
    weights, rest = counts["bf16"]["linear"], counts["bf16"]["rest"]  # the embedding, the norms, the output
    assert sum(counts["bf16"]["bytes"]) == 2 * (weights + rest)
    assert (
        sum(counts["fp8"]["bytes"]) == weights + 2 * rest
    )  # scales do not travel: they were computed on all ranks alike


def test_what_travels_with_three_microbatches() -> None:
    once, each = {"training": {"global_batch_size": 3}}, {"parallelism": {"fsdp_reduce": "microbatch"}}
    counts = run_ranks(2, count_bytes, {"step": once, "microbatch": once | each})[0]
    for count in counts.values():
        sizes = Counter(count["bytes"])
        assert sizes[4 * count["output"]] == 1  # the output matrix stays gathered
        assert sizes[4 * count["embedding"]] == 3  # in each microbatch: forward, as no gradient needs it
        assert 3 * 2 * count["blocks"] in sizes.values()  # forward and backward
    assert counts["microbatch"]["reductions"] == 3 * counts["step"]["reductions"] > 0


def test_small_blocks_share_a_group() -> None:
    jobs = {str(least): {"parallelism": {"fsdp_min_num_params": least}} for least in (0, 60_000, 120_000, 1_000_000)}
    once = {"training": {"global_batch_size": 1}}
    counts = run_ranks(2, count_bytes, {name: job | once for name, job in jobs.items()})[0].values()
    # 3 blocks of 37,000 parameters; besides them the embedding, and norm with output
    assert [len(count["bytes"]) for count in counts] == [2 + 2 * 3, 2 + 2 * 2, 2 + 1, 1]  # again when backward
    assert [count["reductions"] for count in counts] == [2 + 3, 2 + 2, 2 + 1, 1]

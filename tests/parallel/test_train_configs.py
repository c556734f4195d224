"""Every job file in train_configs/ is built, parallelized and stepped at its full size, on tensors without data.

The process group is torch's fake one: collectives return at once, so that one process stands for any rank of 512.
"""

import re
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_process
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.config.load import read_job
from titanlite.config.run import Run
from titanlite.data.batch import blank_microbatch
from titanlite.load_run import check_run
from titanlite.model.llama import Llama
from titanlite.observe.flops import num_params
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.train.step import TrainStep

CONFIGS = Path(__file__).parents[2] / "train_configs"
WORLD = {  # ranks that the file's first lines speak of
    "debug_model": 1,
    "llama_1b": 1,
    "llama_3b": 4,
    "llama_8b": 8,
    "llama_8b_float8": 8,
    "llama_70b": 64,
    "llama_405b": 512,
}
pytestmark = pytest.mark.slow


class Vote:
    """Yes."""

    def item(self) -> int:
        return 1


def load(name: str, world: int) -> Run:
    """The job on its ranks, with as many microbatches as a pipeline needs at least, and without the compiler,
    which has no tensors to run on."""
    job = read_job(["--job.config_file", str(CONFIGS / f"{name}.toml")]).job
    check_run(job, world)
    rows = job.training.local_batch_size * world
    parallelism = job.parallelism
    rows //= parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    training = job.training.model_copy(update={"global_batch_size": rows})
    compile = job.compile.model_copy(update={"enable": False})
    return Run(job.model_copy(update={"training": training, "compile": compile}), world)


def first_step(name: str, world: int, rank: int) -> tuple[int, list[str], float]:
    """One optimizer step of a job file; how many parameters the rank holds, their names, and the seconds of a CPU."""
    run = load(name, world)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    device = torch.device("cpu")
    mesh = build_mesh(run.degrees, "cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def materialize_fake(model: Llama, device: torch.device, _seed: int, _offload: bool) -> None:
        with fake:  # drawing weights depends on data, which these tensors do not have
            model.to_empty(device=device)

    with patch("titanlite.parallel.parallelize.materialize", materialize_fake):
        sharded = build_model(run, mesh, device, lambda _: None)
    # Stages vote whether all of them know their shapes: no data, no vote.
    unanimous = patch.object(PipelineStage, "_warmup_backward_result", lambda *_, **__: Vote(), create=True)
    with fake, unanimous:
        training = run.job.training
        rows = blank_microbatch(training.local_batch_size, training.seq_len, run.job.dataset.document_mask, device)
        done = TrainStep(run, mesh, sharded, device)(
            [rows] * run.microbatches, rows.labels.numel(), run.job.optimizer.lr
        )
        assert done.grad_norm.shape == ()
        held = sum(p.to_local().numel() for p in sharded.whole.parameters())  # pyright: ignore
        return held, [name for name, _ in sharded.whole.named_parameters()], time.process_time()


def test_every_job_file_is_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(WORLD)
    for name, ranks in WORLD.items():
        header = (CONFIGS / f"{name}.toml").read_text().split("\n\n")[0]
        gpus = re.search(r"on (\d+) GPUs", header)
        assert int(gpus[1]) == ranks if gpus else ranks == 1


@pytest.mark.parametrize(
    ("name", "rank"),
    # The first and the last pipeline stages.
    [*((name, 0) for name in WORLD), pytest.param("llama_405b", 511, marks=pytest.mark.long)],
)
def test_job_file_steps_at_its_full_size(name: str, rank: int) -> None:
    # A process of its own: DTensor remembers the groups of a world after its end.
    held, names, seconds = run_process(first_step, name, WORLD[name], rank)
    run = load(name, WORLD[name])
    arch, stages = run.arch, len(run.stages)
    # Shards are equal but for what does not divide, and stages but for the embedding, the output and a block.
    assert held == pytest.approx(num_params(arch) / WORLD[name], rel=0.02 if stages == 1 else 0.1)
    assert ("tok_embeddings.weight" in names) == (rank == 0)
    assert ("norm.weight" in names) == (stages == 1 or rank == 511)
    assert seconds < 60

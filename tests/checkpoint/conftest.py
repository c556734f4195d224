from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from tiny_run import TinyRun


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank, as a run on one process has it."""
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_saved(tmp_path) -> tuple[Path, TinyRun]:
    """A run that saved at steps 2 and 4."""
    run = TinyRun()
    manager = run.manager(tmp_path)
    for _ in range(2):
        run.train(2)
        manager.save(run.step, run.train_state())
    return tmp_path, run

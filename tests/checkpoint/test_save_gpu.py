"""Saves of a model on a GPU: each holds the state of its own step, however it travels to the disk."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tiny_run import TinyRun, assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_save_holds_the_state_of_its_own_step(tmp_path, mode):
    run = TinyRun(device="cuda")
    run.train(2)
    manager = run.manager(tmp_path, async_mode=mode)
    expected = run.everything()
    random_state = torch.cuda.get_rng_state()
    manager.save(2, run.train_state())
    run.train(3)  # changes the live state at once
    torch.rand(1, device="cuda")
    manager.close()
    assert manager.stats()["failed_saves"] == 0
    resumed = TinyRun(seed=99, device="cuda")
    assert resumed.manager(tmp_path).load() == run.train_state(2)
    assert_equal(resumed.everything(), expected)
    assert torch.equal(torch.cuda.get_rng_state(), random_state)

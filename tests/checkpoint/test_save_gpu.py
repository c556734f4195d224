"""Saves of a model on a GPU contain the state of their own step, in all async modes."""

import pytest
import torch
import torch.distributed as dist
from tiny_run import TinyRun, assert_equal, train_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_save_contains_the_state_of_its_own_step(tmp_path, mode):
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        run = TinyRun(device="cuda")
        run.train(2)
        checkpoints = run.checkpoints(tmp_path / "saves", async_mode=mode)
        expected = run.copy_state()
        random_state = torch.cuda.get_rng_state()
        checkpoints.save(2)
        # This changes the live state immediately.
        run.train(3)
        torch.rand(1, device="cuda")
        checkpoints.close()
        assert checkpoints.stats()["failed_saves"] == 0
        resumed = TinyRun(seed=99, device="cuda")
        assert resumed.checkpoints(tmp_path / "saves").load() == train_state(2)
        assert_equal(resumed.copy_state(), expected)
        assert torch.equal(torch.cuda.get_rng_state(), random_state)
    finally:
        dist.destroy_process_group()

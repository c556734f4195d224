"""A process can create several process groups in turn, and ranks open few connections."""

import functools
import os
import re
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import World, free_port, run_small
from small_runs import ROOT, SMALL_WITHOUT_WORKERS, run_program

from titanlite import Trainer, UserError, evaluate_text, load_job
from titanlite.config.schema import JobConfig
from titanlite.hooks.hook import Hook
from titanlite.runtime.process import STORE
from titanlite.runtime.rank_group import RankGroup
from titanlite.runtime.world import gathered, process_group


@pytest.mark.slow
@pytest.mark.long
def test_documented_programs_run_on_two_ranks_of_torchrun(tmp_path):
    """Each program creates a new process group, and resumes or scores the run of the last one."""
    page = (ROOT / "docs/reference/python.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "program.py").write_text("\n".join(programs))
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2 program.py"

    output = run_program(sys.executable, *torchrun.split(), folder=tmp_path).stdout

    assert "2 x cpu" in output
    assert output.count("step 6: loss") == 2
    assert (tmp_path / "outputs/python-hf/config.json").exists()


def small_job(folder: Path, options: str = "") -> JobConfig:
    (folder / "job.toml").write_text(SMALL_WITHOUT_WORKERS)
    files = f"--job.config_file {folder}/job.toml --job.dump_folder {folder}/out"
    return load_job(f"{files} --training.steps 2 {options}".split())


def test_a_second_open_trainer_is_rejected_and_the_first_one_still_trains(tmp_path):
    job = small_job(tmp_path)
    with Trainer(job) as first:
        with pytest.raises(UserError, match="Trainer"):
            Trainer(job)
        first.step()
    assert first.steps_done == 1


def test_a_program_cannot_train_past_the_last_step(tmp_path):
    with Trainer(small_job(tmp_path)) as trainer:
        trainer.step()
        trainer.step()
        with pytest.raises(UserError, match="steps are done"):
            trainer.step()
        assert trainer.steps_done == 2


def test_a_closed_trainer_cannot_be_used(tmp_path):
    trainer = Trainer(small_job(tmp_path))
    trainer.train()
    for method in (trainer.step, trainer.train, trainer.save, trainer.validate):
        with pytest.raises(UserError, match="closed"):
            method()
    trainer.close()  # a second close does nothing


def test_a_closed_trainer_restores_the_signal_handlers(tmp_path):
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with Trainer(small_job(tmp_path)) as trainer:
        trainer.train()
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_a_trainer_trains_in_another_thread(tmp_path):
    def train() -> int:
        with Trainer(small_job(tmp_path)) as trainer:
            trainer.train()
        return trainer.steps_done

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train).result() == 2


def test_a_closed_trainer_restores_the_settings_of_torch(tmp_path):
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    Trainer(small_job(tmp_path, "--training.num_threads 3 --training.deterministic")).close()
    after = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    assert after == before


class UnclosableHook(Hook):
    def close(self) -> None:
        raise RuntimeError("cannot close")


def test_an_error_does_not_prevent_the_next_evaluation_or_training(tmp_path):
    with pytest.raises(RuntimeError, match="cannot close"):
        Trainer(small_job(tmp_path), hooks=[UnclosableHook()]).close()
    Trainer(small_job(tmp_path)).train()

    text = tmp_path / "text.txt"
    text.write_bytes(b"\xff")
    with pytest.raises(UserError):
        evaluate_text(tmp_path / "out", [text])
    text.write_text("import os")
    evaluate_text(tmp_path / "out", [text])


def use_unreachable_address(rank: int, port: int) -> None:
    """Set the variables of one of two ranks. The other rank is not started."""
    del os.environ[STORE]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_connect_end_with_an_error_that_names_the_address(tmp_path, rank):
    port = free_port()
    before = functools.partial(use_unreachable_address, rank, port)

    output = run_small(tmp_path / "out", "--comm.init_timeout_seconds 2", before=before, code=2)

    assert "MASTER_ADDR" in output
    assert "Traceback" not in output


def count_sockets(store: Path) -> int:
    """Use the groups of a training run and its checkpoints, and count the sockets of this rank."""
    os.environ[STORE] = str(store)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard_limit))
    before = count_open_sockets()
    with process_group(JobConfig()):
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)
        ranks = RankGroup(timeout_seconds=60)
        gathered("training")
        ranks.gather("checkpoint")
        sockets = count_open_sockets() - before
        ranks.close()
    return sockets


def count_open_sockets() -> int:
    files = Path("/proc/self/fd").iterdir()
    return sum(os.readlink(file).startswith("socket:") for file in files if file.is_symlink())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_a_rank_connects_only_to_its_neighbors_in_each_group():
    """If all ranks of each group were connected, each of the eight ranks would have 16 sockets."""
    world = World(8, count_sockets)
    world.wait_for_exit(0)
    assert max(world.results()) <= 9

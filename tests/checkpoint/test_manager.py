"""Invariants 4 and 5: exact resume, and damage is detected, named and survived."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import TinyRun, assert_equal

from titanlite.checkpoint import commit
from titanlite.checkpoint.manager import load_model_weights
from titanlite.config.errors import CheckpointError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two_saved(tmp_path) -> tuple[Path, TinyRun]:
    """A run that saved at steps 2 and 4."""
    run = TinyRun()
    manager = run.manager(tmp_path)
    for _ in range(2):
        run.train(2)
        manager.save(run.step, run.train_state())
    return tmp_path, run


@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"wrapped": True}])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, kind):
    straight = TinyRun(**kind)
    losses = straight.train(6)

    first = TinyRun(**kind)
    first.train(3)
    first.manager(tmp_path).save(3, first.train_state())
    second = TinyRun(seed=99, **kind)
    assert second.manager(tmp_path).load() == {"step": 3, "cursor": {"row": 12}}
    second.step = 3
    assert_equal(second.everything(), first.everything())
    assert second.train(3) == losses[3:]
    assert_equal(second.everything(), straight.everything())


def test_a_save_before_the_first_step_holds_weights_only(tmp_path):
    first = TinyRun()
    first.manager(tmp_path).save(0, first.train_state())
    second = TinyRun(seed=99)
    assert second.manager(tmp_path).load() == first.train_state()
    assert second.train(2) == first.train(2)


def test_wrapped_and_plain_models_read_each_others_checkpoints(tmp_path):
    wrapped = TinyRun(wrapped=True)
    wrapped.train(1)
    wrapped.manager(tmp_path).save(1, wrapped.train_state())
    plain = TinyRun(seed=99)
    plain.manager(tmp_path).load()
    plain.step = 1
    assert plain.train(1) == wrapped.train(1)


def test_a_rate_that_is_a_tensor_survives_loading(two_saved):
    folder, _ = two_saved
    run = TinyRun(seed=99)
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    run.manager(folder).load()
    assert [float(group["lr"]) for group in run.optimizer.param_groups] == [0.5, 0.5]


def test_the_random_state_comes_back(tmp_path):
    run = TinyRun()
    torch.manual_seed(5)
    run.manager(tmp_path).save(1, run.train_state())
    drawn = torch.rand(3)
    run.manager(tmp_path).load()
    assert torch.equal(torch.rand(3), drawn)


def test_an_empty_folder_holds_nothing_to_resume(tmp_path):
    assert TinyRun().manager(tmp_path / "new").load() is None
    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "deleted", "flipped"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(two_saved, file, damage):
    folder, _ = two_saved
    path = folder / "step-00000004" / file
    content = bytearray(path.read_bytes())
    if damage == "deleted":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    lines: list[str] = []
    run = TinyRun(seed=99)
    state = run.manager(folder, lines=lines).load()
    assert state is not None
    assert state["step"] == 2
    assert names(folder) == ["step-00000002", "step-00000004.damaged"]
    assert any("step-00000004 is DAMAGED" in line and file in line for line in lines)


def test_with_none_left_good_the_run_stops_now_and_at_the_next_start(two_saved):
    folder, _ = two_saved
    for path in commit.list_checkpoints(folder):
        (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no good checkpoint is left(?s:.*)step-00000002: .metadata: missing"):
        TinyRun().manager(folder).load()
    with pytest.raises(CheckpointError, match="set aside earlier"):  # never from scratch in silence
        TinyRun().manager(folder).load()


def test_load_step_goes_back_and_puts_the_later_ones_aside(two_saved):
    folder, _ = two_saved
    lines: list[str] = []
    run = TinyRun(seed=99)
    manager = run.manager(folder, lines=lines, load_step=2)
    state = manager.load()
    assert state is not None
    assert state["step"] == 2
    assert names(folder) == ["step-00000002", "step-00000004.superseded"]
    run.step = 2
    run.train(2)
    manager.save(4, run.train_state())
    assert "step-00000004" in names(folder)


def test_load_step_that_is_absent_or_damaged_is_an_error(two_saved):
    folder, _ = two_saved
    with pytest.raises(CheckpointError, match=r"load_step = 3.*present: 2, 4"):
        TinyRun().manager(folder, load_step=3).load()
    (folder / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"load_step = 2 is damaged: __0_0.distcp: 0 bytes"):
        TinyRun().manager(folder, load_step=2).load()
    assert names(folder) == ["step-00000002", "step-00000004"]


def test_other_optimizer_groups_are_refused_in_words(two_saved):
    folder, _ = two_saved
    expected = r"tok_embeddings.weight: saved in group 0 \(weight_decay 0.1\), now in group 1 \(weight_decay 0.0\)"
    with pytest.raises(CheckpointError, match=expected):
        TinyRun(decay_embeddings=False).manager(folder).load()


def test_another_model_is_refused_with_the_list(two_saved):
    folder, _ = two_saved
    with pytest.raises(CheckpointError, match=r"model.output.weight: only in it"):
        TinyRun(tied=True).manager(folder).load()


def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path):
    (tmp_path / "step-00000000-notes").mkdir()
    run = TinyRun()
    manager = run.manager(tmp_path, keep_latest_k=2)
    (tmp_path / "step-00000000").mkdir()  # without a manifest it is none of ours
    (tmp_path / ".tmp-step-00000009-other").mkdir()
    for step in (1, 2, 3, 4):
        manager.save(step, run.train_state())
        manager.save(step, run.train_state())  # nothing to do: saved already
    assert manager.failed_saves == 0
    assert names(tmp_path) == [
        ".tmp-step-00000009-other",
        "step-00000000",
        "step-00000000-notes",
        "step-00000003",
        "step-00000004",
    ]


def test_keep_latest_k_zero_keeps_all(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path, keep_latest_k=0)
    for step in range(5):
        manager.save(step, run.train_state())
    assert len(commit.list_checkpoints(tmp_path)) == 5


def test_a_failed_save_is_counted_leaves_nothing_and_the_next_one_works(two_saved):
    folder, run = two_saved
    lines: list[str] = []
    manager = run.manager(folder, lines=lines)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the system refuses to write on, as a full disk does
    manager.save(6, run.train_state())
    assert manager.failed_saves == 1
    assert "FAILED" in lines[-1]
    assert "File too large" in lines[-1]
    assert names(folder) == ["step-00000002", "step-00000004"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    manager.save(6, run.train_state())
    assert manager.failed_saves == 1
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_killed_save_leaves_a_folder_that_the_next_start_removes(two_saved, monkeypatch):
    folder, run = two_saved
    manager = run.manager(folder)

    def killed(*args):
        raise SystemExit  # stands for SIGKILL: no line after it runs, neither does any clean-up

    monkeypatch.setattr(commit, "write_manifest", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **keys: None)
    manager.save(6, run.train_state())
    monkeypatch.undo()
    left = names(folder)
    assert [name[:18] for name in left] == [".tmp-step-00000006", "step-00000002", "step-00000004"]
    lines: list[str] = []
    resumed = TinyRun(seed=99).manager(folder, lines=lines)
    assert lines == [f"removed 1 unfinished checkpoint folders: {left[0]}"]
    assert names(folder) == ["step-00000002", "step-00000004"]
    state = resumed.load()
    assert state is not None
    assert state["step"] == 4


def test_weights_alone_load_into_an_unsharded_model(two_saved):
    folder, run = two_saved
    expected = {k: v for k, v in run.everything().items() if k in dict(run.model.named_parameters())}
    for path in (folder, folder / "step-00000004"):
        model = Llama(run.model.arch)
        info = load_model_weights(path, model)
        assert info["train_state"]["step"] == 4
        assert_equal(dict(model.state_dict()), expected)


def test_weights_from_a_damaged_or_absent_checkpoint_are_refused(two_saved):
    folder, run = two_saved
    (folder / "step-00000004" / "__0_0.distcp").write_bytes(b"")
    assert load_model_weights(folder, Llama(run.model.arch))["train_state"]["step"] == 2
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp"):
        load_model_weights(folder / "step-00000004", Llama(run.model.arch))
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        load_model_weights(folder / "elsewhere", Llama(run.model.arch))


@pytest.mark.slow
def test_a_run_moves_from_one_rank_to_two_and_back(tmp_path):
    straight = TinyRun(seed=1)
    expected = straight.train(6)

    def train(ranks: int, first: int, last: int) -> list[float]:
        script = Path(__file__).with_name("tiny_run.py")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*launcher, str(script), str(tmp_path), str(first), str(last)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
        assert done.returncode == 0, done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("losses"))
        return [float.fromhex(word) for word in line.split()[1:]]

    assert train(1, 0, 2) == expected[:2]  # bitwise: the same layout
    moved = [*train(2, 2, 4), *train(1, 4, 6)]
    assert moved == pytest.approx(expected[2:], abs=1e-5)  # fp32 sums in another order
    assert not commit.verify_folder(tmp_path / "step-00000004")
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(names(tmp_path / "step-00000004"))

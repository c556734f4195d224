"""Invariant 4: exact resume, on the same layout and on another, and what may have changed."""

from typing import Any

import pytest
import torch
from tiny_run import TinyRun, assert_equal, list_names

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig

pytestmark = pytest.mark.usefixtures("one_rank")

TIED: dict[str, Any] = {"model": {"tied_embeddings": True}}
RECOMPUTING: dict[str, Any] = {"activation_checkpoint": {"mode": "full"}}
OFFLOADED = {"training": {"enable_cpu_offload": True}}
ROUNDED = {
    "optimizer": {"state_dtype": "bfloat16", "stochastic_rounding": True}
}  # only the moments
HALF = {"training": {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}}
NOTHING: tuple[list[str], list[str]] = [], []  # differs in the data
HALF_WEIGHTS = {
    "training": {"dtype": "bfloat16"},
    "optimizer": {"state_dtype": "float32", "stochastic_rounding": True},
}


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", [{}, TIED, RECOMPUTING, OFFLOADED, HALF])
def test_resume_is_bitwise_equal_to_an_uninterrupted_run(tmp_path, kind, mode):
    straight, lines = TinyRun(**kind), []
    checkpoints, losses, states = (
        straight.checkpoints(tmp_path, lines=lines, async_mode=mode),
        [],
        [],
    )
    for _ in range(4):
        with torch.no_grad():
            straight.model(
                torch.zeros(1, 4, dtype=torch.int64)
            )  # as a validation does; FSDP leaves the root gathered
        checkpoints.save(straight.step, straight.train_state())
        states.append(straight.copy_state())
        losses += straight.train(2)  # changes the live state while a save is under way
    checkpoints.close()
    assert checkpoints.stats()["failed_saves"] == 0
    assert sum("of which training waited" in line for line in lines) == 4 * (mode == "async")
    for step in (6, 4, 2, 0):  # before the first step there is no state of the optimizer
        resumed = TinyRun(seed=99, **kind)
        assert resumed.checkpoints(tmp_path, load_step=step).load() == {
            "step": step,
            "tokens": 0,
            "cursor": {"row": 4 * step},
        }
        resumed.step = step
        assert_equal(resumed.copy_state(), states[step // 2])
        assert resumed.train(8 - step) == losses[step:]
        assert_equal(resumed.copy_state(), straight.copy_state())


@pytest.mark.parametrize("kind", [HALF, ROUNDED, HALF_WEIGHTS])
def test_resume_with_other_dtypes_casts_weights_and_moments(tmp_path, kind):
    """And back without a loss, where the others hold more."""
    saved, other = TinyRun(), TinyRun(seed=99, **kind)
    for before, now, folder in (
        (saved, other, tmp_path / "there"),
        (other, saved, tmp_path / "back"),
    ):
        if before is saved:
            before.train(2)
        before.checkpoints(folder).save(2, before.train_state(2))
        expected = before.copy_state()
        now.checkpoints(folder).load()
        found = now.copy_state()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in found)
    assert {tensor.dtype for tensor in other.copy_state().values()} >= {torch.bfloat16}


def test_load_step_goes_back_once_and_renames_later_checkpoints(two_saved):
    folder, run = two_saved
    keys: dict[str, Any] = {
        "load_step": 2,
        "exclude_from_loading": ("optimizer", "data"),
        "keep_latest_k": 1,
    }
    job = JobConfig.model_validate({"checkpoint": keys}).model_dump(mode="json")
    checkpoints = run.checkpoints(folder, job=job, **keys)
    assert checkpoints.load()["step"] == 2
    run.step = 2
    run.train(4)
    saved = run.train_state() | {"data": {"version": 1, "row": 3}}
    checkpoints.save(6, saved)
    checkpoints.close()
    assert list_names(folder) == [
        "step-00000004.archived",
        "step-00000006",
    ]  # step 2 is not needed any more
    restarted = TinyRun(seed=99)  # goes on where the start that went back has come
    assert restarted.checkpoints(folder, job=job, **keys).load() == saved
    assert_equal(restarted.copy_state(), run.copy_state())
    keys |= {"load_step": 6, "keep_latest_k": 2}
    run.checkpoints(folder, job=job, **keys).save(8, saved | {"step": 8})
    job = JobConfig.model_validate({"checkpoint": keys}).model_dump(mode="json")
    TinyRun().checkpoints(folder, job=job, **keys).load()  # another value goes back again
    assert list_names(folder) == [
        "step-00000004.archived",
        "step-00000006",
        "step-00000008.archived",
    ]


def test_resume_restores_random_state_unless_excluded_from_loading(two_saved):
    folder, run = two_saved
    run.train(1)
    saved = run.train_state() | {"data": {"version": 1, "row": 3}}
    torch.manual_seed(5)
    run.checkpoints(folder).save(5, saved)
    drawn, fresh = torch.rand(3), TinyRun(seed=99)
    assert (
        fresh.checkpoints(folder, exclude_from_loading=("optimizer", "data", "rng")).load()
        == run.train_state()
    )
    assert_equal(fresh.copy_weights(), run.copy_weights())
    assert not any(
        value.any() for state in fresh.optimizer.state.values() for value in state.values()
    )
    assert not torch.equal(torch.rand(3), drawn)
    assert fresh.checkpoints(folder).load() == saved
    assert torch.equal(torch.rand(3), drawn)


def test_resume_logs_changes_and_rejects_incompatible_jobs(tmp_path):
    """Data is compared by its contents, and the tokenizer by its token IDs."""
    run, job, place = (
        TinyRun(),
        JobConfig().model_dump(mode="json"),
        "training.seq_len was 32, it is now 64",
    )
    run.checkpoints(tmp_path, job=job).save(
        1, run.train_state(1) | {"data": {"tokenizer": "fingerprint"}}
    )
    job["dataset"]["path"], job["optimizer"]["lr"] = "elsewhere", 1.0

    def resume(run: TinyRun, *data: list[str], **keys: Any) -> list[str]:
        lines: list[str] = []
        assert (
            run.checkpoints(
                tmp_path, job=job, lines=lines, compare_data=lambda _: data, **keys
            ).load()
            is not None
        )
        return lines

    assert resume(run, *NOTHING)[:2] == [
        "Changed since step-00000001: dataset.path: None -> elsewhere (compatible)",
        "Changed since step-00000001: optimizer.lr: 0.0003 -> 1.0 (affects training)",
    ]
    for other, data, keys, found in (
        (TinyRun(model={"n_layers": 3}), NOTHING, {}, r"model\.n_layers: 2 -> 3"),
        (TinyRun(**TIED), NOTHING, {}, r"model\.tied_embeddings: False -> True"),
        (run, ([], ["a has changed"]), {}, r"a has changed(?s:.*)dataset\.on_change = .warn."),
        (
            run,
            ([place], ["a has changed"]),
            {},
            f'{place}(?s:.*)initial_load_path = "{tmp_path}/step-00000001"',
        ),
        (run, NOTHING, {"tokenizer": "another"}, r"tokenizer\.path: .* has other token IDs"),
        (
            run,
            NOTHING,
            {"tokenizer": "another", "exclude_from_loading": ("data",)},
            r"tokenizer\.path: ",
        ),
    ):
        with pytest.raises(UserError, match=found) as caught:
            resume(other, *data, **keys)
        assert caught.value.exit_code == 2  # the job is wrong, not the checkpoint
    job["dataset"]["on_change"] = "warn"
    lines = resume(run, [], ["a has changed"])
    assert "Changed since step-00000001: a has changed (affects training)" in lines
    assert not any("dataset.path" in line for line in lines)  # said once, by what it means
    fresh = TinyRun(seed=5)
    checkpoints = fresh.checkpoints(
        tmp_path / "new", job=job, initial_load_path=str(tmp_path / "step-00000001")
    )
    assert checkpoints.load() is None  # the remedy works
    assert_equal(fresh.copy_weights(), run.copy_weights())

"""Invariant 4: runs resume exactly on any layout, and changed jobs are reported or rejected."""

import shutil
from typing import Any

import pytest
import torch
from ranks import run_small
from small_runs import job_tables
from tiny_run import Checkpoints, TinyRun, assert_equal, list_names, train_state
from train_variants import merge

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig

pytestmark = pytest.mark.usefixtures("one_rank")

TIED = job_tables("model.tied_embeddings = true")
RECOMPUTING = job_tables("activation_checkpoint.mode = 'full'")
OFFLOADED = job_tables("training.enable_cpu_offload = true")
# Muon has optimizer state before the first step.
MUON = job_tables("optimizer.name = 'Muon' ; parallelism.memory_savers = 'none'")
HALF = job_tables("training.dtype = 'bfloat16' ; optimizer.stochastic_rounding = true")
HALF_MOMENTS = job_tables(
    "optimizer.state_dtype = 'bfloat16' ; optimizer.stochastic_rounding = true"
)
HALF_WEIGHTS = merge(HALF, job_tables("optimizer.state_dtype = 'float32'"))


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    "sections",
    [{}, TIED, RECOMPUTING, OFFLOADED, MUON, HALF],
)
def test_resume_is_bitwise_equal_to_an_uninterrupted_run(tmp_path, sections, mode):
    straight = TinyRun(**sections)
    checkpoints = straight.checkpoints(tmp_path, async_mode=mode)
    losses = []
    states = []
    for _ in range(4):
        # After a forward pass as in a validation, FSDP leaves the root unsharded.
        with torch.no_grad():
            straight.model(torch.zeros(1, 4, dtype=torch.int64))
        checkpoints.save(straight.step)
        states.append(straight.copy_state())
        # These steps change the live state while a save is in progress.
        losses += straight.train(2)
    checkpoints.close()

    assert checkpoints.stats()["failed_saves"] == 0

    num_async = sum("of which training waited" in line for line in checkpoints.lines)
    assert num_async == (4 if mode == "async" else 0)

    # At step 0, most optimizers have no state.
    for step in (6, 4, 2, 0):
        resumed = TinyRun(seed=99, **sections)
        state = resumed.checkpoints(tmp_path, load_step=step).load()
        assert state == train_state(step)
        assert_equal(resumed.copy_state(), states[step // 2])
        resumed.step = step
        assert resumed.train(8 - step) == losses[step:]
        assert_equal(resumed.copy_state(), straight.copy_state())


@pytest.mark.parametrize("sections", [HALF, HALF_MOMENTS, HALF_WEIGHTS])
def test_resume_with_other_dtypes_casts_weights_and_moments(tmp_path, sections):
    """A cast to a wider type and back loses nothing."""
    full = TinyRun()
    half = TinyRun(seed=99, **sections)
    full.train(2)
    for saved, loaded, name in ((full, half, "half"), (half, full, "back")):
        saved.checkpoints(tmp_path / name).save(2)
        expected = saved.copy_state()
        loaded.checkpoints(tmp_path / name).load()
        state = loaded.copy_state()
        converted = {key: expected[key].to(value.dtype) for key, value in state.items()}
        assert_equal(state, converted)

    assert torch.bfloat16 in {tensor.dtype for tensor in half.copy_state().values()}


def test_load_step_goes_back_once_and_renames_later_checkpoints(saved_run, tmp_path):

    def checkpoints_of(run: TinyRun, **options: Any) -> Checkpoints:
        options["exclude_from_loading"] = ("optimizer", "data")
        job = JobConfig.model_validate({"checkpoint": options}).model_dump(mode="json")
        return run.checkpoints(tmp_path, job=job, **options)

    checkpoints = checkpoints_of(saved_run, load_step=2, keep_latest_k=1)

    assert checkpoints.load()["step"] == 2

    saved_run.step = 2
    saved_run.train(4)
    data = {"version": 1, "row": 3}
    checkpoints.save(6, data=data)
    checkpoints.close()

    assert list_names(tmp_path) == ["step-00000004.archived", "step-00000006"]

    # A restart continues from the newest checkpoint.
    restarted = TinyRun(seed=99)
    saved = train_state(6, data=data)
    assert checkpoints_of(restarted, load_step=2, keep_latest_k=1).load() == saved
    assert_equal(restarted.copy_state(), saved_run.copy_state())

    # Another value goes back again.
    checkpoints_of(saved_run, load_step=2, keep_latest_k=2).save(8, data=data)
    checkpoints_of(TinyRun(), load_step=6, keep_latest_k=2).load()
    archived = "step-00000004.archived", "step-00000008.archived"

    assert list_names(tmp_path) == sorted([*archived, "step-00000006"])


def test_resume_restores_random_state_unless_excluded_from_loading(saved_run, tmp_path):
    saved_run.train(1)
    data = {"version": 1, "row": 3}
    torch.manual_seed(5)
    saved_run.checkpoints(tmp_path).save(5, data=data)
    numbers = torch.rand(3)

    fresh = TinyRun(seed=99)
    excluded = fresh.checkpoints(tmp_path, exclude_from_loading=("optimizer", "data", "rng"))

    assert excluded.load() == train_state(5)
    assert_equal(fresh.copy_weights(), saved_run.copy_weights())
    assert fresh.has_empty_optimizer()
    assert not torch.equal(torch.rand(3), numbers)

    assert fresh.checkpoints(tmp_path).load() == train_state(5, data=data)
    assert torch.equal(torch.rand(3), numbers)


def test_resume_logs_changes_and_rejects_incompatible_jobs(tmp_path):
    """Data is compared by its contents, and the tokenizer by its token IDs."""
    run = TinyRun()
    job = JobConfig().model_dump(mode="json")
    run.checkpoints(tmp_path, job=job).save(1, data={"tokenizer": "fingerprint"})
    job["dataset"]["path"] = "elsewhere"
    job["optimizer"]["lr"] = 1.0

    def resume(
        run: TinyRun,
        *,
        hard: str = "",
        soft: str = "",
        **options: Any,
    ) -> list[str]:
        """Resume with data that differs as described, and return the log."""
        changes = [hard] if hard else [], [soft] if soft else []
        options["compare_data"] = lambda _: changes
        checkpoints = run.checkpoints(tmp_path, job=job, **options)
        assert checkpoints.load() is not None
        return checkpoints.lines

    prefix = "Changed since step-00000001:"

    assert resume(run)[:2] == [
        f"{prefix} dataset.path: None -> elsewhere (compatible)",
        f"{prefix} optimizer.lr: 0.0003 -> 1.0 (affects training)",
    ]

    # The manifest of this copy belongs to another step.
    damaged = shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")

    def assert_rejected(message: str, run: TinyRun, **options: Any) -> None:
        with pytest.raises(UserError, match=message) as caught:
            resume(run, **options)
        # The job is wrong, so no checkpoint must be renamed.
        assert caught.value.exit_code == 2
        assert damaged.is_dir()

    soft = "a has changed"
    length = "training.seq_len was 32, it is now 64"
    fix = f'initial_load_path = "{tmp_path}/step-00000001"'
    assert_rejected(r"model\.n_layers: 2 -> 3", TinyRun(model={"n_layers": 3}))
    assert_rejected(r"model\.tied_embeddings: False -> True", TinyRun(**TIED))
    assert_rejected(rf"{soft}(?s:.*)dataset\.on_change = .warn.", run, soft=soft)
    assert_rejected(f"{length}(?s:.*){fix}", run, soft=soft, hard=length)
    assert_rejected(r"tokenizer\.path: .* has other token IDs", run, tokenizer="another")
    without_data = {"exclude_from_loading": ("data",)}
    assert_rejected(r"tokenizer\.path: ", run, tokenizer="another", **without_data)

    job["dataset"]["on_change"] = "warn"
    lines = resume(run, soft=soft)

    assert f"{prefix} a has changed (affects training)" in lines
    assert not any("dataset.path" in line for line in lines)  # reported once, by its effect

    # The suggested fix works.
    fresh = TinyRun(seed=5)
    path = str(tmp_path / "step-00000001")

    assert fresh.checkpoints(tmp_path / "new", job=job, initial_load_path=path).load() is None
    assert_equal(fresh.copy_weights(), run.copy_weights())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["", "--parallelism.pipeline_parallel_degree 2"], ids=["alone", "pipeline"]
)
def test_saved_optimizer_state_that_is_not_loaded_is_an_error_with_a_way_out(tmp_path, layout):
    """In the pipeline, only the last rank has the parameter."""

    def train(options: str, code: int = 0) -> str:
        plugin = "--job.plugins freezing_momentum --optimizer.name freezing_momentum"
        ranks = 2 if layout else 1
        return run_small(tmp_path / "run", plugin, layout, options, ranks=ranks, code=code)

    train("--training.steps 2")
    frozen = "--training.steps 4 --freezing_momentum.frozen output.weight"

    log = train(frozen, code=2)
    assert "optimizer.output.weight.momentum" in log
    assert "optimizer.norm.weight" not in log
    assert 'checkpoint.exclude_from_loading = ["optimizer"]' in log

    log = train(f"{frozen} --checkpoint.exclude_from_loading optimizer")
    assert "Resumed after step 2 " in log

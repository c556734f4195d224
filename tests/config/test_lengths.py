"""Lengths in tokens become whole steps, which a run keeps when it resumes."""

import random
from itertools import accumulate
from pathlib import Path

import pytest
import tomli

from titanlite.checkpoint.manifest import encode_manifest
from titanlite.config.load import dump_config
from titanlite.config.run import Run
from titanlite.load_run import load_run

SEQ_LEN = 32


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, options: str = "", ranks: int = 1) -> Run:
    Path("job.toml").write_text(text)
    return load_run(f"--job.config_file job.toml {options}".split(), ranks)


def job_text(
    training: str = "tokens = '100K'",
    other: str = "",
    local_batch_size: int = 4,
) -> str:
    batch = f"seq_len = {SEQ_LEN}\nlocal_batch_size = {local_batch_size}"
    return f"[training]\n{batch}\n{training}\n{other}"


def read_lengths(run: Run) -> list[int | None]:
    job = run.job
    schedule = job.lr_scheduler
    steps = [job.training.steps, schedule.total_steps, schedule.warmup_steps, schedule.decay_steps]
    return [*steps, job.checkpoint.interval, job.validation.freq]


def count_steps(tokens: int, batch_sizes: list[int]) -> int:
    """Count the steps that fit into a number of tokens, in a plain loop."""
    return sum(total * SEQ_LEN <= tokens for total in accumulate(batch_sizes))


@pytest.mark.parametrize("seed", range(12))
def test_lengths_are_the_most_steps_that_fit_into_the_tokens(seed: int):
    rng = random.Random(seed)
    changes = {rng.randrange(1, 90): 4 * rng.randint(1, 6) for _ in range(rng.randrange(4))}
    stages = [
        f"[[dataset.stages]]\nstart_step = {step}\nglobal_batch_size = {size}\n"
        for step, size in changes.items()
    ]
    tokens = rng.randint(5_000, 30_000)
    total = rng.randint(30_000, 50_000)
    warmup, decay, interval = (rng.randint(1_000, 4_000) for _ in range(3))
    other = (
        f"[lr_scheduler]\ntotal_steps = '{total / 1e3}K'\nwarmup_steps = '{warmup / 1e3}K'\n"
        f"decay_steps = '{decay / 1e6}M'\n[checkpoint]\ninterval = '{interval / 1e3}K'\n"
        f"[validation]\nholdout = 0.1\nfreq = 7\n{''.join(stages)}"
    )

    run = load(job_text(f"tokens = {tokens}", other))

    batch_sizes = [4]
    for step in range(1, 1000):
        batch_sizes.append(changes.get(step, batch_sizes[-1]))
    steps = count_steps(tokens, batch_sizes)
    total_steps = count_steps(total, batch_sizes)

    assert read_lengths(run) == [
        steps,
        total_steps,
        count_steps(warmup, batch_sizes),
        count_steps(decay, batch_sizes[total_steps - 1 :: -1]),
        interval // (max(batch_sizes[:steps]) * SEQ_LEN),
        7,
    ]


def test_config_toml_records_steps_and_loads_to_the_same_run():
    run = load(job_text(other="[checkpoint]\ninterval = '10K'\n"), ranks=2)

    saved = dump_config(run.job)

    assert tomli.loads(saved)["training"]["steps"] == 100_000 // (2 * 4 * SEQ_LEN)
    assert "tokens" not in tomli.loads(saved)["training"]

    Path("config.toml").write_text(saved)
    assert load_run(["--job.config_file", "config.toml"], 2) == run


def test_tokens_per_parameter_count_all_parameters():
    run = load(job_text("tokens_per_parameter = 20"))

    assert run.job.training.steps == 20 * 6_229_248 // (4 * SEQ_LEN)


@pytest.mark.parametrize(
    ("training", "option", "steps"),
    [
        ("tokens = '100K'", "--training.steps 7", 7),
        ("steps = 7", "--training.tokens 12.8K", 100),
        ("tokens_per_parameter = 20", "--training.tokens 12800", 100),
        ("tokens = 12800\nsteps = 7", "--training.tokens_per_parameter 1", 48666),
    ],
)
def test_a_length_on_the_command_line_replaces_that_in_the_file(training, option, steps):
    schedule = "[lr_scheduler]\nwarmup_steps = '50K'\ndecay_steps = '40K'\n"  # even if longer
    assert load(job_text(training, schedule), option).job.training.steps == steps


def save_progress(step: int, sequences: int, load_step: int = -1) -> None:
    """Write a checkpoint that contains nothing but its job and the number of sequences so far."""
    schedule = {"step": step, "rows": [sequences]}
    state = {"step": step, "tokens": 1, "data": {"schedule": schedule}}
    job = {"lr_scheduler": {"warmup_steps": 50}, "checkpoint": {"load_step": load_step}}
    info = {"job": job, "architecture": {}, "train_state": state}
    manifest = Path(f"outputs/job/checkpoint/step-{step:08}/manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(encode_manifest({"format": 2, "step": step, "files": {}, "info": info}))


@pytest.mark.parametrize("local_batch_size", [4, 8, 1])
def test_a_resumed_run_ends_after_the_same_tokens_with_any_batch_size(local_batch_size: int):
    other = "[lr_scheduler]\nwarmup_steps = '6.4K'\ndecay_steps = '12.8K'\n"
    first = load(job_text("tokens = '64K'", other))

    assert read_lengths(first)[:4] == [500, None, 50, 100]

    save_progress(100, 100 * 4)

    resumed = load(job_text("tokens = '64K'", other, local_batch_size))

    remaining = 400 * 4 // local_batch_size
    expected = [100 + remaining, None, 50, 100 * 4 // local_batch_size]

    assert read_lengths(resumed)[:4] == expected

    save_progress(120, 100 * 4 + 20 * local_batch_size)
    assert load(job_text("tokens = '64K'", other, local_batch_size)) == resumed


@pytest.mark.parametrize(
    ("load_step_before", "steps"),
    [(-1, 500), (100, 200 + (2000 - 1200) // 4)],
    ids=["resumes from step 100", "restarts after that"],
)
def test_a_run_that_goes_back_counts_the_sequences_of_the_loaded_checkpoint(
    load_step_before, steps
):
    save_progress(100, 100 * 4)
    save_progress(200, 100 * 4 + 100 * 8, load_step_before)

    run = load(job_text("tokens = '64K'"), "--checkpoint.load_step 100")

    assert run.job.training.steps == steps

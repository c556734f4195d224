"""Each difference between two jobs has one effect. test_resume.py tests further differences."""

from dataclasses import asdict
from typing import Any

import pytest
import tomli

from titanlite.config.job_diff import AFFECTS_TRAINING, COMPATIBLE, INCOMPATIBLE, compare_jobs
from titanlite.config.run import build_architecture
from titanlite.config.schema import JobConfig


def parse_job(text: str) -> dict[str, Any]:
    job = JobConfig.model_validate(tomli.loads(text))
    return job.model_dump(mode="json") | {"model": asdict(build_architecture(job.model))}


def of_plugin(gain: int) -> dict[str, Any]:
    model = {"architecture": "own", "gain": gain}
    return parse_job("") | {"model": model, "own": {"gain": gain}}


SAME_DATA = ([], [])  # the loader reports no change
SPELLED_OUT = "model = {dim = 256, n_layers = 6, n_heads = 4, n_kv_heads = 2}"
BATCH = "training.global_batch_size = 32\n"
SEED = "dataset.seed = 5\n"
OTHER_DATA = "dataset.source = 'text'\ntraining = {seq_len = 64, seed = 1}"
A = "[[dataset.sources]]\nsource = 'jsonl'\npath = 'a'\n"
B = A.replace("'a'", "'b'")
TEXT_A = A.replace("jsonl", "text")
HEAVY_A = f"{A}weight = 2.0\n"
WARN = "dataset.on_change = 'warn'\n"
WEIGHT = "dataset.sources.0.weight: 1.0 -> 2.0"
THETA = "model.rope_theta: 10000.0 -> 500000.0"


@pytest.mark.parametrize(
    ("before", "now", "data", "effect", "lines"),
    [
        ("", "", None, COMPATIBLE, []),
        ("", "checkpoint.exclude_from_loading = ['rng']", None, AFFECTS_TRAINING, 1),
        ("", "training.steps = 7", None, AFFECTS_TRAINING, ["training.steps: 10000 -> 7"]),
        ("", "training.local_batch_size = 4", None, AFFECTS_TRAINING, 1),
        (BATCH, f"{BATCH}training.local_batch_size = 2", None, COMPATIBLE, 1),
        ("", "model.rope_theta = 5e5", None, AFFECTS_TRAINING, [THETA]),
        # These options describe the same model as the flavor.
        ("", SPELLED_OUT, None, COMPATIBLE, []),
        ("", OTHER_DATA, None, AFFECTS_TRAINING, 3),  # None: the data starts again
        ("", OTHER_DATA, SAME_DATA, COMPATIBLE, 3),
        (SEED, f"{SEED}training.seed = 1", None, AFFECTS_TRAINING, ["training.seed: 0 -> 1"]),
        (A + A, A + B, None, COMPATIBLE, ["dataset.sources.1.path: a -> b"]),
        (A, A + A, None, AFFECTS_TRAINING, ["dataset.sources: 1 tables -> 2 tables"]),
        # The loader's message replaces that about the option.
        (A, TEXT_A, (["hard"], []), INCOMPATIBLE, ["hard"]),
        (A, HEAVY_A, None, AFFECTS_TRAINING, [WEIGHT]),
        (A, HEAVY_A, SAME_DATA, INCOMPATIBLE, [WEIGHT]),
        (A, WARN + HEAVY_A, SAME_DATA, AFFECTS_TRAINING, [WEIGHT]),
    ],
)
def test_each_change_has_one_effect(before, now, data, effect, lines):
    check_effect(parse_job(before), parse_job(now), data, effect, lines)


def test_options_of_a_plugin_affect_training():
    check_effect(of_plugin(1), of_plugin(2), None, AFFECTS_TRAINING, ["own.gain: 1 -> 2"])


def test_a_model_of_another_version_is_not_compared_by_its_options():
    """Tensor shapes decide whether the checkpoint matches the model."""
    before = parse_job("") | {"model": {"gone": 1}}
    check_effect(before, parse_job(""), None, COMPATIBLE, [])


def check_effect(before, now, data, effect, lines) -> None:
    """Check that all changes have `effect` or are compatible, and compare those with `effect`."""
    changes = compare_jobs(before, now, data=data)
    reported = [line for change_effect, line in changes if change_effect == effect]
    assert lines in (reported, len(reported))
    assert {change_effect for change_effect, _ in changes} <= {effect, COMPATIBLE}

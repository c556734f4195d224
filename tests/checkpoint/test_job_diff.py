"""Each difference between two jobs has one verdict. More of them: what test_resume.py resumes from."""

from dataclasses import asdict
from typing import Any

import pytest

from titanlite.checkpoint.job_diff import CURVE, HARMLESS, REFUSED, compare_jobs
from titanlite.config.run import architecture
from titanlite.config.schema import JobConfig

SAME_DATA = ([], [])  # what the loader says of data that has not changed


def job(**keys: Any) -> dict:
    """A job file with `section__key=value` set."""
    sections: dict[str, dict] = {}
    for name, value in keys.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    found = JobConfig.model_validate(sections)
    return found.model_dump(mode="json") | {"model": asdict(architecture(found.model))}


def mix(*tables: dict, **keys: Any) -> dict:
    return job(dataset__sources=[{"source": "jsonl", "path": "a", **table} for table in tables], **keys)


SPELLED = {"model__dim": 256, "model__n_layers": 6, "model__n_heads": 4, "model__n_kv_heads": 2}
BATCH, SEED = {"training__global_batch_size": 32}, {"dataset__seed": 5}
OWN = [job() | {"model": {"architecture": "own", "gain": gain}, "own": {"gain": gain}} for gain in (1, 2)]  # a plugin's
OTHER_DATA = {"dataset__source": "text", "training__seq_len": 64, "training__seed": 1}
WEIGHT = "dataset.sources.0.weight: 1.0 -> 2.0"


@pytest.mark.parametrize(
    ("before", "now", "data", "verdict", "lines"),
    [
        (job(), job(), None, HARMLESS, []),
        (job(), job(checkpoint__exclude_from_loading=["rng"]), None, CURVE, 1),
        (job(), job(training__steps=7), None, CURVE, ["training.steps: 10000 -> 7"]),
        (job(), job(training__local_batch_size=4), None, CURVE, 1),
        (job(**BATCH), job(**BATCH, training__local_batch_size=2), None, HARMLESS, 1),
        (job(), job(model__rope_theta=5e5), None, CURVE, ["model.rope_theta: 10000.0 -> 500000.0"]),
        (job(), job(**SPELLED), None, HARMLESS, []),  # a flavor written out is the same model
        ({**job(), "model": {"gone": 1}}, job(), None, HARMLESS, []),  # of another version: the shapes will tell
        (*OWN, None, CURVE, ["own.gain: 1 -> 2"]),
        (job(), job(**OTHER_DATA), None, CURVE, 3),  # the data starts afresh: never refused
        (job(), job(**OTHER_DATA), SAME_DATA, HARMLESS, 3),
        (job(**SEED), job(**SEED, training__seed=1), None, CURVE, ["training.seed: 0 -> 1"]),
        (mix({}, {}), mix({}, {"path": "b"}), None, HARMLESS, ["dataset.sources.1.path: a -> b"]),
        (mix({}), mix({}, {}), None, CURVE, ["dataset.sources: 1 tables -> 2 tables"]),
        (mix({}), mix({"source": "text"}), (["hard"], []), REFUSED, ["hard"]),  # the loader's words, not the key's
        (mix({}), mix({"weight": 2.0}), None, CURVE, [WEIGHT]),
        (mix({}), mix({"weight": 2.0}), SAME_DATA, REFUSED, [WEIGHT]),
        (mix({}), mix({"weight": 2.0}, dataset__on_change="warn"), SAME_DATA, CURVE, [WEIGHT]),
    ],
)
def test_each_change_has_one_verdict(before, now, data, verdict, lines):
    changes = compare_jobs(before, now, data=data)
    found = [line for given, line in changes if given == verdict]
    assert lines in (found, len(found))
    assert all(given in (verdict, HARMLESS) for given, _ in changes)

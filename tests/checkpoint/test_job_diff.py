"""Each difference between two jobs has one effect. test_resume.py tests more of them."""

from dataclasses import asdict
from typing import Any

import pytest

from titanlite.config.job_diff import AFFECTS_TRAINING, COMPATIBLE, INCOMPATIBLE, compare_jobs
from titanlite.config.run import build_architecture
from titanlite.config.schema import JobConfig

SAME_DATA = ([], [])  # what the loader says of data that has not changed


def job(**keys: Any) -> dict:
    """A job file with `section__key=value` set."""
    sections: dict[str, dict] = {}
    for name, value in keys.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    found = JobConfig.model_validate(sections)
    return found.model_dump(mode="json") | {"model": asdict(build_architecture(found.model))}


def mix(*tables: dict, **keys: Any) -> dict:
    return job(
        dataset__sources=[{"source": "jsonl", "path": "a", **table} for table in tables], **keys
    )


SPELLED = {"model__dim": 256, "model__n_layers": 6, "model__n_heads": 4, "model__n_kv_heads": 2}
BATCH, SEED = {"training__global_batch_size": 32}, {"dataset__seed": 5}
OWN = [
    job() | {"model": {"architecture": "own", "gain": gain}, "own": {"gain": gain}}
    for gain in (1, 2)
]  # a plugin's
OTHER_DATA = {"dataset__source": "text", "training__seq_len": 64, "training__seed": 1}
WEIGHT = "dataset.sources.0.weight: 1.0 -> 2.0"


@pytest.mark.parametrize(
    ("before", "now", "data", "effect", "lines"),
    [
        (job(), job(), None, COMPATIBLE, []),
        (job(), job(checkpoint__exclude_from_loading=["rng"]), None, AFFECTS_TRAINING, 1),
        (job(), job(training__steps=7), None, AFFECTS_TRAINING, ["training.steps: 10000 -> 7"]),
        (job(), job(training__local_batch_size=4), None, AFFECTS_TRAINING, 1),
        (job(**BATCH), job(**BATCH, training__local_batch_size=2), None, COMPATIBLE, 1),
        (
            job(),
            job(model__rope_theta=5e5),
            None,
            AFFECTS_TRAINING,
            ["model.rope_theta: 10000.0 -> 500000.0"],
        ),
        (job(), job(**SPELLED), None, COMPATIBLE, []),  # a flavor written out is the same model
        (
            {**job(), "model": {"gone": 1}},
            job(),
            None,
            COMPATIBLE,
            [],
        ),  # of another version: the shapes will tell
        (*OWN, None, AFFECTS_TRAINING, ["own.gain: 1 -> 2"]),
        (
            job(),
            job(**OTHER_DATA),
            None,
            AFFECTS_TRAINING,
            3,
        ),  # the data starts afresh: never refused
        (job(), job(**OTHER_DATA), SAME_DATA, COMPATIBLE, 3),
        (
            job(**SEED),
            job(**SEED, training__seed=1),
            None,
            AFFECTS_TRAINING,
            ["training.seed: 0 -> 1"],
        ),
        (mix({}, {}), mix({}, {"path": "b"}), None, COMPATIBLE, ["dataset.sources.1.path: a -> b"]),
        (mix({}), mix({}, {}), None, AFFECTS_TRAINING, ["dataset.sources: 1 tables -> 2 tables"]),
        (
            mix({}),
            mix({"source": "text"}),
            (["hard"], []),
            INCOMPATIBLE,
            ["hard"],
        ),  # the loader's words, not the key's
        (mix({}), mix({"weight": 2.0}), None, AFFECTS_TRAINING, [WEIGHT]),
        (mix({}), mix({"weight": 2.0}), SAME_DATA, INCOMPATIBLE, [WEIGHT]),
        (
            mix({}),
            mix({"weight": 2.0}, dataset__on_change="warn"),
            SAME_DATA,
            AFFECTS_TRAINING,
            [WEIGHT],
        ),
    ],
)
def test_each_change_has_one_effect(before, now, data, effect, lines):
    changes = compare_jobs(before, now, data=data)
    found = [line for given, line in changes if given == effect]
    assert lines in (found, len(found))
    assert all(given in (effect, COMPATIBLE) for given, _ in changes)

"""Each difference between two jobs has one verdict, and one remedy fits all that is refused."""

from pathlib import Path
from typing import Any

import pytest

from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.config.schema import JobConfig

SAME_DATA = ([], [], [])  # what the loader says of data that has not changed


def job(**keys: Any) -> dict:
    """A job file with `section__key=value` set."""
    sections: dict[str, dict] = {}
    for name, value in keys.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    return JobConfig.model_validate(sections).model_dump(mode="json")


def mix(*tables: dict, **keys: Any) -> dict:
    return job(dataset__sources=[{"source": "jsonl", "path": "a", **table} for table in tables], **keys)


SPELLED = {"model__dim": 256, "model__n_layers": 6, "model__n_heads": 4, "model__n_kv_heads": 2}
BATCH, SEED = {"training__global_batch_size": 32}, {"dataset__seed": 5}
OTHER_DATA = {"dataset__source": "text", "training__seq_len": 64, "training__seed": 1}
WEIGHT = "dataset.sources.0.weight: 1.0 -> 2.0"


@pytest.mark.parametrize(
    ("before", "now", "data", "verdict", "lines"),
    [
        (job(), job(), None, "harmless", []),
        (job(), job(metrics__log_freq=3), None, "harmless", ["metrics.log_freq: 10 -> 3"]),
        (job(), job(parallelism__data_parallel_replicate_degree=2), None, "harmless", 1),
        (job(), job(tokenizer__path="elsewhere/tokenizer.model"), None, "harmless", 1),
        (job(), job(checkpoint__exclude_from_loading=["rng"]), None, "curve", 1),
        (job(), job(training__steps=7), None, "curve", ["training.steps: 10000 -> 7"]),
        (job(), job(optimizer__state_dtype="bfloat16"), None, "curve", ["optimizer.state_dtype: None -> bfloat16"]),
        (job(), job(training__dtype="bfloat16"), None, "curve", ["training.dtype: float32 -> bfloat16"]),
        (job(), job(training__local_batch_size=4), None, "curve", 1),
        (job(**BATCH), job(**BATCH, training__local_batch_size=2), None, "harmless", 1),
        (job(), job(model__rope_theta=5e5), None, "curve", ["model.rope_theta: 10000.0 -> 500000.0"]),
        (job(), job(model__n_layers=7), None, "refused", ["model.n_layers: 6 -> 7"]),
        (job(), job(model__tied_embeddings=True), None, "refused", ["model.tied_embeddings: False -> True"]),
        (job(), job(**SPELLED), None, "harmless", []),  # a flavor written out is the same model
        (job(), job(**OTHER_DATA), None, "curve", 3),  # the data starts afresh: never refused
        (job(), job(**OTHER_DATA), SAME_DATA, "harmless", 3),
        (job(), job(**OTHER_DATA), (["place"], ["contents"], []), "refused", ["place", "contents"]),
        (job(**SEED), job(**SEED, training__seed=1), None, "curve", ["training.seed: 0 -> 1"]),
        (mix({}, {}), mix({}, {"path": "b"}), None, "harmless", ["dataset.sources.1.path: a -> b"]),
        (mix({}), mix({}, {}), None, "curve", ["dataset.sources: 1 tables -> 2 tables"]),
        (
            mix({}),
            mix({"source": "text"}),
            (["hard"], [], []),
            "refused",
            ["hard"],
        ),  # the loader's words, not the key's
        (mix({}), mix({"weight": 2.0}), None, "curve", [WEIGHT]),
        (mix({}), mix({"weight": 2.0}), SAME_DATA, "refused", [WEIGHT]),
        (mix({}), mix({"weight": 2.0}, dataset__on_change="warn"), SAME_DATA, "curve", [WEIGHT]),
    ],
)
def test_each_change_falls_into_its_class(before, now, data, verdict, lines):
    changes = compare_jobs(before, now, data=data)
    found = {kind: getattr(changes, kind) for kind in ("harmless", "curve", "refused")}
    assert {kind: len(found[kind]) for kind in found if kind != verdict and found[kind]} in ({}, {"harmless": 1})
    assert found[verdict] == lines or len(found[verdict]) == lines


def test_another_tokenizer_is_refused_with_where_it_was():
    meaning = "which gives the ids of the vocabulary another meaning"
    for data in (SAME_DATA, None):
        changes = compare_jobs(job(), job(tokenizer__path="new.model"), data=data, same_tokenizer=False)
        assert changes.lines() == [
            f"tokenizer.path: assets/tokenizer/tokenizer.model -> new.model, {meaning} (refused)"
        ]
        assert "has other contents" in compare_jobs(job(), job(), data=data, same_tokenizer=False).refused[0]


@pytest.mark.parametrize(
    "garbage",
    [
        *({}, {"model": {}}, {"model": {"flavor": []}}, {"dataset": {"sources": 3}}, {"dataset": {"sources": [3]}}),
        *({"tokenizer": {}}, {"checkpoint": {}}, {"gone": {"key": 1}}, {"training": {"gone": 1}}),
    ],
)
def test_a_job_of_another_version_is_compared_as_far_as_it_goes(garbage):
    [line] = compare_jobs(garbage, job(), same_tokenizer=False).refused
    assert line.startswith("tokenizer.path: ")
    assert {line.split(".")[0] for line in compare_jobs({**job(), **garbage}, job()).lines()} <= garbage.keys()


def test_the_remedy_fits_all_that_is_refused():
    path = Path("run/step-00000001")
    shape = compare_jobs(job(), job(model__n_layers=7), data=(["place"], ["contents"], []))
    order = compare_jobs(job(), job(), data=(["place"], ["contents"], []))
    data = compare_jobs(job(), job(), data=([], ["contents"], []))
    assert shape.remedy(path).startswith("Restore that (model.n_layers = 6), or start a new run")
    assert "initial_load_path" not in shape.remedy(path)
    assert order.remedy(path).endswith('checkpoint.initial_load_path = "run/step-00000001".')
    assert data.remedy(path).endswith('dataset.on_change = "warn".')

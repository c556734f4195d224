from pathlib import Path

import pytest

from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.config.schema import JobConfig

SAME_DATA = ([], [], [])  # what the loader says of data that has not changed


def job(**keys) -> dict:
    """A job file with `section__key=value` set."""
    sections: dict[str, dict] = {}
    for name, value in keys.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    return JobConfig.model_validate(sections).model_dump(mode="json")


@pytest.mark.parametrize(
    ("keys", "kind", "line"),
    [
        ({"metrics__log_freq": 3}, "harmless", "metrics.log_freq: 10 -> 3"),
        ({"parallelism__data_parallel_replicate_degree": 2}, "harmless", None),
        ({"tokenizer__path": "elsewhere/tokenizer.model"}, "harmless", None),
        ({"checkpoint__exclude_from_loading": ["rng"]}, "curve", "checkpoint.exclude_from_loading: [] -> ['rng']"),
        ({"training__steps": 7}, "curve", "training.steps: 10000 -> 7"),
        ({"optimizer__lr": 1e-3}, "curve", "optimizer.lr: 0.0003 -> 0.001"),
        ({"optimizer__state_dtype": "bfloat16"}, "curve", "optimizer.state_dtype: None -> bfloat16"),
        ({"optimizer__stochastic_rounding": True}, "curve", "optimizer.stochastic_rounding: False -> True"),
        ({"training__dtype": "bfloat16"}, "curve", "training.dtype: float32 -> bfloat16"),
        ({"training__local_batch_size": 4}, "curve", None),
        ({"model__rope_theta": 5e5}, "curve", "model.rope_theta: 10000.0 -> 500000.0"),
        ({"model__n_layers": 7}, "refused", "model.n_layers: 6 -> 7"),
        ({"model__tied_embeddings": True}, "refused", "model.tied_embeddings: False -> True"),
        ({"training__seq_len": 64}, "curve", "training.seq_len: 2048 -> 64"),
        ({"training__seed": 1}, "curve", "training.seed: 0 -> 1"),
        ({"dataset__source": "text"}, "curve", "dataset.source: python_stdlib -> text"),
    ],
)
def test_each_change_falls_into_its_class(keys, kind, line):
    changes = compare_jobs(job(), job(**keys))
    found = getattr(changes, kind)
    assert len(found) == 1
    assert line is None or found == [line]


def test_an_unchanged_job_has_no_changes():
    assert compare_jobs(job(), job()).lines() == []


def test_a_flavor_written_out_is_the_same_model():
    spelled = job(model__dim=256, model__n_layers=6, model__n_heads=4, model__n_kv_heads=2)
    assert compare_jobs(job(), spelled).lines() == []
    assert compare_jobs(job(model__flavor="8b"), job(model__flavor="70b")).refused[0].startswith("model.dim: 4096")


def test_a_fixed_global_batch_makes_the_local_one_harmless():
    before = job(training__global_batch_size=32)
    now = job(training__global_batch_size=32, training__local_batch_size=2)
    assert compare_jobs(before, now).lines() == ["training.local_batch_size: 8 -> 2 (harmless)"]


def mix(*tables: dict, **keys) -> dict:
    return job(dataset__sources=[{"source": "jsonl", "path": "a", **table} for table in tables], **keys)


def test_a_mix_is_compared_table_by_table():
    moved = compare_jobs(mix({}, {}), mix({}, {"path": "elsewhere"}))
    assert moved.lines() == ["dataset.sources.1.path: a -> elsewhere (harmless)"]
    assert compare_jobs(mix({}, {}), mix({"source": "text"}, {})).curve == ["dataset.sources.0.source: jsonl -> text"]
    assert compare_jobs(mix({}), mix({}, {})).curve == ["dataset.sources: 1 tables -> 2 tables"]
    renamed = compare_jobs(mix({}, {}), mix({"source": "text"}, {}), data=(["hard"], [], []))
    assert (renamed.curve, renamed.refused) == ([], ["hard"])  # the loader's words, not the key's


def test_the_weights_of_a_mix_are_part_of_the_data():
    heavier, line = mix({"weight": 2.0}), "dataset.sources.0.weight: 1.0 -> 2.0"
    assert compare_jobs(mix({}), heavier, data=SAME_DATA).refused == [line]
    assert compare_jobs(mix({}), heavier).curve == [line]
    warned = compare_jobs(mix({}), mix({"weight": 2.0}, dataset__on_change="warn"), data=SAME_DATA)
    assert (warned.curve, warned.refused) == ([line], [])


def test_a_seed_of_its_own_keeps_the_data_order():
    changes = compare_jobs(job(dataset__seed=5), job(dataset__seed=5, training__seed=1))
    assert changes.curve == ["training.seed: 0 -> 1"]


def test_a_fresh_start_of_the_data_is_never_refused():
    now = job(dataset__source="text", training__seq_len=64, training__seed=1)
    assert compare_jobs(job(), now).refused == []


def test_another_tokenizer_is_refused_and_a_moved_one_is_harmless():
    moved = job(tokenizer__path="elsewhere/tokenizer.model")
    assert compare_jobs(job(), moved).refused == []
    for data in (SAME_DATA, None):
        changes = compare_jobs(job(), moved, data=data, same_tokenizer=False)
        assert changes.harmless == []
        assert changes.refused == [
            "tokenizer.path: assets/tokenizer/tokenizer.model -> elsewhere/tokenizer.model, "
            "which gives the ids of the vocabulary another meaning"
        ]
        assert "has other contents" in compare_jobs(job(), job(), data=data, same_tokenizer=False).refused[0]


def test_keys_of_another_version_are_skipped_and_unknown_ones_change_the_curve():
    before, now = job(), job()
    before["training"]["gone"] = 1
    now["invented"] = {"key": 1}
    assert compare_jobs(before, now).lines() == []
    before["optimizer"]["momentum"], now["optimizer"]["momentum"] = 0.9, 0.8
    assert compare_jobs(before, now).curve == ["optimizer.momentum: 0.9 -> 0.8"]


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        {"model": {}},
        {"model": {"flavor": []}},
        {"dataset": {"sources": 3}},
        {"dataset": {"sources": [3]}},
        {"training": {"global_batch_size": None, "local_batch_size": "x"}},
        {"tokenizer": {}},
        {"checkpoint": {}},
    ],
)
def test_a_job_of_another_version_is_compared_as_far_as_it_goes(garbage):
    [line, *others] = compare_jobs(garbage, job(), same_tokenizer=False).refused
    assert line.startswith("tokenizer.path: ")
    assert others == []
    assert {line.split(".")[0] for line in compare_jobs({**job(), **garbage}, job()).lines()} <= garbage.keys()


def test_the_remedy_fits_all_that_is_refused():
    path = Path("run/step-00000001")
    shape = compare_jobs(job(), job(model__n_layers=7), data=(["place"], ["contents"], []))
    order = compare_jobs(job(), job(), data=(["place"], ["contents"], []))
    data = compare_jobs(job(), job(), data=([], ["contents"], []))
    assert "initial_load_path" not in shape.remedy(path)
    assert order.remedy(path).endswith('checkpoint.initial_load_path = "run/step-00000001".')
    assert "on_change" not in order.remedy(path)
    assert data.remedy(path).endswith('dataset.on_change = "warn".')


def test_the_remedy_for_another_model_names_its_keys_even_where_a_job_leaves_them_out():
    """As a job of flavor 150m that was saved before its vocabulary followed the tokenizer."""
    changes = compare_jobs(job(model__flavor="150m"), job(model__flavor="150m", model__vocab_size=4096))
    assert changes.remedy(Path("x")).startswith("Restore that (model.vocab_size = 128256), or start a new run")


def test_what_the_loader_says_takes_the_place_of_the_keys_that_it_is_about():
    now = job(dataset__source="text", dataset__path="a", training__seed=1, training__seq_len=64)
    assert compare_jobs(job(), now, data=SAME_DATA).refused == []
    assert len(compare_jobs(job(), now, data=SAME_DATA).harmless) == 4
    changes = compare_jobs(job(), now, data=(["place"], ["contents"], []))
    assert (changes.harmless, changes.refused) == ([], ["place", "contents"])
    changes = compare_jobs(job(), job(dataset__seed=3, dataset__on_change="warn"), data=(["place"], [], ["contents"]))
    assert (changes.curve, changes.refused) == (["contents"], ["place"])

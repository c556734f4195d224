"""The manifest is checked as a job file is: each value of a kind and in a range that a run gives it."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_step_folders import reseal, write_checkpoint

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.manifest import encode_manifest, read_manifest

DATA = {
    "version": 2,
    "seed": 0,
    "seq_len": 8,
    "packing": "concat",
    "tokenizer": "fingerprint",
    "holdout": 0.0,
    "schedule": {"step": 3, "rows": [24], "weights": [1], "stage_rows": [24]},
    "sources": [{"name": "a", "fingerprint": "f", "streams": [[3, 0, 0, 17], [2, 0, 0, 0]]}],
}


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of step 100 with a place in the data, and its manifest."""
    path = write_checkpoint(tmp_path, 100)
    body = read_manifest(path)
    body["info"]["train_state"] = {"step": 100, "tokens": 7, "data": copy.deepcopy(DATA)}
    reseal(path, body)
    assert step_folders.verify_folder(path) == []
    return path, body


def put(value: Any, *keys: Any):
    """A change of a manifest: the value under `keys`."""

    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return pytest.param(change, ".".join(map(str, keys)), id=f"{'.'.join(map(str, keys))} {str(value)[:20]}")


def without(*keys: str):
    """A change of a manifest: nothing under `keys`."""

    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return pytest.param(change, f"{'.'.join(keys)} is missing", id=f"without {'.'.join(keys)}")


STATE = ("info", "train_state")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(without(key) for key in ("format", "step", "files", "info")),
        *(without("info", key) for key in ("train_state", "job", "optimizer_groups", "layout", "versions")),
        *(put(None, key) for key in ("format", "step", "files", "info")),
        put(0, "format"),
        put(True, "step"),
        put("100", "step"),
        put(-5, *STATE, "step"),
        pytest.param(
            lambda body: body["info"]["train_state"].update(step=99), "with the state of step 99", id="two steps"
        ),
        put(-1, *STATE, "tokens"),
        put("many", *STATE, "tokens"),
        pytest.param(lambda body: body["info"]["train_state"].pop("tokens"), "only together", id="without tokens"),
        put([], *STATE, "data"),
        put(3, "invented"),
        put(3, "info", "invented"),
        put([], "files"),
        put({"size": -1, "xxh3_128": "0" * 32}, "files", "a.bin"),
        put({"size": 700, "xxh3_128": "x"}, "files", "a.bin"),
        put({"size": 700, "xxh3_128": "0" * 32}, "files", "../a.bin"),
        put({"training": 3}, "info", "job"),
        *(
            pytest.param(
                lambda body, keys=keys: body["info"].update(job={"checkpoint": keys}),
                f"job.checkpoint: {next(iter(keys))}",
                id=str(keys),
            )
            for keys in ({"exclude_from_loading": 5}, {"exclude_from_loading": [["rng"]]}, {"load_step": "2"})
        ),
        put({"dim": 8}, "info", "architecture"),
        put(0, "info", "layout", "world_size"),
        put([{"weight_decay": 0.1}], "info", "optimizer_groups"),
    ],
)
def test_what_no_run_writes_is_damage_with_its_place(saved, change, reason):
    path, body = saved
    change(body)
    reseal(path, body)
    [damage] = step_folders.verify_folder(path)
    assert damage.startswith("manifest.json: ")
    assert reason in damage


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", None),
        ("seq_len", 0),
        ("holdout", 2.0),
        ("schedule", {}),
        ("schedule", DATA["schedule"] | {"rows": [-1]}),
        ("schedule", DATA["schedule"] | {"rows": [1, 2]}),
        ("schedule", DATA["schedule"] | {"weights": [1, 2]}),
        ("schedule", DATA["schedule"] | {"weights": []}),
        ("schedule", DATA["schedule"] | {"weights": [0]}),
        ("schedule", DATA["schedule"] | {"step": 25}),
        ("schedule", DATA["schedule"] | {"step": 0}),
        ("schedule", DATA["schedule"] | {"step": True}),
        ("schedule", DATA["schedule"] | {"rows": [23]}),
        ("schedule", DATA["schedule"] | {"stage_rows": [25]}),
        ("schedule", {"step": 3, "rows": [1, 0], "weights": [1], "stage_rows": [1]}),
        ("schedule", DATA["schedule"] | {"rows": [0], "stage_rows": [0]}),
        ("sources", []),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": []}]),
        ("sources", DATA["sources"] * 2),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": [[0] * 4] * 24 + [[0, 0, 0, 1]]}]),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": [[1, 2, 3]]}]),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": [[1, 2, 3, -1]]}]),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": [[1, 2, 3, 4.0]]}]),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": [[1, 2, 3, "4"]]}]),
        ("sources", [{"name": "a", "fingerprint": "f", "streams": [[1, 2, 3, 1 << 64]]}]),
    ],
)
def test_a_place_in_the_data_that_is_none_is_damage(saved, key, value):
    path, body = saved
    body["info"]["train_state"]["data"][key] = value
    reseal(path, body)
    [damage] = step_folders.verify_folder(path)
    assert damage.startswith("manifest.json: info.train_state")


@pytest.mark.parametrize("rows", [[12, 12], [8, 16], [0, 24]])
def test_sources_that_have_not_had_their_shares_are_damage(saved, rows):
    path, body = saved
    data = body["info"]["train_state"]["data"]
    data["schedule"] = {"step": 3, "rows": rows, "weights": [1, 1], "stage_rows": rows}
    data["sources"] *= 2
    if not rows[0]:
        data["sources"][0] = data["sources"][0] | {"streams": [[0] * 4] * 2}
    reseal(path, body)
    assert bool(step_folders.verify_folder(path)) == (rows != [12, 12])


def test_an_index_larger_than_what_it_lists_is_damage_before_it_is_read(saved, monkeypatch):
    path, body = saved
    os.truncate(path / ".metadata", 1 << 32)  # a file of zeros that takes no room on the disk
    body["files"][".metadata"]["size"] = 1 << 32
    reseal(path, body)
    monkeypatch.setattr(step_folders, "open_file", None)
    assert step_folders.verify_folder(path) == ["manifest.json: an index larger than the tensors that it lists"]


def test_a_manifest_larger_than_any_is_damage_before_it_is_read(saved):
    path, _ = saved
    os.truncate(path / "manifest.json", 1 << 40)
    assert step_folders.verify_folder(path) == [f"manifest.json: {1 << 40} bytes, more than one can have"]


@pytest.mark.parametrize("data", [None, {}, {"seed": 1}, {"version": "2"}, {"version": True}])
def test_a_place_in_the_data_without_a_version_is_damage(saved, data):
    path, body = saved
    body["info"]["train_state"]["data"] = data
    reseal(path, body)
    assert len(step_folders.verify_folder(path)) == 1


def test_a_place_of_another_version_is_left_to_the_loader(saved):
    path, body = saved
    body["info"]["train_state"]["data"] = {"version": 3, "anything": 1}
    reseal(path, body)
    assert step_folders.verify_folder(path) == []


@pytest.mark.parametrize("depth", [500, 100_000])
def test_values_within_values_without_end_are_damage(saved, depth):
    path, body = saved
    body["info"]["job"] = {"training": {"seed": 7654321}}
    text = encode_manifest(body).decode().replace("7654321", "[" * depth + "]" * depth)
    (path / "manifest.json").write_text(text)
    assert step_folders.verify_folder(path)[0].startswith("manifest.json: altered")
    if depth < 1000:  # the standard library's reader and writer take it
        body["info"]["job"]["training"]["seed"] = json.loads("[" * depth + "]" * depth)
        reseal(path, body)
        assert step_folders.verify_folder(path)[0].startswith("manifest.json: not valid JSON: recursion limit")


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b'{"checksum": 1}', b"\xff\xfe", b"1" * 10_000])
def test_something_else_than_a_manifest_is_damage(saved, raw):
    path, _ = saved
    (path / "manifest.json").write_bytes(raw)
    assert step_folders.verify_folder(path) == [f"manifest.json: altered or truncated ({len(raw)} bytes)"]


def test_a_link_is_not_followed(saved, tmp_path):
    path, _ = saved
    (path / "manifest.json").rename(tmp_path / "elsewhere.json")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere.json")
    assert step_folders.verify_folder(path) == ["manifest.json: a symbolic link"]

"""What a start says of itself, and what differs from the start before."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titanlite.config.load import PACKAGE
from titanlite.config.schema import JobConfig, Model, Optimizer
from titanlite.data.sources.base import Source
from titanlite.hooks import starts
from titanlite.hooks.starts import Start, describe_code, start_before, told
from titanlite.observe.outputs import PACKAGES

ENVIRONMENT: dict[str, Any] = {
    "code": {"files": "f1", "commit": "a" * 40, "state": "clean"},
    "python": "3.11.2",
    "packages": dict.fromkeys(PACKAGES, "1.0"),
    "world_size": 2,
    "device": "NVIDIA H100",
    "platform": "Linux",
    "threads": 8,
}
HOSTS = ["node1, 10.0.0.1", "node1, 10.0.0.1", "node2, 10.0.0.2"]


def source(name: str, fingerprint: str) -> Source:
    return cast(Source, SimpleNamespace(name=name, fingerprint=fingerprint))


def start(
    job: JobConfig | None = None, hosts: list[str] = HOSTS, data: tuple[str, ...] = ("d1",), **changes: Any
) -> Start:
    sources = [source("mine", fingerprint) for fingerprint in data]
    return Start.of(job or JobConfig(), {**ENVIRONMENT, **changes}, hosts, sources, "t1")


def changed(now: Start, before: Start | None = None) -> list[str]:
    return [f"{part}: {line}" for part, line in now.differences(before or start())]


def test_the_same_start_again_says_that_nothing_has_changed() -> None:
    assert changed(start()) == []
    assert told([], []) == "; nothing has changed since the start before"


def test_each_part_that_differs_is_named_with_what_it_was_and_is() -> None:
    packages = {**ENVIRONMENT["packages"], "torch": "2.0"}
    job = JobConfig(optimizer=Optimizer(lr=0.5), model=Model(flavor="debugmodel", n_layers=7))
    found = changed(
        start(job, ["node2, 10.0.0.2", "node3, x"], ("d2",), packages=packages, python="3.13.0", world_size=4)
    )
    assert found == [
        "packages: Python 3.11.2 -> 3.13.0",
        "packages: torch 1.0 -> 2.0",
        "machine: left: node1",
        "machine: new: node3",
        "machine: ranks 2 -> 4",
        "data: the source mine has changed since: other files, contents or text_column",
        f"job: optimizer.lr: {JobConfig().optimizer.lr} -> 0.5",
        "job: model.n_layers: 6 -> 7",
    ]


def test_a_key_that_goes_back_to_its_default_is_a_change() -> None:
    job = JobConfig(optimizer=Optimizer(lr=0.5))
    assert changed(start(), start(job)) == [f"job: optimizer.lr: 0.5 -> {JobConfig().optimizer.lr}"]


def test_of_two_sources_with_one_name_either_can_change() -> None:
    assert changed(start(data=("d1", "d2")), start(data=("d0", "d2")))[0].startswith(
        "data: the source mine has changed"
    )


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"files": "1"}, {"files": "2"}, ["files 1 -> files 2"]),
        ({"files": "1"}, {"files": "1", "commit": "a" * 40, "state": "clean"}, []),  # git did not answer in time
        (
            {"files": "1", "commit": "a" * 40, "state": "clean"},
            {"files": "2", "commit": "a" * 40, "state": "changed"},
            ["commit aaaaaaaaaaaa -> commit aaaaaaaaaaaa with changes"],
        ),
        (
            {"files": "1", "commit": "a" * 40, "state": "changed"},
            {"files": "2", "commit": "a" * 40, "state": "changed"},
            ["commit aaaaaaaaaaaa with changes, which are others than before"],
        ),
        (
            {"files": "1", "commit": "a" * 40, "state": "changed"},
            {"files": "1", "commit": "b" * 40, "state": "clean"},
            ["commit aaaaaaaaaaaa with changes -> commit bbbbbbbbbbbb"],
        ),
    ],
)
def test_code_is_named_by_its_commit_and_known_by_its_files(
    before: dict[str, str], now: dict[str, str], said: list[str]
) -> None:
    assert changed(start(code=now), start(code=before)) == [f"code: {line}" for line in said]


def test_what_the_log_has_said_already_is_not_said_again() -> None:
    differences = [("job", "optimizer.lr: 1 -> 2"), ("code", "files 1 -> files 2")]
    text = told(differences, ["optimizer.lr: 1 -> 2"])
    assert text == "; changed since the start before:\ncode: files 1 -> files 2"
    assert told(differences[:1], ["optimizer.lr: 1 -> 2"]) == "; what has changed since the start before is said above"
    many = told([("machine", f"new: {number}") for number in range(1000)], [])
    assert len(many.splitlines()) == 42
    assert many.endswith("and 960 more")


def test_the_last_record_is_found_and_one_that_is_no_record_is_none(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert start_before(events) is None
    first, second = start(), start(world_size=4)
    lines = [{"event": "start", "record": record.model_dump(mode="json")} for record in (first, second)]
    lines.append({"event": "save", "record": {}})
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert start_before(events) == second
    for record in (None, {}, {**second.model_dump(mode="json"), "job": []}, "x"):
        events.write_text(json.dumps({"event": "start", "record": record}) + "\n")
        assert start_before(events) is None
    events.write_text(json.dumps({"event": "start", "host": "of version 0.1"}) + "\n")
    assert start_before(events) is None


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of one module."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("x = 1\n")
    return tmp_path / "package"


def git(package: Path, *words: str) -> str:
    identity = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(package.parent), "-c", "user.name=x", "-c", "user.email=x@x", *words]
    return subprocess.run(command, env={**os.environ, **identity}, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_in_a_clone_code_has_the_commit_and_whether_the_package_differs_from_it(package: Path) -> None:
    git(package, "init", "-q")
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "first")
    clean = describe_code(package)
    assert clean["commit"] == git(package, "rev-parse", "HEAD").strip()
    assert clean["state"] == "clean"
    (package.parent / "notes.txt").write_text("beside the package")
    assert describe_code(package) == clean
    (package / "module.py").write_text("x = 2\n")
    other = describe_code(package)
    assert (other["commit"], other["state"]) == (clean["commit"], "changed")
    assert other["files"] != clean["files"]
    (package / "module.py").write_text("x = 1\n")
    (package / "new.py").write_text("")
    assert describe_code(package)["state"] == "changed"


def test_without_a_clone_or_git_code_is_known_by_its_files(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(describe_code(package)) == ["files"]
    (package.parent / ".git").mkdir()  # git refuses it
    assert list(describe_code(package)) == ["files"]
    monkeypatch.setenv("PATH", "")
    assert list(describe_code(package)) == ["files"]
    assert list(describe_code()) == ["files"]
    assert PACKAGE.name == "titanlite"


def test_links_to_nothing_folders_and_odd_names_of_files_are_no_reason_to_fail(package: Path) -> None:
    plain = describe_code(package)
    (package / ".#module.py").symlink_to("someone@machine.1234")  # an editor's lock
    (package / "folder.py").mkdir()
    assert describe_code(package) == plain
    with open(os.fsencode(package) + b"/\xff.py", "w"):
        assert describe_code(package) != plain


def test_a_git_that_hangs_does_not_keep_a_start_waiting(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package.parent / ".git").mkdir()
    program = package.parent / "git"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(package.parent), prepend=os.pathsep)
    monkeypatch.setattr(starts, "GIT_SECONDS", 0.2)
    began = time.monotonic()
    assert list(describe_code(package)) == ["files"]
    assert time.monotonic() - began < 60

"""Each start records its environment, and lists the differences from the previous start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import run_small
from small_runs import read_events, read_log, run_program

from titanlite.hooks.records import describe_code


def read_last_start(folder: Path) -> dict[str, Any]:
    """Return the last start event in events.jsonl."""
    return read_events(folder, "start")[-1]


def change_record(path: Path) -> None:
    """Change the environment that a start has recorded."""
    record = json.loads(path.read_text())
    record |= {"hosts": ["node1"], "world_size": 64}
    record["packages"] |= {"torch": "2.0"}
    record["data"]["tokenizer"] = "another"
    record["code"]["files"] = "f" * 16
    path.write_text(json.dumps(record))


# How the next start reports these changes.
CHANGES = (
    "code.files: ffffffffffffffff -> ",
    "packages.torch: 2.0 -> ",
    "world_size: 64 -> 1",
    "hosts: ['node1'] -> ",
    "data.tokenizer: another -> ",
)


@pytest.mark.slow
def test_a_start_lists_what_has_changed_since_the_previous_start(tmp_path):
    out = tmp_path / "out"
    text = tmp_path / "text.jsonl"
    text.write_text((json.dumps({"text": "some words to learn from. " * 20}) + "\n") * 40)
    options = f"--dataset.source jsonl --dataset.path {text} --dataset.on_change warn"
    options += " --training.steps"

    def train_until(step: int) -> str:
        return run_small(out, options, step)

    assert "Training starts from scratch\n" in train_until(2)
    assert "changed" not in read_last_start(out)

    output = train_until(3)
    assert "Training starts after step 2\n" in output
    # The comparison with the checkpoint has already reported this option.
    assert output.count("training.steps") == 1
    assert read_last_start(out)["changed"] == ["job.training.steps: 2 -> 3"]

    record = json.loads((out / "environment.json").read_text())
    assert record == read_last_start(out)["record"]

    change_record(out / "environment.json")
    with text.open("a") as file:
        file.write(json.dumps({"text": "more words"}) + "\n")
    train_until(3)
    changed = read_last_start(out)["changed"]
    for beginning in (*CHANGES, f"data.jsonl {text}: "):
        assert any(line.startswith(beginning) for line in changed)
    assert "    world_size: 64 -> 1" in read_log(out)

    # Files of earlier versions have fewer keys.
    (out / "environment.json").write_text('{"python": "3.11", "packages": {}}')
    assert "Training starts after step 3\n" in train_until(3)

    (out / "tb").write_text("in the way")
    output = run_small(out, options, 3, "--metrics.enable_tensorboard", code=2)
    assert f"{out}/tb" in output
    assert "Traceback" not in output


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_record_of_a_clone_has_its_commit_and_whether_files_differ(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("x = 1\n")
    # Editors such as Emacs lock files with dangling links.
    (package / ".#module.py").symlink_to("someone@machine.1234")
    before = describe_code(package)
    assert list(before) == ["files"]

    def git(command: str) -> str:
        options = f"git -C {tmp_path} -c user.name=x -c user.email=x@x {command}"
        return run_program(*options.split()).stdout.strip()

    for command in ("init -q", "add .", "commit -q -m first"):
        git(command)
    commit = git("rev-parse HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert describe_code(package) == before | {"commit": commit}

    (package / "module.py").write_text("x = 2\n")
    after = describe_code(package)
    assert after["commit"] == f"{commit}-dirty"
    assert after["files"] != before["files"]

    monkeypatch.setenv("PATH", "")
    assert describe_code(package) == {"files": after["files"]}

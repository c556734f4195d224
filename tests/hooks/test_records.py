"""What a start says of itself, and what differs from the start before."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import start_small

from titanlite.hooks.records import describe_code


def start_event(folder: Path) -> dict[str, Any]:
    """The last start in events.jsonl."""
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text().splitlines()
        if line[-1] == "}"
    ]
    return [event for event in events if event["event"] == "start"][-1]


@pytest.mark.slow
def test_a_start_says_what_has_changed_since_the_one_before(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "text.jsonl").write_text(
        (json.dumps({"text": "some words to learn from. " * 20}) + "\n") * 40
    )
    words = [out, "--dataset.source", "jsonl", "--dataset.path", tmp_path / "text.jsonl"]
    words += ["--dataset.on_change", "warn", "--training.steps"]

    def starts(*options: object) -> str:
        return start_small(*words, *options).ends_with(0)

    assert "Training starts from scratch\n" in starts(2)
    assert "changed" not in start_event(out)

    said = starts(3)
    assert "Training starts after step 2\n" in said
    # By the comparison with the checkpoint.
    assert said.count("training.steps") == 1
    assert start_event(out)["changed"] == ["job.training.steps: 2 -> 3"]

    before = json.loads((out / "environment.json").read_text())
    assert before == start_event(out)["record"]

    before |= {"hosts": ["node1"], "world_size": 64}
    before["packages"] |= {"torch": "2.0"}
    before["data"]["tokenizer"] = "another"
    before["code"]["files"] = "f" * 16
    (out / "environment.json").write_text(json.dumps(before))
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more words"}) + "\n")
    starts(3)
    changed = start_event(out)["changed"]
    for beginning in (
        *(
            "code.files: ffffffffffffffff -> ",
            "packages.torch: 2.0 -> ",
            "world_size: 64 -> 1",
            "hosts: ['node1'] -> ",
        ),
        *(f"data.jsonl {tmp_path}/text.jsonl: ", "data.tokenizer: another -> "),
    ):
        assert any(line.startswith(beginning) for line in changed)

    assert "    world_size: 64 -> 1" in (out / "train.log").read_text()

    (out / "environment.json").write_text('{"python": "3.11", "packages": {}}')
    assert "Training starts after step 3\n" in starts(3)

    (out / "tb").write_text("in the way")
    said = start_small(*words, 3, "--metrics.enable_tensorboard").ends_with(2)

    assert f"{out}/tb" in said
    assert "Traceback" not in said


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_in_a_clone_code_has_the_commit_and_whether_a_file_differs_from_it(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("x = 1\n")
    (package / ".#module.py").symlink_to("someone@machine.1234")  # an editor's lock
    before = describe_code(package)

    assert list(before) == ["files"]

    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    monkeypatch.setenv("GIT_DIR", "/nowhere")

    assert describe_code(package) == before | {"commit": commit}

    (package / "module.py").write_text("x = 2\n")
    after = describe_code(package)

    assert after["commit"] == f"{commit}-dirty"
    assert after["files"] != before["files"]

    monkeypatch.setenv("PATH", "")
    assert describe_code(package) == {"files": after["files"]}

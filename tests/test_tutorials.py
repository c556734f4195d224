"""The tutorials of the documentation: every command, one after the other, in an empty folder, as a reader runs them.

Training is cut short, unless TITANLITE_TUTORIALS=whole is set. Then a model must also have learned what its page says.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
WHOLE = os.environ.get("TITANLITE_TUTORIALS") == "whole"

pytestmark = pytest.mark.slow


def follow(name: str, folder: Path) -> str:
    """Write the files of a tutorial and run its commands. Returns what they said."""
    block = r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```$'  # language, title and text
    found = re.findall(block, (TUTORIALS / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    (folder / "bin").mkdir()
    for program, words in (("titanlite", f"{sys.executable} -m titanlite"), ("python", sys.executable)):
        (folder / "bin" / program).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "bin" / program).chmod(0o755)
    for _, title, text in found:
        if title:
            (folder / title).write_text(text if WHOLE else shorter(text))
    commands = "".join(text for language, _, text in found if language == "bash")
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=1800 if WHOLE else 600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def shorter(text: str) -> str:
    """A job with fewer steps."""
    numbers = {"steps": 4, "warmup_steps": 2, "freq": 2}
    return re.sub(rf"^({'|'.join(numbers)}) = \d+", lambda key: f"{key[1]} = {numbers[key[1]]}", text, flags=re.M)


def test_from_your_text_to_a_model_that_answers(tmp_path: Path) -> None:
    said = follow("your_text.md", tmp_path)
    assert "Question: How do I write 8 3 1 1?" in said
    assert "bits/byte" in said
    assert "report.html: " in said
    assert (tmp_path / "my-model" / "config.json").exists()
    if WHOLE:
        assert "eight thousand three hundred eleven" in said.partition("perplexity")[2]


def test_two_machines(tmp_path: Path) -> None:
    said = follow("two_machines.md", tmp_path)
    assert "2 x cpu" in said
    assert f"Resumed after step {20 if WHOLE else 4}" in said
    assert "world_size: 2 -> 1" in said


def test_continue_pretraining_a_hugging_face_model(tmp_path: Path) -> None:
    said = follow("hugging_face.md", tmp_path)
    assert "step-00000000" in said
    assert "from transformers import" in said

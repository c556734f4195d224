"""The world of ranks: one after the other in a process, and one that nobody has described."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite import cli


@pytest.mark.slow
def test_the_programs_of_the_documentation_run_on_two_ranks_of_torchrun(tmp_path: Path) -> None:
    """They start one world after the other in a process, each of which resumes, or scores, what the one before made."""
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    (tmp_path / "program.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = subprocess.run(
        [*torchrun, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 x cpu" in ended.stdout
    assert ended.stdout.count("step 6: loss") == 2
    assert (tmp_path / "outputs/python-hf/config.json").exists()


def test_a_world_that_no_launcher_has_described_is_answered_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert cli.main(["train"]) == 2
    assert "MASTER_PORT" in capsys.readouterr().err

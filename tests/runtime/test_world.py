"""The world of ranks, and the heap on a CPU: memory that is kept, in a process of its own, as it cannot be undone."""

import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from titanlite import cli

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library's own heap")


def run(code: str) -> list[int]:
    """The numbers that `code` prints, after the heap was told to keep what is freed."""
    start = """
        import resource, torch
        from titanlite.runtime.world import keep_freed_memory
        keep_freed_memory()
    """
    words = [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)]
    return [int(word) for word in subprocess.check_output(words, text=True).split()]


@GLIBC
def test_freed_tensors_leave_their_pages_to_the_next_ones():
    first, *_, last = run("""
        def page_faults_of_a_tensor():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(16 << 20)  # 64 MB
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(*[page_faults_of_a_tensor() for _ in range(10)])  # small things move the first ones
    """)
    assert first > 1000
    assert last < 10


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
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["train"]) == 2
    assert "WORLD_SIZE=2, but no MASTER_ADDR and no MASTER_PORT" in capsys.readouterr().err

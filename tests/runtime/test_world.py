"""The heap on a CPU: memory that is kept, in a process of its own, as it cannot be undone."""

import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
def test_ranks_of_another_launcher_meet_by_its_variables(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    sizes = "dim = 64\nn_layers = 1\nn_heads = 2\nn_kv_heads = 1\nffn_dim = 64"
    job.write_text(f"[model]\n{sizes}\n[training]\nsteps = 2\nseq_len = 32\nlocal_batch_size = 1\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "titanlite", "train", "--job.config_file", job, "--job.dump_folder", tmp_path / "out"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 x cpu" in ended.stdout
    assert (tmp_path / "out" / "checkpoint" / "step-00000002").is_dir()

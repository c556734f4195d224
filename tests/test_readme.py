"""The README's commands, run one after the other in a fresh copy of the repository, as a newcomer would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_package import copy_of_repository

from titanlite.load_run import load_run

ROOT = Path(__file__).parents[1]
# Instead of two minutes.
SHORT = (
    " --training.steps 4 --checkpoint.interval 4 --training.seq_len 64 --training.local_batch_size 1 --model.n_layers 1"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Tracked files only, with the environment that is already installed."""
    folder = copy_of_repository(tmp_path / "titanlite")
    # Stamped for this folder, so that ./run_train.sh does not install anew; the package is found by PYTHONPATH.
    (folder / ".venv").mkdir()
    for entry in (ROOT / ".venv").iterdir():
        if not entry.name.startswith("installed"):
            (folder / ".venv" / entry.name).symlink_to(entry)
    checksum = subprocess.check_output(["cksum", "pyproject.toml"], cwd=folder, text=True)
    (folder / ".venv" / "installed.").write_text(f"{checksum.strip()} {folder}\n")
    return folder


def run(command: str, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "2", **variables}
    done = subprocess.run(command, cwd=folder, shell=True, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_command_of_the_readme_works(clone: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    commands = [line.split("  #")[0].strip() for line in lines if line and not line.startswith("#")]
    for command in commands:
        if "tensorboard" in command:
            assert "1_loss/train" in run(f"{command} --inspect", clone)  # instead of serving: the curves that it finds
        elif "run_train.sh" in command and "--help" not in command:
            assert re.search(r"step +4/4|Nothing to do", run(command + SHORT, clone))
        elif command != "./run_tests.sh" and not command.startswith(("git clone", "cd ")):
            said = run(command, clone)
            assert all(prompt in said for prompt in re.findall(r"--prompt '([^']*)'", command))
    assert sum("run_train.sh" in command for command in commands) >= 2


def test_the_job_file_of_the_readme_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("toml")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "my_job.toml").write_text(block)
    monkeypatch.chdir(tmp_path)
    assert load_run(["--job.config_file", "my_job.toml"], world_size=1).job.dataset.source == "jsonl"


def test_the_readme_names_files_that_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link


PAGES = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL) for page in (ROOT / "docs").glob("*.md")
}


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(page for page, found in PAGES.items() if found), ids=lambda page: page.name)
def test_python_of_the_documentation_runs(page: Path, tmp_path: Path) -> None:
    """The blocks of a page are one program, in an empty folder."""
    program = tmp_path / "program.py"
    program.write_text("\n".join(PAGES[page]))
    run(f"{sys.executable} {program}", tmp_path, PYTHONPATH=str(ROOT))

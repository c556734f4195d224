"""`titanlite launch` rejects wrong jobs at once, passes on signals, and reports the first failure.

scripts/setup.sh installs once before it, or uses the packages of another Python without a network.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import descendants
from small_runs import ROOT, read_jsonl, run_program

from titanlite.config.load import load_job

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PDEATHSIG")


@pytest.fixture(autouse=True)
def change_to_empty_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


def write_executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def test_a_wrong_job_is_rejected_at_once_without_torch_or_a_folder(tmp_path):
    (tmp_path / "wrong.toml").write_text('[training]\nsteps = "abc"\n[modle]\ndim = 3\n')
    options = ["--job.config_file", "wrong.toml", "--optimizer.lr", "x"]

    # This variable makes Python list its imports on standard error.
    command = (ROOT / "run_train.sh", *options)
    process = run_program(*command, variables={"PYTHONPROFILEIMPORTTIME": "1"}, code=2)

    assert "3 mistakes:" in process.stderr
    assert "Traceback" not in process.stderr

    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "titanlite.cli" in imported
    assert "torch" not in imported
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0", 1),
        ("1,0", 2),
        ("", 0),
        ("-1", 0),
        ("GPU-a,GPU-b,GPU-c", 2),
    ],
)
def test_more_processes_than_visible_gpus_are_rejected(
    monkeypatch, tmp_path, run_command, visible, count
):
    write_executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho H100, 81000\necho GB10, '[N/A]'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NGPU", str(count + 1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    errors = run_command("launch --training.steps 0", code=2)

    assert (f"this node has {count}." in errors) == (count > 0)


@pytest.fixture
def command() -> Iterator[list[str]]:
    """Return the command that launches two ranks of mishap_run.py."""
    # The ranks would inherit that nohup ignores the signal.
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield [sys.executable, "-P", str(ROOT / "tests/mishap_run.py"), "launch", "2"]
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishap", "code", "begin", "end"),
    [
        ("guard_on_one", 3, "loss is nan on one rank\n", ""),
        ("crash", 1, "Rank 1 failed first: ", "ValueError: the root cause\n"),
        (
            "hang",
            1,
            "Rank 1 failed first: exit code 1. Killed, because they did not end: ranks 0.\nTrace",
            "",
        ),
        ("exit", 1, "Rank 1 failed first: exit code 0 ", ""),
    ],
)
def test_the_first_failure_is_reported_once_and_ends_all_ranks(mishap, code, begin, end, command):
    started = time.monotonic()
    process = run_program(*command, mishap, code=code)

    assert process.stderr.startswith(begin)
    assert process.stderr.endswith(end)
    assert process.stderr.count("Traceback") == (mishap in ("crash", "hang"))
    # The agent of torch would wait 30 s for the other rank.
    assert time.monotonic() - started < 25


def start(command: list[str], mishap: str) -> Any:
    """Return the launcher when both ranks are ready."""
    launcher: Any = subprocess.Popen(
        [*command, mishap], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "ready\n"
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishap", "signals", "seconds", "code", "message"),
    [
        ("save", [signal.SIGTERM], 60, 75, "saved after 1 signal"),
        ("early", [signal.SIGUSR1], 2, 128 + signal.SIGUSR1, "Stopped by SIGUSR1 without a save."),
        ("stuck", [signal.SIGTERM], 2, 143, "ranks 0, 1."),
        ("stuck", [signal.SIGINT, signal.SIGINT], 60, 130, "ranks 0, 1."),
    ],
)
def test_a_signal_reaches_each_rank_once_and_they_have_time_to_save(
    mishap, signals, seconds, code, message, command, monkeypatch
):
    monkeypatch.setenv("STOP_SECONDS", str(seconds))
    launcher = start(command, mishap)
    for number in signals:
        launcher.send_signal(number)
        time.sleep(0.3)
    _, errors = launcher.communicate(timeout=30)

    assert launcher.returncode == code
    assert errors.count(": Stopping after ") == 1
    # A run stops one or two steps after the step in which the signal arrives.
    assert "after this step" not in errors
    assert ("Ctrl-C" in errors) == (signals[0] == signal.SIGINT)
    assert f"{message}\n" in errors


@pytest.mark.slow
@LINUX
def test_a_launcher_that_was_stopped_names_the_rank_that_failed_first(command, tmp_path):
    launcher = start(command, "lost")
    ranks = descendants(launcher.pid)[1:]
    launcher.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    while not all(is_zombie(pid) for pid in ranks):
        time.sleep(0.05)
    # After this pause the launcher finds both ranks dead, and must determine which died first.
    time.sleep(1)
    launcher.send_signal(signal.SIGCONT)

    _, errors = launcher.communicate(timeout=30)

    assert errors.startswith("Rank 1 failed first: SIGKILL")


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, but its parent has not collected its exit code."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.slow
@LINUX
def test_ranks_save_and_stop_when_their_launcher_is_killed(command, tmp_path):
    launcher = start(command, "orphan")
    launcher.kill()
    launcher.wait(timeout=10)

    deadline = time.monotonic() + 10
    while not all((tmp_path / f"saved{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_hangs_crashes_and_restarts_are_events_and_cannot_control_a_terminal(command, tmp_path):
    """The launcher escapes text from ranks and names of folders."""
    process = run_program(*command, "hostile", variables={"MAX_RESTARTS": "1"}, code=9)

    events = read_jsonl(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["hang", "failure", "restart", "hang", "failure"]

    log = (tmp_path / "run.log").read_text()
    event_texts = "\n".join(event["text"] for event in events)
    for text in (process.stderr, log, event_texts):
        assert "a tensor\\x1b[2J named" in text
        assert "To resume: outputs/\\x1b]0;mine\\x07" in text
        assert text.replace("\n", "").isprintable()

    # Each line starts or continues an event.
    assert all(re.match(r"\[\d{4}-|    ", line) for line in log.splitlines())


BUSY = """
import os
from titanlite.runtime.process import serve_parent
serve_parent()
print(os.getpid(), flush=True)
while True:
    pass
"""


@LINUX
def test_a_child_in_a_busy_loop_does_not_outlive_its_killed_parent():
    program = (
        "from titanlite.runtime.process import start_python; "
        f"start_python(['-c', {BUSY!r}], {{}}).wait()"
    )
    parent: Any = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    # A scheduler signals the whole process group, but means the parent.
    os.kill(child, signal.SIGTERM)

    parent.kill()

    # The pipe closes when the child, which inherited it, has ended.
    assert parent.stdout.read() == b""

    parent.wait()


POD = """#!/bin/bash
trap 'sleep 0.5; touch saved; exit {code}' TERM
sleep 1  # until the shell that started this script has set its own trap
echo ready
{wait}
exit {code}
"""


@pytest.mark.parametrize(
    ("is_evicted", "rank_code", "code"),
    [(True, 75, 143), (False, 3, 3)],
    ids=["evicted", "failed"],
)
def test_a_pod_saves_before_it_is_evicted_and_passes_on_other_exit_codes(
    is_evicted, rank_code, code, tmp_path
):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "scripts/kubernetes/pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    wait = "for i in {1..100}; do sleep 0.1; done" if is_evicted else ""
    write_executable(tmp_path / "run_train.sh", POD.format(code=rank_code, wait=wait))

    pod: Any = subprocess.Popen(
        [*container["command"], *container["args"]],
        stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "0"},
    )

    assert pod.stdout.readline() == b"ready\n"

    if is_evicted:
        pod.send_signal(signal.SIGTERM)

    assert pod.wait(timeout=20) == code
    assert (tmp_path / "saved").exists() == is_evicted


def test_the_slurm_sample_trains_only_on_the_given_data(tmp_path):
    write_executable(tmp_path / "scontrol", "#!/bin/sh\necho first\n")
    write_executable(tmp_path / "srun", '#!/bin/sh\nshift 2\nexec "$@"\n')
    write_executable(tmp_path / "run_train.sh", '#!/bin/sh\necho "$MASTER_ADDR" "$@"\n')
    names = "JOB_NODELIST JOB_ID NNODES CPUS_PER_TASK NODEID"
    variables = {f"SLURM_{name}": "1" for name in names.split()}
    variables |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ("bash", ROOT / "scripts/slurm/train.sbatch", "job.toml", "a b")

    run_program(*script, variables=variables, code=1)  # no tokenizer

    arguments = ("t.json", "--training.seed", 1)
    output = run_program(*script, *arguments, variables=variables).stdout

    options = "--dataset.source shards --dataset.path a b --tokenizer.path t.json --training.seed 1"

    assert output == f"first --job.config_file job.toml {options}\n"


def test_the_skypilot_sample_starts_the_launcher_of_a_node_and_mirrors_checkpoints(tmp_path):
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((ROOT / "scripts/skypilot/train.yaml").read_text())
    write_executable(
        tmp_path / "run_train.sh", '#!/bin/sh\necho $MASTER_ADDR,$NODE_RANK/$NNODES "$@"\n'
    )
    variables = {name: value or f"s3://{name}" for name, value in task["envs"].items()}
    variables |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}

    variables["SKYPILOT_NODE_IPS"] = "first\nsecond"
    process = run_program("bash", "-c", task["run"], variables=variables)

    launcher, *options = process.stdout.split()

    assert launcher == "first,1/2"
    assert load_job(options).checkpoint.mirror == "s3://MIRROR"


PYTHON_OF_VENV = """#!/bin/bash
# Replaces the Python of .venv. It records calls of pip, and fails while a file named broken exists.
[[ "$*" == "-m pip --version" ]] && exit 0
echo "$*" >>installs
seq -f "Collecting package-%g" 146
if [[ -f large ]]; then
    sleep 1.5 && echo "  Downloading torch-2.13.0-py3-none-any.whl (822.1 MB)" && sleep 2
fi
[[ -f broken ]] && echo "ERROR: No matching distribution" && echo "the last line of the error"
[[ ! -f broken ]]
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text("one")
    (folder / "constraints.txt").write_text("torch==2.13.0")
    write_executable(folder / ".venv/bin/python", PYTHON_OF_VENV)
    return folder


def set_up(clone: Path, extras: str = ".", **variables: str) -> str:
    """Run setup.sh, and return its errors."""
    code = int((clone / "broken").exists())
    script = clone / "scripts/setup.sh"
    return run_program(script, extras, variables=variables, code=code).stderr


def count_installs(clone: Path) -> int:
    return len((clone / "installs").read_text().splitlines())


def test_setup_installs_once_and_again_when_something_has_changed(clone):
    def check(file: str, content: str, extras: str = ".") -> None:
        """Set up twice after a change; only the first time installs."""
        (clone / file).write_text(content)
        before = count_installs(clone)
        for _ in range(2):
            set_up(clone, extras)
            assert count_installs(clone) == before + 1

    (clone / "installs").touch()
    check("pyproject.toml", "one")
    check("pyproject.toml", "two")
    check("pyproject.toml", "two", ".[dev]")
    check("pyproject.toml", "three", ".[dev]")
    before = count_installs(clone)
    # An installation with the development tools includes this one.
    set_up(clone)

    assert count_installs(clone) == before

    check("constraints.txt", "torch==2.14.1")

    # An interrupted installation is repeated, and a moved folder is installed again.
    (clone / "pyproject.toml").write_text("four")
    (clone / "broken").touch()
    set_up(clone)
    (clone / "broken").unlink()
    set_up(clone)
    moved = clone.rename(clone.with_name("moved"))
    set_up(moved)

    assert count_installs(moved) == before + 4


def test_setup_installs_the_versions_of_the_constraints_file(clone):
    set_up(clone)
    set_up(clone, TITANLITE_CONSTRAINTS="")

    pinned, free = (clone / "installs").read_text().splitlines()

    assert "pip install --progress-bar off" in pinned
    assert "--constraint constraints.txt" in pinned
    assert "--constraint" not in free


def test_setup_prints_large_downloads_and_errors_but_not_each_package(clone):
    (clone / "large").touch()
    lines = set_up(clone).splitlines()

    assert "Downloading torch-2.13.0-py3-none-any.whl (822.1 MB)" in lines
    assert len(lines) < 5

    (clone / "broken").touch()
    (clone / "pyproject.toml").write_text("changed")
    errors = set_up(clone)

    assert "ERROR: No matching distribution\nthe last line of the error\n" in errors
    assert "Collecting" not in errors


@pytest.fixture
def offline_clone(tmp_path) -> Path:
    """Return a clone beside a Python that has all packages, but no ensurepip."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("titanlite", "train_configs", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    broken = '[[ "$*" == "-m venv --clear .venv" ]] && exit 1'
    text = f'#!/bin/bash\n{broken}\nexec "{sys.executable}" "$@"\n'
    write_executable(tmp_path / "python", text)
    return tmp_path


@pytest.mark.parametrize(("outdated", "code"), [("typing_extensions", 0), ("tyro", 1)])
def test_setup_without_a_network_uses_the_packages_of_a_python_that_has_all(
    offline_clone, outdated, code
):
    """Version 0.1 of one package is too old for others, or for titanlite itself."""
    metadata = offline_clone / f"packages/{outdated}-0.1.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {outdated}\nVersion: 0.1\n")
    packages = str(offline_clone / "packages")
    python = str(offline_clone / "python")

    command = (offline_clone / "scripts/setup.sh", ".")
    variables = {"PYTHON": python, "PIP_NO_INDEX": "1", "PYTHONPATH": packages}
    process = run_program(*command, variables=variables, code=code)

    if code:
        assert "titanlite needs tyro" in process.stderr
        return
    assert f"Using the packages of {sys.prefix}" in process.stderr

    installed = offline_clone / ".venv/bin/python"
    run_program(installed, "-P", "-c", "import titanlite.launch, torchao")
    assert not list(offline_clone.glob(".venv/lib/*/site-packages/torch"))

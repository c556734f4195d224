"""`titanlite launch`: a wrong job is refused before anything happens, and the end of the ranks is its end: exit codes,
signals, the root cause of a crash first. Before it, scripts/setup.sh installs once, or lends packages where there is
no network."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import descendants

from titanlite import cli

REPOSITORY = Path(__file__).parents[2]
NUMBERS = ("NGPU", "NNODES", "NODE_RANK", "MASTER_PORT", "MAX_RESTARTS")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the signal of a dead parent is Linux's")
Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path) -> None:
    for name in (*NUMBERS, "MASTER_ADDR", "LOG_RANK", "CUDA_VISIBLE_DEVICES", "TITANLITE_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IEXEC)


def test_a_wrong_job_is_refused_at_once_without_torch_or_a_folder(tmp_path, cpu_seconds):
    (tmp_path / "wrong.toml").write_text('[training]\nsteps = "abc"\n[modle]\ndim = 3\n')

    def refused() -> None:
        command = [
            REPOSITORY / "run_train.sh",
            "--job.config_file",
            "wrong.toml",
            "--optimizer.lr",
            "x",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 2
        assert "3 mistakes:" in ended.stderr
        assert "Traceback" not in ended.stderr

    refused()  # the first one may install
    assert (
        cpu_seconds(refused) < 1.4
    )  # 0.4 s on an idle machine; the import of torch alone takes 1.3 s
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


def test_more_processes_than_visible_gpus_are_refused(monkeypatch, tmp_path, capsys):
    executable(
        tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100'\necho 'GPU 1: NVIDIA H100'\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for visible, gpus in (
        (None, 2),
        ("0", 1),
        ("1,0", 2),
        ("", 0),
        ("-1", 0),
        ("GPU-a,GPU-b,GPU-c", 2),
    ):
        monkeypatch.setenv("NGPU", str(gpus + 1))
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cli.main(["launch", "--training.steps", "0"]) == 2
        assert (f"this machine has {gpus}." in capsys.readouterr().err) == (gpus > 0)


@pytest.fixture
def command() -> Iterator[list[str]]:
    before = signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # tests under nohup would hand on that it is ignored
    yield [sys.executable, "-P", str(REPOSITORY / "tests/mishap_run.py"), "launch", "2"]
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "begin", "end"),
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
def test_the_end_of_the_ranks_is_said_once_root_cause_first(
    how: str, code: int, begin: str, end: str, command: list[str]
):
    started = time.monotonic()
    ended = subprocess.run(
        [*command, how], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == code
    assert ended.stderr.startswith(begin)
    assert ended.stderr.endswith(end)
    assert ended.stderr.count("Traceback") == (how in ("crash", "hang"))
    assert time.monotonic() - started < 25  # torch's agent waits 30 s for the others


def start(command: list[str], how: str) -> "subprocess.Popen[str]":
    """The launcher, with both ranks at work."""
    launcher = subprocess.Popen(
        [*command, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "numbers", "code", "said"),
    [
        ("save", [signal.SIGTERM], 75, "saved after 1 signal"),
        ("early", [signal.SIGUSR1], 128 + signal.SIGUSR1, "Stopped by SIGUSR1 without a save."),
        ("stuck", [signal.SIGTERM], 143, "ranks 0, 1."),
        ("stuck", [signal.SIGINT, signal.SIGINT], 130, "ranks 0, 1."),
    ],
)
def test_a_signal_reaches_each_rank_once_and_they_have_time_to_save(
    how: str,
    numbers: list[signal.Signals],
    code: int,
    said: str,
    command: list[str],
    monkeypatch,
):
    monkeypatch.setenv("STOP_SECONDS", "60" if how == "save" or len(numbers) > 1 else "2")
    launcher = start(command, how)
    for number in numbers:
        launcher.send_signal(number)
        time.sleep(0.3)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert err.count("Stopping after this step") == 1
    assert ("Ctrl-C" in err) == (numbers[0] == signal.SIGINT)
    assert f"{said}\n" in err


@pytest.mark.slow
@LINUX
def test_a_launcher_that_was_stopped_names_the_rank_that_failed_first(command: list[str], tmp_path):
    launcher = start(command, "lost")
    ranks = descendants(launcher.pid)[1:]
    launcher.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    while not all(is_zombie(pid) for pid in ranks):
        time.sleep(0.05)
    time.sleep(1)  # the launcher must not take the end of the pause for the end of rank 1
    launcher.send_signal(signal.SIGCONT)
    _, err = launcher.communicate(timeout=30)
    assert err.startswith("Rank 1 failed first: SIGKILL")


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and its parent does not know it yet."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.slow
@LINUX
def test_ranks_save_and_stop_when_their_launcher_is_killed(command: list[str], tmp_path):
    launcher = start(command, "orphan")
    launcher.kill()
    launcher.wait(timeout=10)
    deadline = time.monotonic() + 10
    while not all((tmp_path / f"saved{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_hangs_crashes_and_restarts_are_events_and_cannot_command_a_terminal(
    command: list[str], tmp_path, monkeypatch
):
    """The launcher trusts no rank to have escaped what it quotes, and says names of folders itself."""
    monkeypatch.setenv("MAX_RESTARTS", "1")
    ended = subprocess.run(
        [*command, "hostile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 9
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["hang", "failure", "restart", "hang", "failure"]
    log = (tmp_path / "run.log").read_text()
    for text in (ended.stderr, log, "\n".join(event["text"] for event in events)):
        assert "a tensor\\x1b[2J named" in text
        assert "To go on: outputs/\\x1b]0;mine\\x07" in text
        assert text.replace("\n", "").isprintable()
    assert all(
        re.match(r"\[\d{4}-|    ", line) for line in log.splitlines()
    )  # an event, or more of the last one


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
        f"from titanlite.runtime.process import start_python; start_python(['-c', {BUSY!r}]).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGTERM)  # a scheduler's, which is for the parent
    parent.kill()
    assert parent.stdout.read() == b""  # it ends when the child, which has it too, is gone
    parent.wait()


@pytest.mark.parametrize(("number", "ends", "code"), [(signal.SIGTERM, 75, 143), (None, 3, 3)])
def test_a_pod_that_is_evicted_saves_first(number: int | None, ends: int, code: int, tmp_path):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((REPOSITORY / "scripts/kubernetes/pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    save = "for i in {1..100}; do sleep 0.1; done" if number else ""
    ready = "sleep 1; echo ready"  # by when the shell that started it has set its own trap
    text = f"#!/bin/bash\ntrap 'sleep 0.5; touch saved; exit {ends}' TERM\n{ready}\n{save}\nexit {ends}\n"
    executable(tmp_path / "run_train.sh", text)
    environment = {**os.environ, "RANK": "0"}
    pod = subprocess.Popen(
        [*container["command"], *container["args"]], stdout=subprocess.PIPE, env=environment
    )
    assert pod.stdout is not None
    assert pod.stdout.readline() == b"ready\n"
    if number:
        pod.send_signal(number)
    assert pod.wait(timeout=20) == code
    assert (tmp_path / "saved").exists() == bool(number)


def test_the_sample_for_slurm_trains_on_the_data_that_it_is_given_and_on_no_other(tmp_path):
    executable(tmp_path / "scontrol", "#!/bin/sh\necho first\n")
    executable(tmp_path / "srun", '#!/bin/sh\nshift 2\nexec "$@"\n')
    executable(tmp_path / "run_train.sh", '#!/bin/sh\necho "$MASTER_ADDR" "$@"\n')
    slurm = {
        f"SLURM_{name}": "1"
        for name in ("JOB_NODELIST", "JOB_ID", "NNODES", "CPUS_PER_TASK", "NODEID")
    }
    slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", REPOSITORY / "scripts/slurm/train.sbatch", "job.toml", "a b"]
    assert (
        subprocess.run(script, env={**os.environ, **slurm}, capture_output=True).returncode > 0
    )  # no tokenizer
    said = subprocess.check_output(
        [*script, "t.json", "--training.seed", "1"], env={**os.environ, **slurm}, text=True
    )
    keys = "--dataset.source shards --dataset.path a b --tokenizer.path t.json --training.seed 1"
    assert said == f"first --job.config_file job.toml {keys}\n"


PYTHON_OF_VENV = """#!/bin/bash
# Stands for the Python of .venv: notes what pip is told; pip fails while a file named broken exists.
[[ "$*" == "-m pip --version" ]] && exit 0
echo "$*" >>installs
seq -f "Collecting package-%g" 146
[[ -f large ]] && sleep 1.5 && echo "  Downloading torch-2.13.0-py3-none-any.whl (822.1 MB)" && sleep 2
[[ -f broken ]] && echo "ERROR: No matching distribution" && echo "the last line of the error"
[[ ! -f broken ]]
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    (tmp_path / "clone/scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "clone/scripts")
    (tmp_path / "clone/pyproject.toml").write_text("one")
    (tmp_path / "clone/constraints.txt").write_text("torch==2.13.0")
    executable(tmp_path / "clone/.venv/bin/python", PYTHON_OF_VENV)
    return tmp_path / "clone"


def set_up(clone: Path, wanted: str = ".") -> tuple[int, int]:
    """Run setup.sh: its exit code, and how often pip was called so far."""
    code = subprocess.run(
        [clone / "scripts/setup.sh", wanted], capture_output=True, check=False
    ).returncode
    installs = clone / "installs"
    return code, len(installs.read_text().splitlines()) if installs.exists() else 0


def test_set_up_installs_once_and_again_when_something_has_changed(clone: Path):
    assert [set_up(clone), set_up(clone)] == [(0, 1), (0, 1)]
    (clone / "pyproject.toml").write_text("two")
    assert [set_up(clone), set_up(clone)] == [(0, 2), (0, 2)]
    assert [set_up(clone, ".[dev]"), set_up(clone, ".[dev]")] == [(0, 3), (0, 3)]
    (clone / "pyproject.toml").write_text("three")
    assert [set_up(clone, ".[dev]"), set_up(clone)] == [
        (0, 4),
        (0, 4),
    ]  # the tools for development cover the rest
    (clone / "broken").write_text("")
    (clone / "pyproject.toml").write_text("four")
    assert set_up(clone) == (1, 5)
    (clone / "broken").unlink()
    assert set_up(clone) == (0, 6)  # an interrupted installation is done again
    (clone / "constraints.txt").write_text("torch==2.14.1")
    assert set_up(clone) == (0, 7)
    assert set_up(clone.rename(clone.with_name("moved"))) == (0, 8)


def test_set_up_installs_the_versions_of_the_constraints_file(clone: Path, monkeypatch):
    set_up(clone)
    monkeypatch.setenv("TITANLITE_CONSTRAINTS", "")
    set_up(clone)

    pinned, free = (clone / "installs").read_text().splitlines()
    assert "pip install --progress-bar off" in pinned
    assert "--constraint constraints.txt" in pinned
    assert "--constraint" not in free


def test_set_up_prints_large_downloads_and_errors_but_not_each_package(clone: Path):
    command = [clone / "scripts/setup.sh", "."]
    (clone / "large").write_text("")
    installed = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stderr.splitlines()
    assert "Downloading torch-2.13.0-py3-none-any.whl (822.1 MB)" in installed
    assert len(installed) < 5

    (clone / "broken").write_text("")
    (clone / "pyproject.toml").write_text("changed")
    failed = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "ERROR: No matching distribution\nthe last line of the error\n" in failed
    assert "Collecting" not in failed


@pytest.mark.parametrize(("old", "code"), [("typing_extensions", 0), ("tyro", 1)])
def test_a_python_that_has_all_packages_lends_them_without_a_network(tmp_path, old: str, code: int):
    """It lacks ensurepip, and version 0.1 of one package is too old for others, or for titanlite itself."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("titanlite", "train_configs", "assets"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    metadata = tmp_path / f"packages/{old}-0.1.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {old}\nVersion: 0.1\n")
    broken = '[[ "$*" == "-m venv --clear .venv" ]] && exit 1'
    executable(tmp_path / "python", f'#!/bin/bash\n{broken}\nexec "{sys.executable}" "$@"\n')
    variables = {
        "PYTHON": str(tmp_path / "python"),
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(tmp_path / "packages"),
    }
    command = [tmp_path / "scripts/setup.sh", "."]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert (
        f"Using the packages of {sys.prefix}" if code == 0 else "titanlite needs tyro"
    ) in ended.stderr
    if code == 0:
        subprocess.run(
            [tmp_path / ".venv/bin/python", "-P", "-c", "import titanlite.launch, torchao"],
            check=True,
        )
        assert not list(tmp_path.glob(".venv/lib/*/site-packages/torch"))

"""The end of the workers is the end of the launcher: exit codes, signals, and the root cause of a crash first."""

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import descendants

from titanlite.launch.agent import Saved, World, run_workers

LAUNCHER = """
import os, sys
from titanlite.launch.agent import World, run_workers
sys.exit(run_workers(sys.argv[2:], World(int(sys.argv[1]), stop_seconds=float(os.environ.get("STOP_SECONDS", "60")))))
"""

WORKER = """
import os, pathlib, resource, shutil, signal, sys, time
from titanlite.runtime import process
process.begin()
from titanlite.cli import run_quietly
from titanlite.config.errors import ERROR_FOLDER, GuardError, StoppedBySignal

rank = int(os.environ["RANK"])

def ready():
    both = pathlib.Path(os.environ[ERROR_FOLDER], "ready.json")
    if rank == 1:
        both.touch()
    else:
        while not both.exists():
            time.sleep(0.01)
        print("ready", flush=True)

def guard():
    raise GuardError("loss is nan at step 5")

def folder_gone():
    shutil.rmtree(os.environ[ERROR_FOLDER], ignore_errors=True)
    raise GuardError("loss is nan at step 5")

def disk_full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise GuardError("loss is nan at step 5")

def guard_on_one():
    if rank == 1:
        raise GuardError("loss is nan on one rank")
    time.sleep(0.5)
    raise RuntimeError("connection reset by peer")

def crash():
    if rank == 1:
        raise ValueError("the root cause")
    while not pathlib.Path(os.environ[ERROR_FOLDER], "1.json").exists():  # rank 1 may start later
        time.sleep(0.01)
    time.sleep(0.2)
    raise RuntimeError("connection reset by peer")

def hang():
    if rank == 1:
        raise ValueError("the root cause")
    time.sleep(300)

def out_of_memory():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("connection reset by peer")

def save():
    got = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: got.append(number))
    ready()
    while not got:
        time.sleep(0.02)
    time.sleep(0.3 + rank)  # ranks do not finish at the same time
    raise StoppedBySignal(f"saved after {len(got)} signal")

def stuck():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    ready()
    time.sleep(300)

def early():
    ready()
    time.sleep(300)

def orphan():
    signal.signal(signal.SIGTERM, lambda number, frame: (open(f"saved{rank}", "w").close(), sys.exit()))
    ready()
    time.sleep(300)

def shown():
    print(f"out {rank} {sys.stdout.isatty()} {os.environ['WORLD_SIZE']}", flush=True)
    print(f"err {rank}", file=sys.stderr, flush=True)

sys.exit(run_quietly(globals()[sys.argv[1]]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    # A launcher inherits that SIGHUP is ignored, from nohup, say; a handler it does not.
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    yield [sys.executable, str(tmp_path / "launcher.py"), "2", str(tmp_path / "worker.py")]
    signal.signal(signal.SIGHUP, before)


def run(command: list[str], how: str) -> tuple[int, str]:
    """Exit code and standard error of the launcher."""
    ended = subprocess.run([*command, how], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_a_known_end_of_all_ranks_is_said_once(command: list[str]):
    assert run(command, "guard") == (3, "loss is nan at step 5\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["folder_gone", "disk_full"])
def test_a_known_end_stays_known_where_workers_cannot_report_it(how: str, command: list[str]):
    assert run(command, how) == (3, 2 * "loss is nan at step 5\n")


@pytest.mark.slow
def test_the_known_end_of_one_rank_explains_the_failures_of_the_others(command: list[str]):
    said = "loss is nan on one rank\nThen rank 0 failed: RuntimeError: connection reset by peer\n"
    assert run(command, "guard_on_one") == (3, said)


@pytest.mark.slow
def test_a_crash_is_one_traceback_with_the_rank_and_the_root_cause_first(command: list[str]):
    code, said = run(command, "crash")
    assert code == 1
    assert said.startswith("Rank 1 failed first: it ended with exit code 1.\nTraceback")
    assert said.endswith("ValueError: the root cause\nThen rank 0 failed: RuntimeError: connection reset by peer\n")
    assert said.count("Traceback") == 1


@pytest.mark.slow
def test_ranks_that_wait_for_a_crashed_one_are_not_waited_for(command: list[str]):
    start = time.monotonic()
    code, said = run(command, "hang")
    assert time.monotonic() - start < 20  # torchrun alone needs 30 s
    assert code == 1
    assert said.endswith("ValueError: the root cause\nThen rank 0 did not end by itself and was killed.\n")


@pytest.mark.slow
def test_a_killed_rank_comes_before_the_failures_that_follow_from_it(command: list[str]):
    code, said = run(command, "out_of_memory")
    assert code == 128 + signal.SIGKILL
    assert said.startswith("Rank 1 failed first: it was killed (SIGKILL).")
    assert said.endswith("Then rank 0 failed: RuntimeError: connection reset by peer\n")


def start(command: list[str], how: str) -> "subprocess.Popen[str]":
    """The launcher, with both ranks at work."""
    launcher = subprocess.Popen([*command, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_each_worker_once_and_they_finish(number: signal.Signals, command: list[str]):
    launcher = start(command, "save")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert said.splitlines()[1:] == [
        "Stopping after this step and a save. Ctrl-C again stops at once, without saving.",
        "saved after 1 signal",
    ]


@pytest.mark.slow
def test_workers_that_take_too_long_to_stop_are_killed(command: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STOP_SECONDS", "1")
    launcher = start(command, "stuck")
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert said.endswith("Stopped by SIGTERM without a save: ranks 0, 1 had to be killed.\n")


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(command: list[str]):
    launcher = start(command, "stuck")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert launcher.poll() is None
    start_of_stop = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=30)
    assert time.monotonic() - start_of_stop < 5
    assert launcher.returncode == 130
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_without_anything_to_save_stop_without_a_traceback(number: signal.Signals, command: list[str]):
    launcher = start(command, "early")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert said.endswith(f"\nStopped by {number.name} before there was anything to save.\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a dead parent is Linux's")
def test_workers_save_and_stop_when_their_launcher_is_killed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed launcher leaves its folder behind
    launcher = start(command, "orphan")
    launcher.kill()
    launcher.wait(timeout=10)
    saved = [tmp_path / "saved0", tmp_path / "saved1"]
    deadline = time.monotonic() + 10
    while not all(file.exists() for file in saved):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_the_shown_rank_keeps_the_terminal_and_whole_lines_of_errors_of_all_ranks_are_seen(
    command: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # of a container, say
    main, terminal = pty.openpty()
    launcher = subprocess.Popen([*command, "shown"], stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert launcher.wait(timeout=60) == 0
    lines = sorted(os.read(main, 10000).decode().split("\r\n"))
    os.close(main)
    assert lines == ["", "err 0", "err 1", "out 0 True 2"]


@pytest.mark.slow
def test_no_signal_is_forgotten_between_the_meeting_and_the_start_of_the_workers(tmp_path: Path):
    """There is no worker yet to which it could be passed on."""
    program = """
        import os, signal, sys
        from titanlite.launch import agent
        loopback = agent.loopback_interface
        agent.loopback_interface = lambda: os.kill(os.getpid(), signal.SIGTERM) or loopback()
        sys.exit(agent.run_workers(["-c", "open('started', 'w')"], agent.World(1)))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (143, "Stopped by SIGTERM before the workers were started.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_launcher_leaves_is_removed_once_its_workers_have_ended(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mine = tmp_path / "titanlite-run-of-mine"  # named alike, but it holds what no run has made
    mine.mkdir()
    (mine / "results.csv").write_text("")
    launcher = start(command, "stuck")
    (left,) = set(tmp_path.glob("titanlite-run-*")) - {mine}
    assert left.stat().st_mode & 0o777 == 0o700
    _, *workers = descendants(launcher.pid)
    launcher.kill()
    launcher.wait(timeout=20)
    assert run(command, "shown")[0] == 0
    assert left.exists()  # a worker is still there
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left.exists():  # it takes a moment until they are gone
        assert run(command, "shown")[0] == 0
        assert time.monotonic() < deadline
    assert [path.name for path in tmp_path.glob("titanlite-run-*")] == [mine.name]


HOSTILE = r"""
import json, os, pathlib, sys
from titanlite.config.errors import ERROR_FOLDER
folder = pathlib.Path(os.environ[ERROR_FOLDER])
if os.environ["RANK"] == "0":
    sys.exit()
record = {"message": "a tensor\x1b[2J named\r\u202e", "closing": "go on\x07 so", "time": 0.0}
folder.joinpath("1.json").write_text(json.dumps(record))
folder.joinpath("train.log").write_text("run.log")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [3, 1])
def test_what_files_say_cannot_command_a_terminal_or_forge_a_line_of_the_log(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The launcher trusts no worker to have escaped what it quotes, and says names of folders itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text(HOSTILE)
    saved = Saved(how_to_go_on=lambda: "never asked")
    assert run_workers(["worker.py", str(code)], World(2), saved) == code
    said, log = capsys.readouterr().err, (tmp_path / "run.log").read_text()
    for text in (said, log):
        assert "a tensor\\x1b[2J named\\x0d\\u202e\n" in text
        assert "go on\\x07 so" in text
        assert text.replace("\n", "").isprintable()
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["event"] == "failure"
    assert "a tensor\\x1b[2J named\\x0d\\u202e\n" in event["text"]
    first, *others = log.splitlines()
    assert first.startswith("[")  # the time
    assert all(line.startswith("    ") for line in others)


def test_the_launchers_own_words_on_how_to_go_on_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    worker = "import os, pathlib; pathlib.Path(os.environ['TITANLITE_ERROR_FOLDER'], 'train.log').write_text('run.log')"
    saved = Saved(how_to_go_on=lambda: "To go on: outputs/\x1b]0;mine\x07")
    assert run_workers(["-c", f"{worker}; os._exit(9)"], World(1), saved) == 9
    assert "To go on: outputs/\\x1b]0;mine\\x07\n" in capsys.readouterr().err


HANGS = """
import json, os, pathlib
folder = pathlib.Path(os.environ["TITANLITE_ERROR_FOLDER"])
folder.joinpath("train.log").write_text("run.log")
hang = {"rank": 0, "host": "here", "hosts": ["here"], "step": 7, "line": "x", "inside": "y", "collectives": {}}
folder.joinpath("0.hang.json").write_text(json.dumps(hang))
os._exit(9)
"""


def test_a_hang_a_crash_and_a_restart_are_events_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    saved = Saved(how_to_go_on=lambda: "To go on: ...")
    assert run_workers(["-c", HANGS], World(1, max_restarts=1), saved) == 9
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["hang", "failure", "restart", "hang", "failure"]
    assert "step 7" in events[0]["text"]
    assert events[1]["text"] == "Rank 0 failed first: it ended with exit code 9."

"""The command `titanlite`: quick help, one row for each subcommand, exit codes instead of tracebacks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titanlite import __version__, cli
from titanlite.config.errors import (
    ERROR_FOLDER,
    CheckpointError,
    GuardError,
    StoppedBySignal,
    UserError,
)
from titanlite.config.mistakes import find_table_model
from titanlite.config.schema import SECTIONS, list_keys

Output = pytest.CaptureFixture[str]
TITANLITE = [sys.executable, "-P", "-m", "titanlite"]


def shown(capsys: Output, *words: str) -> str:
    """What a command prints; a line break in a box does not count."""
    assert cli.main(words) == 0
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", capsys.readouterr().out).split())


def test_help_names_each_command_at_once_and_imports_none(cpu_seconds):
    ended = subprocess.run([*TITANLITE, "--help"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(name in ended.stdout for name in cli.COMMANDS)
    # 0.04 to 0.08 s on an idle machine, depending on its CPU. A busy one takes a little more.
    assert (
        cpu_seconds(lambda: subprocess.run([*TITANLITE, "--help"], stdout=subprocess.DEVNULL)) < 0.2
    )

    program = "import sys; from titanlite import cli; cli.main(['--help']); assert 'pydantic' not in sys.modules; "
    program += "assert not any(cli.main([name, '--help']) for name in cli.COMMANDS); assert 'torch' not in sys.modules"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout

    assert said.count("usage: titanlite") >= len(cli.COMMANDS)


def test_the_help_of_train_explains_every_key_and_shows_the_values_of_the_job_file(
    tmp_path, capsys
):
    (tmp_path / "job.toml").write_text("[training]\nsteps = 12345\n")
    text = shown(capsys, "train", "--job.config_file", str(tmp_path / "job.toml"), "--help", "all")
    listed = shown(capsys, "train", "--help")
    for key, field in list_keys().items():
        assert re.search(rf"(--|\[\[){re.escape(key)}[] ,.]", text)
        assert re.search(rf"\b{key.partition('.')[2]}\b", listed)
        assert (
            find_table_model(field.annotation)
            or " ".join((field.description or "").split()) in text
        )

    assert all(" ".join((section.__doc__ or "").split()) in text for section in SECTIONS.values())
    assert "--training.steps <integer> Number of optimizer steps. (default: 12345)" in text


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        (["train", "--help", "training"], "--training.seq_len <integer>", "--checkpoint.interval"),
        (["help", "training.steps"], "--training.steps <integer>", "--training.seq_len"),
        (["help", "max-epochs"], "--dataset.max_epochs <integer>", "--training.steps"),
        (["help", "training.steps", "job"], "--job.dump_folder <string>", "--training.seq_len"),
        (
            ["help", "dataset.stages"],
            "dataset.stages.start_step <integer> Number of steps before",
            "--dataset.path",
        ),
        (["help", "check"], "--world-size INT Number of ranks", "--training.steps"),
        (
            ["data", "show", "-h"],
            "--step INT",
            "--out",
        ),
        (["--version"], f"titanlite {__version__}, torch 2.", "usage"),
    ],
)
def test_what_is_asked_for_is_explained(words: list[str], there: str, not_there: str, capsys):
    text = shown(capsys, *words)
    assert there in text
    assert not_there not in text


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("why"), 2, "why\n"),
        (GuardError("why"), 3, "why\n"),
        (CheckpointError("why"), 4, "why\n"),
        (StoppedBySignal("why"), 75, "why\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("why"), 1, "ZeroDivisionError: why\n"),
    ],
)
def test_an_error_is_its_message_and_its_exit_code(
    error, code: int, said: str, tmp_path, monkeypatch, capfd
):
    def command() -> None:
        raise error

    assert cli.run_quietly(command) == code

    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith(said)
    assert ("Traceback" in err) == (code == 1)

    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))  # a launcher's
    monkeypatch.setenv("RANK", "5")
    error.add_note("how to go on")

    assert cli.run_quietly(command) == code
    assert capfd.readouterr() == ("", "")

    if code != 130:
        assert json.loads((tmp_path / "5.json").read_text())["message"].endswith(
            f"{said}how to go on"
        )


def test_an_output_that_nobody_can_write_to_is_answered_without_a_traceback():
    for target, code in ("> /dev/full", 2), (">&-", 0), ("| :; exit ${PIPESTATUS[0]}", 141):
        words = ["bash", "-c", f'"$@" {target}', "bash", *TITANLITE, "check"]
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_ctrl_c_during_the_import_of_a_command_is_silent(tmp_path):
    """Extension modules turn a KeyboardInterrupt in their import into other exceptions."""
    (tmp_path / "pydantic.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('cannot import an extension') from None\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [*TITANLITE, "plan"]

    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "plan"])
def test_ctrl_c_is_silent_from_our_first_line_on(command: str, tmp_path):
    """Before it, Python's own start can be interrupted, which ends with 1."""
    for wait in (0.03, 0.06, 0.1, 0.2, 0.8, 2.4):
        words = [*TITANLITE, command, "--job.dump_folder", str(tmp_path)]
        options: Any = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "process_group": 0,
        }
        options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(words, **options)
        time.sleep(wait)
        # As a terminal does, to all processes.
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert "Traceback" not in err or str(Path(cli.__file__).parent) not in err, err
        assert process.returncode in (-signal.SIGINT, 0, 1, 2, 75, 130), (
            err
        )  # it may have been faster

"""The command `titanlite` prints help quickly and maps errors to exit codes without tracebacks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import run_program

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

TITANLITE = [sys.executable, "-P", "-m", "titanlite"]


def without_boxes(help_text: str) -> str:
    """Remove boxes and line breaks."""
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", help_text).split())


IMPORT_CHECK = """
import sys
from titanlite import cli

cli.main(["--help"])
assert "pydantic" not in sys.modules
assert not any(cli.main([name, "--help"]) for name in cli.COMMANDS)
assert "torch" not in sys.modules
"""


def test_help_lists_all_commands_quickly_and_does_not_import_torch(cpu_seconds):
    command = [*TITANLITE, "--help"]

    help_run = run_program(*command)

    assert help_run.stderr == ""
    assert all(name in help_run.stdout for name in cli.COMMANDS)

    # It takes 0.04 to 0.08 s on an idle machine, and a little more on a busy one.
    seconds = cpu_seconds(lambda: subprocess.run(command, stdout=subprocess.DEVNULL))
    assert seconds < 0.2

    output = run_program(sys.executable, "-c", IMPORT_CHECK).stdout
    assert output.count("usage: titanlite") >= len(cli.COMMANDS)
    # No option has two defaults.
    assert not re.search(r"Default: [^(]*\(default", output)


def test_the_help_of_train_explains_every_key_and_shows_the_values_of_the_job_file(
    tmp_path, run_command
):
    (tmp_path / "job.toml").write_text("[training]\nsteps = 12345\n")
    text = without_boxes(run_command(f"train --job.config_file {tmp_path}/job.toml --help all"))
    overview = run_command("train --help")

    for key, field in list_keys().items():
        description = " ".join((field.description or "").split())
        assert re.search(rf"(--|\[\[){re.escape(key)}[] ,.]", text)
        assert re.search(rf"\b{key.partition('.')[2]}\b", overview)
        assert find_table_model(field.annotation) or description in text
    for section in SECTIONS.values():
        assert " ".join((section.__doc__ or "").split()) in text
    assert "--training.steps <integer> Number of optimizer steps. (default: 12345)" in text


@pytest.mark.parametrize(
    ("command", "present", "absent"),
    [
        ("help launch training", "--training.seq_len <integer>", "--checkpoint.interval"),
        ("help training.steps", "--training.steps <integer>", "--training.seq_len"),
        ("help max-epochs", "--dataset.max_epochs <integer>", "--training.steps"),
        ("help training.steps job", "--job.dump_folder <string>", "--training.seq_len"),
        ("help dataset.stages", "stages.start_step <integer> Number of steps", "--dataset.path"),
        ("help check", "--world-size INT Number of ranks", "--training.steps"),
        ("data show -h", "--step INT", "--out"),
        ("--version", f"titanlite {__version__}, torch 2.", "usage"),
    ],
)
def test_help_explains_only_the_requested_options(command, present, absent, run_command):
    text = without_boxes(run_command(command))
    assert present in text
    assert absent not in text


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (UserError("why"), 2, "why\n"),
        (GuardError("why"), 3, "why\n"),
        (CheckpointError("why"), 4, "why\n"),
        (StoppedBySignal("why"), 75, "why\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("why"), 1, "ZeroDivisionError: why\n"),
    ],
)
def test_an_error_is_reported_as_its_message_and_exit_code(
    error, code, output, tmp_path, monkeypatch, capfd
):
    def command() -> None:
        raise error

    assert cli.run_quietly(command) == code

    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith(output)
    assert ("Traceback" in err) == (code == 1)

    # The launcher sets these variables. Its ranks then write errors to files.
    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    error.add_note("how to resume")

    assert cli.run_quietly(command) == code
    assert capfd.readouterr() == ("", "")

    if code != 130:
        report = json.loads((tmp_path / "5.json").read_text())
        assert report["message"].endswith(f"{output}how to resume")


@pytest.mark.parametrize(
    ("redirection", "code"),
    [("> /dev/full", 2), (">&-", 0), ("| :; exit ${PIPESTATUS[0]}", 141)],
    ids=["full", "closed", "broken pipe"],
)
def test_unwritable_standard_output_causes_no_traceback(redirection, code):
    command = ["bash", "-c", f'"$@" {redirection}', "bash", *TITANLITE, "check"]

    assert "Traceback" not in run_program(*command, code=code).stderr


def test_ctrl_c_during_the_import_of_a_command_is_silent(tmp_path):
    """Extension modules turn a KeyboardInterrupt in their import into other exceptions."""
    (tmp_path / "pydantic.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('cannot import an extension') from None\n"
    )
    done = run_program(*TITANLITE, "plan", code=130, variables={"PYTHONPATH": str(tmp_path)})

    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("wait", [0.03, 0.06, 0.1, 0.2, 0.8, 2.4])
def test_ctrl_c_at_any_time_prints_no_traceback_of_titanlite(command, wait, tmp_path):
    """Earlier, Ctrl-C interrupts the start of Python itself, which exits with 1."""
    # Few steps, because Python sometimes ignores Ctrl-C while it starts. The run then continues.
    options = f"--job.dump_folder {tmp_path} --training.steps 5".split()
    process = subprocess.Popen(
        [*TITANLITE, command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    time.sleep(wait)
    # A terminal sends the signal to all processes of the group.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)

    # `python -m` imports the package before `__main__` can handle signals.
    package = Path(cli.__file__).parent
    later_errors = errors.replace(str(package / "__init__.py"), "")
    assert "Traceback" not in errors or str(package) not in later_errors, errors
    # The command may end before the signal arrives.
    assert process.returncode in (-signal.SIGINT, 0, 1, 2, 75, 130), errors

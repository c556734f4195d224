"""The command `titanlite`: quick help, one row for each subcommand, exit codes instead of tracebacks."""

import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.config.errors import ERROR_FOLDER, CheckpointError, GuardError, StoppedBySignal, UserError
from titanlite.config.keys import KEYS, SECTIONS, on_command_line

TITANLITE = [sys.executable, "-m", "titanlite"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TITANLITE, *argv], capture_output=True, text=True, timeout=60, check=False)


def test_help_names_each_command_and_takes_less_than_half_a_second(cpu_seconds: Callable[..., float]):
    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(name in shown.stdout for name in cli.COMMANDS)
    assert cpu_seconds(lambda: run("--help")) < 0.5  # 0.06 s on an idle machine


@pytest.mark.parametrize("target", [target for _, target in cli.COMMANDS.values()])
def test_each_command_has_its_module(target: str):
    assert importlib.util.find_spec(target.split(":")[0]) is not None


def test_the_help_of_train_explains_every_key():
    shown = run("train", "--help")
    assert shown.returncode == 0
    text = " ".join(shown.stdout.replace("│", " ").split())
    for key, field in KEYS.items():
        if on_command_line(field.annotation):
            assert re.search(rf"--{re.escape(key.replace('_', '-'))}[ ,]", text)
            assert " ".join(field.description.split()) in text
    assert all(" ".join((section.__doc__ or "").split()) in text for section in SECTIONS.values())


def test_the_help_of_train_shows_the_values_of_the_job_file(tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text("[training]\nsteps = 12345\n")
    assert "(default: 12345)" in run("train", "--job.config_file", str(file), "--help").stdout


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints; a line break in a box does not count."""
    assert cli.main(words) == 0
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", capsys.readouterr().out).split())


def test_the_help_of_train_shows_the_defaults_of_the_schema(capsys: pytest.CaptureFixture[str]):
    assert "--training.steps INT Number of optimizer steps. (default: 10000)" in shown(capsys, "train", "--help")


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        (["train", "--help", "training"], "--training.seq-len INT", "--checkpoint.interval"),
        (["help", "training.steps"], "--training.steps INT", "--training.seq-len"),
        (["help", "max-epochs"], "--dataset.max-epochs INT", "--training.steps"),
        (["help", "training.steps", "job"], "--job.dump-folder STR", "--training.seq-len"),
        (["help", "dataset.stages"], "[[dataset.stages]] Changes of the weights", "--dataset.path"),
        (["--help", "check"], "usage: titanlite check", "--training.steps"),
        (["help", "check"], "--world-size {None}|INT Number of ranks", "--training.steps"),
        (["prepare", "--help"], "--workers {None}|INT Number of processes that tokenize", "--training.steps"),
        (["data", "show", "-h"], "--step INT Number of the global batch; the first one is 1. (default: 1)", "--out"),
        (["data", "--help"], "usage: titanlite data show", "--out"),
    ],
)
def test_help_explains_what_is_asked_for(
    words: list[str], there: str, not_there: str, capsys: pytest.CaptureFixture[str]
):
    text = shown(capsys, *words)
    assert there in text
    assert not_there not in text


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("chekpoint", "Did you mean `titanlite help checkpoint`?"),
        ("training.stps", "Did you mean `titanlite help training.steps`?"),
        ("xyz", "Sections are job, model, tokenizer"),
    ],
)
def test_help_on_what_is_not_there(topic: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["help", topic]) == 2
    assert said in capsys.readouterr().err


def test_the_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Those of the code that runs, however old the installation of a checkout is."""
    monkeypatch.setattr("titanlite.__version__", "9.8.7")
    assert re.fullmatch(r"titanlite 9\.8\.7, torch 2\.\S+, Python 3\.\S+", shown(capsys, "--version"))


def test_a_character_that_the_terminal_lacks_is_shown_by_its_number():
    command = [sys.executable, "-c", "from titanlite.cli import run_quietly; run_quietly(lambda: print('\u00e9'))"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, capture_output=True, env=ascii_only, check=True).stdout == b"\\xe9\n"


def test_an_option_is_not_the_value_of_another(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["prepare", "--out", "--workers", "1"]) == 2
    assert "Missing value for argument '--out'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian", "Did you mean `titanlite train`?"),
        ("Export", "Did you mean `titanlite export`?"),
        ("llama_8b.toml", "Did you mean `titanlite train --job.config_file llama_8b.toml`?"),
        ("--job.config_file", "The command comes first, as in `titanlite train --job.config_file`."),
        ("xyz", "\n\nusage: titanlite COMMAND"),
    ],
)
def test_an_unknown_command_is_named_with_a_guess(name: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"titanlite {name}: unknown command.")
    assert said in error


def test_an_option_of_a_command_that_is_nearly_one_is_guessed(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check", "--world-siz", "3"]) == 2
    assert "did you mean --world-size?" in capsys.readouterr().err


def test_no_command_prints_the_usage_and_is_a_mistake(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 2
    assert "usage: titanlite COMMAND" in capsys.readouterr().out


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("why"), 2), (GuardError("why"), 3), (CheckpointError("why"), 4), (StoppedBySignal("why"), 75)],
)
def test_a_known_error_is_its_message_and_its_exit_code(
    error: UserError, code: int, capsys: pytest.CaptureFixture[str]
):
    assert cli.run_quietly(raising(error)) == code
    assert capsys.readouterr() == ("", "why\n")


def test_an_interrupt_is_silent(capsys: pytest.CaptureFixture[str]):
    assert cli.run_quietly(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_a_mistake_of_ours_keeps_its_traceback(capsys: pytest.CaptureFixture[str]):
    assert cli.run_quietly(raising(ZeroDivisionError("why"))) == 1
    assert "Traceback" in (error := capsys.readouterr().err)
    assert error.endswith("ZeroDivisionError: why\n")


def test_a_worker_reports_to_its_launcher_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    error = GuardError("why")
    error.add_note("how to go on")
    assert cli.run_quietly(raising(error)) == 3
    record = json.loads((tmp_path / "5.json").read_text())
    assert (record["message"], record["closing"]) == ("why", "how to go on")
    assert abs(record["time"] - time.time()) < 60
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["help"], ["--version"], ["help", "training.steps"], ["train", "--help"]])
def test_a_reader_that_stops_reading_is_no_error(words: list[str]):
    """As `titanlite help | head -1`, whose reader may end first."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run([*TITANLITE, *words], stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


# ------------------------------------------------------------------------------------------------------- check


def test_check_says_ok(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check", "--job.config_file", "llama_8b", "--world-size", "8"]) == 0
    assert "llama_8b.toml can start on 8 ranks.\n" in capsys.readouterr().out


def test_check_takes_its_option_in_either_form(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check", "--world-size=2"]) == 0
    assert capsys.readouterr().out.endswith("can start on 2 ranks.\n")


def test_check_reports_what_is_wrong_for_this_number_of_ranks(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check", "--training.global_batch_size", "8", "--world_size", "3"]) == 2
    assert "training.global_batch_size = 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("0", "must be a whole number greater than 0"),
        ("-1", "must be a whole number greater than 0"),
        ("x", "Error parsing"),
        ("", "Error parsing"),
    ],
)
def test_check_takes_a_number_of_ranks(size: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check", "--world-size", size]) == 2
    assert "--world-size" in (error := capsys.readouterr().err)
    assert said in error


def test_check_counts_the_rows_that_no_token_uses(capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, "check", "--model.flavor", "1b")
    assert text.endswith("124,160 of 128,256 rows of the embedding (model.vocab_size) stand for no token.")


def test_train_checks_the_job_for_the_world_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", "--training.global_batch_size", "8"]) == 2
    assert "data-parallel degree = 3" in " ".join(capsys.readouterr().err.split())


def test_a_world_size_that_is_no_number_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert cli.main(["train"]) == cli.main(["check"]) == 2
    assert capsys.readouterr().err.count('WORLD_SIZE "abc": a whole number') == 2


@pytest.mark.slow
def test_a_full_disk_under_the_output_of_a_command_is_said_without_a_traceback(tmp_path: Path):
    (tmp_path / "metrics.jsonl").touch()
    with open("/dev/full", "w") as full:
        command = [*TITANLITE, "runs", str(tmp_path)]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (2, "Standard output cannot be written: No space left on device.\n")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["help", "training"]], ids=["a line", "more than a buffer"])
def test_a_terminal_that_is_gone_under_the_output_of_a_command_is_said_without_a_traceback(words: list[str]):
    ours, theirs = pty.openpty()
    os.close(ours)
    ended = subprocess.run(
        [*TITANLITE, *words], stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (2, "Standard output cannot be written: Input/output error.\n")

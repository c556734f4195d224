"""The command `titanlite`: one row for each subcommand, imported when it is called.

Invariant: a user's mistake is a message on standard error and an exit code, never a traceback. May import
titanlite.config.errors; everything else inside the function that needs it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from titanlite.config.errors import ERROR_FOLDER, UserError, printable

# Name, one line of help, and the function that gets the rest of the command line as `list[str]`.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("Train the model that a job file describes (through torchrun: ./run_train.sh).", "titanlite.cli:train"),
    "launch": (
        "The same on each GPU, or NGPU processes: what ./run_train.sh starts.",
        "titanlite.launch.launcher:command",
    ),
    "check": ("Check a job file, for --world-size N ranks, without starting anything.", "titanlite.cli:check"),
    "prepare": (
        "Tokenize the data of a job file once, into shards that training maps into memory.",
        "titanlite.cli:prepare",
    ),
    "data": ("`data show --step N`: print the text that a step of a job reads.", "titanlite.cli:data"),
    "verify": ("Read checkpoints and say which ones are good.", "titanlite.checkpoint.verify:main"),
    "export": ("Write a checkpoint as a Hugging Face model.", "titanlite.commands.export:main"),
    "import": ("Make a checkpoint from Hugging Face's or Meta's weights.", "titanlite.commands.import_:main"),
    "generate": ("Let a checkpoint complete a text.", "titanlite.generate:main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0, that of a UserError, or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name = words[0]
    if name not in COMMANDS:
        print(f"titanlite {name}: unknown command.\n\n{usage()}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][1].split(":")
    if module == "titanlite.cli" and name != "train" and {"-h", "--help"} & set(words):  # the others explain themselves
        text = (globals()[function].__doc__ or "").split("\n\n")[0]
        print(f"{text}\n\n{COMMANDS[name][0]} `titanlite train --help` explains the keys of a job.")
        return 0
    return run_quietly(lambda: getattr(importlib.import_module(module), function)(words[1:]))


def usage() -> str:
    """The text of `titanlite --help`."""
    rows = "\n".join(f"  {name:<10}{text}" for name, (text, _) in COMMANDS.items())
    return f"usage: titanlite COMMAND ...\n\n{rows}\n\n`titanlite COMMAND --help` explains the options of one."


def run_quietly(command: Callable[[], object]) -> int:
    """Call `command` and turn the ways in which it can end into an exit code; a crash of ours keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        # By the line, into files as well: unbuffered, `print` writes text and newline apart, and those of ranks mix.
        # A terminal that cannot show a character gets its number.
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")
    try:
        command()
        sys.stdout.flush()
        return 0
    except UserError as error:
        _report(str(error), error)
        return error.exit_code
    except KeyboardInterrupt:
        from titanlite.observe.logger import note_end

        note_end("Interrupted: ended at once, without a save.")
        return 130
    except BrokenPipeError:  # `titanlite train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        _report(traceback.format_exc(), error)
        return 1


def _report(message: str, error: Exception) -> None:
    """Say why this process ends: to the launcher, which prints equal messages of many ranks once, or on stderr. Notes
    on the error, which say how to go on, come last."""
    from titanlite.observe.logger import note_end

    # A traceback quotes what stands in files.
    message, closing = printable(message), printable("\n".join(getattr(error, "__notes__", ())))
    message = message.rstrip().removesuffix(closing).rstrip()  # a traceback ends with the notes
    text = "\n".join(filter(None, (message, closing)))
    note_end(text)
    folder = os.environ.get(ERROR_FOLDER)
    record = {"message": message, "closing": closing, "time": time.time()}
    with contextlib.suppress(OSError):  # the folder may be gone, its disk full
        if folder is not None:
            Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record), encoding="utf-8")
            return
    with contextlib.suppress(OSError):  # and so may the terminal
        print(text, file=sys.stderr)


def train(argv: Sequence[str]) -> None:
    """`titanlite train`: check the job for this world, then train. One rank, or one of torchrun's."""
    from titanlite.validate import load_and_check

    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # "save and go on": there is nothing to save yet
    if ERROR_FOLDER in os.environ:
        stop_with_launcher()
    job = load_and_check(argv, _world_size())
    gc.set_threshold(20_000, 50, 1000)  # or to look through torch's objects again and again is a fifth of its import
    from titanlite.train import run as train_job

    gc.freeze()
    train_job(job, argv)


def check(argv: Sequence[str]) -> None:
    """`titanlite check [--world-size N] [--job.config_file FILE] [--section.key value ...]`: print OK or all mistakes.

    Raises:
        UserError: the job is wrong.
    """
    from titanlite.validate import load_and_check

    words = list(argv)
    given = _option(words, "--world-size")
    ranks = _world_size() if given is None else _number("--world-size", given, 1)
    job = load_and_check(words, ranks)
    print(f"OK: {job.job.config_file} can start on {ranks} rank{'s' if ranks != 1 else ''}.")


def prepare(argv: Sequence[str]) -> None:
    """`titanlite prepare --out DIR [--workers N] [--job.config_file FILE] [--section.key value ...]`."""
    from titanlite.validate import load_and_check

    words = list(argv)
    out, workers = _option(words, "--out"), _option(words, "--workers")
    if out is None:
        raise UserError("titanlite prepare: --out DIR is missing, the folder for the shards.")
    job = load_and_check(words, world_size=1)
    from titanlite.data.prepare import prepare as prepare_shards

    prepare_shards(job, Path(out), _number("--workers", workers, 1) if workers else os.cpu_count() or 1)


def data(argv: Sequence[str]) -> None:
    """`titanlite data show --step N [--row K] [--world-size N] [--job.config_file FILE] [--section.key value ...]`."""
    from titanlite.validate import load_and_check

    words = list(argv)
    if words[:1] != ["show"]:
        raise UserError("usage: titanlite data show --step N [--row K] [--world-size N] [--job.config_file FILE] ...")
    del words[0]
    step, row, world_size = (_option(words, name) for name in ("--step", "--row", "--world-size"))
    ranks = _number("--world-size", world_size or "1", 1)
    job = load_and_check(words, ranks)
    from titanlite.data.show import show_step
    from titanlite.parallel.layout import degrees

    dp_size, row_number = degrees(job.parallelism, ranks).data, None if row is None else _number("--row", row, 0)
    print(show_step(job, _number("--step", step or "1", 1), row_number, dp_size))


def _option(words: list[str], name: str) -> str | None:
    """Take `name VALUE` or `name=VALUE` out of `words`; None if it is not there."""
    for at, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        if flag.replace("_", "-") == name:
            taken = [value] if has_value else words[at + 1 : at + 2]
            del words[at : at + 1 + (not has_value)]
            if not taken or (taken[0].startswith("--") and not has_value):
                raise UserError(f"{name} needs a value.")
            return taken[0]
    return None


def _number(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UserError(f'{name} "{text}": a whole number of at least {least} is allowed.')
    return int(text)


def _world_size() -> int:
    """Ranks of the world that torchrun's environment describes."""
    return _number("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), 1)


def stop_with_launcher() -> None:
    """Let Linux send SIGTERM to this worker if its launcher dies (even by SIGKILL): it saves and stops, too."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


if __name__ == "__main__":  # how the launcher starts a rank
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # All is written and closed. A gloo thread that lets go of a tensor while Python shuts down would abort the process.
    os._exit(code)

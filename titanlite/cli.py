"""Implement the `titanlite` command, which runs one of its subcommands.

Invariant: user errors print a message on standard error and return an exit code, without a
traceback. `titanlite --help` takes less than a tenth of a second, because the module of a
subcommand is imported only when the subcommand runs.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from titanlite.config.errors import UserError
from titanlite.runtime import process
from titanlite.runtime.logging import (
    drop_output,
    log_end,
    logged_ranks,
    note,
    record_success,
    report_end,
)

if TYPE_CHECKING:
    from titanlite.config.run import Run

# Subcommand -> function to call with the options, and a line of help. The function is written as
# "module:function", or as "module" for its function `main`.
COMMANDS = {
    "train": ("cli:train", "Train a model in this process."),
    "launch": ("launch.launcher:launch", "Train with one process per GPU, or NGPU processes."),
    "check": ("commands.check", "Validate a job for --world-size N ranks without starting it."),
    "plan": ("commands.plan", "Estimate memory and time of a job, and find the fastest layout."),
    "prove": ("commands.prove", "Compare a small version of a job with a reference, step by step."),
    "profile": ("commands.profile", "Profile a few steps of a job, and write a Perfetto trace."),
    "watch": ("commands.watch", "Show the progress of a run, even from another node."),
    "runs": ("commands.runs", "List the runs in a folder: state, step, loss, speed, age."),
    "report": ("commands.report", "Write an offline HTML page about one or several runs."),
    "replay": ("commands.replay", "Recompute a step of a run, even a skipped one."),
    "generate": ("commands.generate", "Complete text with a checkpoint."),
    "eval": ("commands.eval", "Evaluate a checkpoint on text: perplexity and bits per byte."),
    "verify": ("commands.verify", "Read checkpoints completely, and report damage."),
    "import": ("commands.import_", "Convert Hugging Face, Meta or torchtitan weights."),
    "export": ("commands.export", "Convert a checkpoint to a Hugging Face model."),
    "average": ("commands.average", "Average the weights of checkpoints."),
    "migrate": ("commands.migrate", "Convert a torchtitan job file."),
    "get": ("commands.get", "Download a tokenizer or data, and print the job keys that use it."),
    "prepare": ("commands.data:run_prepare", "Tokenize the data of a job once, into shards."),
    "data": ("commands.data:run_data_show", "Print the text of a step: `data show --step N`."),
    "tokenizer": ("commands.data:run_tokenizer_train", "Train a tokenizer: `tokenizer train`."),
}
_HEADINGS = {"train": "Training", "watch": "Monitoring", "import": "Conversion", "get": "Data"}
"""Maps the first subcommand of each group in the help to the heading of the group."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand of `titanlite` and return its exit code.

    Args:
        argv: Name and options of the subcommand, such as ["train", "--training.steps", "10"].
            Defaults to the command line of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not os.environ.get("HF_ENDPOINT"):
        # huggingface_hub would use an empty value as the address.
        os.environ.pop("HF_ENDPOINT", None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the torch profiler
    return run_quietly(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> object:
    """Run the subcommand that `words` selects, or print the help or the version.

    Args:
        words: Name and options of the subcommand.

    Returns:
        The return value of the subcommand. If it is an integer, it is the exit code.
    """
    if not words:
        print(format_usage())
        return 2
    if words in (["-h"], ["--help"], ["help"]):
        print(format_usage())
        return 0

    # `help eval` becomes `eval --help`.
    name, *arguments = _replace_help(words)
    if name in ("--version", "-V", "version"):
        return _print_version()
    if name not in COMMANDS:
        return _reject_command(name)
    return _run_command(name, arguments)


def _replace_help(words: list[str]) -> list[str]:
    """Convert a `help` command to the equivalent command with `--help`.

    For example, `help eval` becomes `eval --help`, and both `help training.steps` and `help train
    training.steps` become `train --help training.steps`. Other commands are returned unchanged.
    """
    name, *topics = words
    if name not in ("help", "-h", "--help"):
        return words
    command = topics.pop(0) if topics[0] in COMMANDS else "train"
    return [command, "--help", *topics]


def _run_command(name: str, arguments: list[str]) -> object:
    """Run a subcommand and return the return value of its function."""
    process.set_up_torch()
    command = _import_command(name)
    if name not in ("train", "launch"):
        # Up to this point, Ctrl-C ends the process silently, because extension modules can turn a
        # KeyboardInterrupt during their import into another exception. `train` and `launch` install
        # other handlers.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command(arguments)


def _import_command(name: str) -> Callable[[Sequence[str]], object]:
    """Import the module of a subcommand and return the function that runs it."""
    location, _ = COMMANDS[name]
    module_name, _, function_name = location.partition(":")
    module = importlib.import_module(f"titanlite.{module_name}")
    return getattr(module, function_name or "main")


def _print_version() -> int:
    """Print the versions of titanlite, torch and Python, and return exit code 0."""
    from importlib.metadata import version

    # The metadata of an editable installation can be older than the code.
    from titanlite import __version__

    print(f"titanlite {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}")
    return 0


def _reject_command(name: str) -> int:
    """Report an unknown subcommand, suggest a similar one, and return exit code 2."""
    import difflib

    if name.startswith("--"):
        suggestion = "train ..."
    else:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        suggestion = similar[0] if similar else "--help"
    message = f"titanlite {name}: unknown command. Try `titanlite {suggestion}`."
    print(message, file=sys.stderr)
    return 2


def format_usage() -> str:
    """Return the text of `titanlite --help`, which lists all subcommands in groups."""
    lines = ["usage: titanlite COMMAND ..."]
    for name, (_, text) in COMMANDS.items():
        if name in _HEADINGS:
            lines += ["", _HEADINGS[name]]
        lines.append(f"  {name:<10}{text}")
    lines += [
        "",
        "Run `titanlite COMMAND --help` for the options of a command, `titanlite help training` "
        "for a",
        "section of a job file, and `titanlite help training.steps` for one key.",
        "Run `titanlite --version` for the versions.",
    ]
    return "\n".join(lines)


def run_quietly(command: Callable[[], object]) -> int:
    """Call a command, print its error if it fails, and return the exit code of the process.

    A `UserError` is printed without a traceback, and its class determines the exit code. The exit
    code is 1 for any other exception, 130 for Ctrl-C, and 141 for a closed pipe.
    """
    _set_up_streams()
    try:
        exit_code = _call(command)
    except BrokenPipeError:  # for example, in `titanlite runs | head`
        drop_output(sys.stdout)
        return 141
    except KeyboardInterrupt:
        log_end("Interrupted: stopped at once, without saving.", "stop")
        return 130
    except Exception as error:
        return _report_error(error)

    if exit_code == 0:
        record_success()  # for the launcher
    return exit_code


def _call(command: Callable[[], object]) -> int:
    """Call a command and return its exit code.

    The exit code is the integer that the command returns or passes to `sys.exit`, or 0 if it is any
    other value.
    """
    try:
        result = command()
        sys.stdout.flush()
    except SystemExit as end:  # tyro raises it after a help text or a message
        result = end.code
    return result if isinstance(result, int) else 0


def _set_up_streams() -> None:
    """Make standard output and standard error write whole lines.

    By default, `print` writes a text and its newline separately, so the output of several ranks
    could be mixed within a line. Characters that the encoding cannot represent are escaped.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it with `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


def _report_error(error: Exception) -> int:
    """Print and record the error that ended a command, and return the exit code.

    Errors that the user can fix are printed without a traceback.
    """
    # This error means that a disk is full. It does not name the file, which can also be standard
    # output, as in `titanlite check > /dev/full`.
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        drop_output(sys.stdout)
        error = UserError(
            "no space left on the device of standard output or of another file. Free up some space."
        )

    # Print a traceback for a bug, or for a failure that titanlite does not expect.
    if not isinstance(error, UserError):
        report_end(traceback.format_exc(), "failure")
        return 1

    # For an error that the user can fix, print only the message and its notes (from `add_note`),
    # which explain how to resume the run.
    notes = getattr(error, "__notes__", [])
    report_end("\n".join([str(error), *notes]), error.event, error.step)
    return error.exit_code


def train(argv: Sequence[str]) -> int:
    """Validate a job, train it in this process, and return exit code 0.

    The process is either the only rank, or one of several ranks that a launcher started with the
    environment variables RANK and WORLD_SIZE.

    Raises:
        UserError: If the job is invalid, or training ends because of an error that the user can
            fix.
    """
    # These imports are slow, and `titanlite --help` does not need them.
    from titanlite.launch.output_folder import run_in_output_folder
    from titanlite.load_run import load_run, read_world_size
    from titanlite.observe.gpus import check_memory

    world_size = read_world_size()
    logged_ranks(world_size)  # raises a UserError if LOG_RANK does not list existing ranks
    run = load_run(argv, world_size)
    check_memory(run)
    _print_certificate(run)

    _preload_trainer()
    train_run = partial(_train_run, run, argv)
    has_launcher = "RANK" in os.environ
    if has_launcher:  # the launcher has prepared the output folder for all ranks
        return train_run()
    return run_in_output_folder(run, train_run)


def _preload_trainer() -> None:
    """Import torch and the trainer, with fewer garbage collections to save time.

    The import takes seconds, and collections would take a fifth of this time. Call this before the
    run uses its output folder. Later collections ignore the imported objects.
    """
    gc.set_threshold(20_000, 50, 1000)
    importlib.import_module("titanlite.train.trainer")
    gc.freeze()


def _train_run(run: Run, argv: Sequence[str]) -> int:
    """Train a run in this process, and return exit code 0."""
    from titanlite.train import trainer

    trainer.train(run, argv)
    return 0


def _print_certificate(run: Run) -> None:
    """Print on rank 0 the result of `titanlite prove` for this run, if it has a certificate."""
    from titanlite.config.certificate import find_certificate

    match = find_certificate(run)
    if match is not None and os.environ.get("RANK", "0") == "0":
        path, certificate = match
        result = "proven" if certificate.is_valid else "NOT proven"
        note(f"{path}: {result} on {certificate.day()}.")

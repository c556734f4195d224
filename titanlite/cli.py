"""The command `titanlite`, with one row per subcommand.

Invariant: a user's mistake gives a message on standard error and an exit code, never a traceback. `titanlite --help`
answers in a tenth of a second, because each command is imported only when it is called.
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
from contextlib import nullcontext

from titanlite.config.errors import GuardError, StoppedBySignal, StoppedUnsaved, UserError
from titanlite.runtime.logging import drop_output, logged_ranks, note_end, say_end

# Name -> the module whose `main`, or other function, gets the other words, and one line of help.
COMMANDS = {
    "train": ("cli:train", "Train the model that a job file describes, in this process."),
    "launch": ("launch.launcher:launch", "The same on each GPU, or NGPU processes: what ./run_train.sh starts."),
    "check": ("commands.check", "Check a job file, for --world-size N ranks, without starting anything."),
    "plan": ("commands.plan", "Say what a job will take: memory, time, what fits, and the fastest layout."),
    "profile": ("commands.profile", "Say where the time of a job's step goes, and write a trace for Perfetto."),
    "watch": ("commands.watch", "Show how a run goes, also from another machine."),
    "runs": ("commands.runs", "List the runs in a folder: state, step, loss, speed, age."),
    "report": ("commands.report", "Write a page about one or several runs, to look at offline."),
    "replay": ("commands.replay", "Compute a step of a run once more, also one that was skipped."),
    "generate": ("commands.generate", "Let a checkpoint complete a text."),
    "eval": ("commands.eval", "Score a checkpoint on texts: perplexity and bits per byte."),
    "verify": ("commands.verify", "Read checkpoints and say which ones are good."),
    "import": ("commands.import_", "Make a checkpoint from Hugging Face's, Meta's or torchtitan's weights."),
    "export": ("commands.export", "Write a checkpoint as a Hugging Face model."),
    "average": ("commands.average", "Average the weights of checkpoints, which can stand in for a decay."),
    "migrate": ("commands.migrate", "Turn a job file of torchtitan's into one of titanlite's."),
    "get": ("commands.get", "Download a tokenizer or data, and print the lines of the job file."),
    "prepare": ("commands.data:prepare", "Tokenize a job's data once, into shards that training reads."),
    "data": ("commands.data:data", "`data show --step N`: print the text that a step of a job reads."),
    "tokenizer": ("commands.data:tokenizer", "`tokenizer train --vocab-size N --out DIR`: a vocabulary from text."),
}
_HEADINGS = {"train": "Train", "watch": "Look", "import": "Convert", "get": "Data"}  # by the first command below it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0, that of a UserError, or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not os.environ.get("HF_ENDPOINT"):
        os.environ.pop("HF_ENDPOINT", None)  # empty, which its library would take for an address
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler prints a line at each start and stop
    return run_quietly(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> object:
    """Call the subcommand that `words` begin with; returns what it returns, or an exit code."""
    if not words or words in (["-h"], ["--help"], ["help"]):
        print(usage())
        return 0 if words else 2
    name, *rest = words
    if name in ("--version", "-V", "version"):
        from importlib.metadata import version

        from titanlite import __version__  # from the code that runs: the metadata of a checkout can be older

        print(f"titanlite {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}")
        return 0
    if name in ("help", "-h", "--help"):  # `titanlite help check`, `titanlite help training.steps`
        name, rest = (rest[0], ["--help"]) if rest[0] in COMMANDS else ("train", ["--help", *rest])
    if name not in COMMANDS:
        import difflib

        near = "train ..." if name.startswith("--") else "".join(difflib.get_close_matches(name, COMMANDS, n=1))
        print(f"titanlite {name}: unknown command; try `titanlite {near or '--help'}`.", file=sys.stderr)
        return 2
    if name not in ("train", "launch"):  # until these two have their own handlers, they have nothing to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"titanlite.{module}"), function or "main")(rest)


def usage() -> str:
    """The text of `titanlite --help`."""
    headings = {name: f"\n{heading}\n" for name, heading in _HEADINGS.items()}
    rows = "\n".join(f"{headings.get(name, '')}  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: titanlite COMMAND ...\n{rows}\n\n"
        "`titanlite COMMAND --help` or `titanlite help COMMAND` explains the options of a command,\n"
        "`titanlite help training` a section of a job file, `titanlite help training.steps` one key.\n"
        "`titanlite --version` names the versions."
    )


def run_quietly(command: Callable[[], object]) -> int:
    """Call `command` and turn the ways in which it can end into an exit code, unless it returns one; a crash of ours
    keeps its traceback."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115 - `>&-`
    for stream in (sys.stdout, sys.stderr):
        # Write whole lines, into files as well: an unbuffered `print` writes a text and its newline separately, so that
        # the lines of ranks would mix. A character that the terminal cannot show is written as its number.
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as end:  # tyro raises it after a help or a message
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:  # `titanlite train --help | head`
        drop_output(sys.stdout)
        return 141
    except KeyboardInterrupt:
        note_end("Interrupted: ended at once, without a save.", "stop")
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:  # `> /dev/full`
            drop_output(sys.stdout)
            error = UserError("Standard output cannot be written: no space left on the device.")
        if not isinstance(error, UserError):
            say_end(traceback.format_exc(), "failure")
            return 1
        stopped = isinstance(error, StoppedBySignal | StoppedUnsaved)
        kind = "stop" if stopped else "guard" if isinstance(error, GuardError) else "refusal"
        say_end("\n".join([str(error), *getattr(error, "__notes__", ())]), kind)
        return error.exit_code


def train(argv: Sequence[str]) -> None:
    """`titanlite train`: check the job for this world, then train. One rank, or one of a launcher's."""
    from titanlite.load_run import load_run, world_size
    from titanlite.observe.gpus import check_memory

    logged_ranks(ranks := world_size())
    run = load_run(argv, ranks)
    check_memory(run)
    gc.set_threshold(20_000, 50, 1000)  # fewer collections, because they take a fifth of the import of torch
    from titanlite.launch.launcher import output_folder
    from titanlite.train.loop import train

    gc.freeze()
    with output_folder(run) if "RANK" not in os.environ else nullcontext():
        train(run, argv)

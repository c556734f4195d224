"""`titanlite generate`: let a checkpoint complete texts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlite.checkpoint.find import checkpoints_at
from titanlite.config.errors import UserError, printable
from titanlite.config.files import read_file
from titanlite.config.options import AsJson, CheckpointOptions, Generation, OptionPath, parse
from titanlite.runtime.logging import note

MOST_BYTES = 1 << 28  # of a file of prompts


class Generate(Generation, CheckpointOptions):
    """Let a checkpoint complete texts. Prompts and completions go to standard output, all else to standard error."""

    checkpoint: OptionPath
    """The folder of one step (.../step-00000100), the folder of all steps, or the output folder of a run. Of several
    steps, the newest good one is used."""
    prompt: str = ""
    """Text to complete. Empty: the beginning of a new document."""
    prompts: OptionPath | None = None
    """A file of prompts, or - for standard input: one on each line. In a .jsonl file a line is a JSON text, or an
    object with the key "prompt", so that a prompt can have several lines."""
    ema: bool = False
    """Take the average of the weights: see `titanlite help ema`."""
    as_json: AsJson = False
    """Print one JSON object for each prompt, on a line of its own, and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: a wrong option, no such folder or file, or a prompt that does not fit the model.
        CheckpointError: no usable checkpoint.
    """
    options = parse(Generate, argv, "generate")
    prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts)
    if options.prompts is not None and options.prompt:
        raise UserError("--prompt and --prompts: give one of them.")
    checkpoints_at(options.checkpoint)
    from titanlite.completion import generate, generate_many, load_checkpoint  # torch: a mistake does not wait for it

    loaded = load_checkpoint(options.checkpoint, ema=options.ema)
    weight = loaded.model.get_parameter("tok_embeddings.weight")
    dtype = str(weight.dtype).removeprefix("torch.")
    note(f"{loaded.folder}: {loaded.job.model.flavor}, {dtype} on {weight.device.type}")
    settings, tokens, started = options.model_dump(include=set(Generation.model_fields)), 0, time.perf_counter()
    if options.prompts is None and not options.as_json:  # shown as it comes
        pieces = generate(loaded, options.prompt, **settings)
        _write(options.prompt)
        for tokens, piece in enumerate(pieces):  # noqa: B007  (the last piece is the rest of the text and no token)
            _write(piece)
        _write("\n")
    else:
        for done in generate_many(loaded, prompts, **settings):
            _write((json.dumps(asdict(done)) if options.as_json else done.prompt + done.completion) + "\n")
            tokens += done.tokens
    note(f"{tokens} tokens, {tokens / (time.perf_counter() - started):,.1f} tokens/s")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, or of standard input for `-`. Blank lines are none.

    Raises:
        UserError: it cannot be read, has no prompt, or a line is not what the name of the file promises.
    """
    raw = sys.stdin.buffer.read() if str(path) == "-" else read_file(path, MOST_BYTES)
    try:
        prompts: list[Any] = [line.removesuffix("\r") for line in raw.decode().split("\n") if line.strip()]
        if path.suffix == ".jsonl":
            values = map(json.loads, prompts)
            prompts = [value["prompt"] if isinstance(value, dict) else value for value in values]
        if prompts and all(isinstance(prompt, str) for prompt in prompts):
            return prompts
    except (ValueError, KeyError, RecursionError):  # no UTF-8, no JSON
        pass
    need = 'a prompt on each line, in UTF-8; in a .jsonl file as a JSON text, or an object with a text "prompt"'
    raise UserError(f"--prompts {path}: must have {need}.")


def _write(text: str) -> None:
    """Print a piece of text at once. For a terminal, control characters are escaped, because it would obey them. A
    file or another program gets the text unchanged, but for the surrogates of an argument that was no UTF-8."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text.encode("utf-8", "replace").decode())
    sys.stdout.flush()

"""`titanlite generate`: let a checkpoint complete texts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from titanlite.completion import (
    Generate,
    LoadedCheckpoint,
    generate,
    generate_many,
    load_checkpoint,
)
from titanlite.config.errors import UserError, printable
from titanlite.config.files import read_file
from titanlite.config.options import parse
from titanlite.observe.flops import num_params
from titanlite.runtime.logging import note

MOST_BYTES = 1 << 28  # of a file of prompts


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: a wrong option, no such folder or file, or a prompt that does not fit the model.
        CheckpointError: no usable checkpoint.
    """
    options = parse(Generate, argv, "generate")
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    if prompts is not None and options.prompt:
        raise UserError("--prompt and --prompts: give one of them.")
    loaded = load_checkpoint(options.checkpoint)
    several = prompts is not None or options.as_json
    completed = _several(loaded, prompts or [options.prompt], options) if several else _one(loaded, options)
    weight = loaded.model.get_parameter("tok_embeddings.weight")
    size, dtype = f"{num_params(loaded.model.arch):,} parameters", str(weight.dtype).removeprefix("torch.")
    note(f"{loaded.folder}: {loaded.job.model.flavor}, {size}, {dtype} on {weight.device.type}")
    started = time.perf_counter()
    count = sum(completed)
    note(f"{count} tokens, {count / (time.perf_counter() - started):,.1f} tokens/s")


def _one(loaded: LoadedCheckpoint, options: Generate) -> Iterator[int]:
    """Show a completion as it comes. Yields 1 for each token."""
    settings = options.model_dump(include={"prompt", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed"})
    pieces = generate(loaded, **settings)

    def show() -> Iterator[int]:
        write(options.prompt.encode("utf-8", "replace").decode())
        for number, piece in enumerate(pieces):
            write(piece)
            if number:  # the last piece is the rest of the text and no token
                yield 1
        write("\n")

    return show()


def _several(loaded: LoadedCheckpoint, prompts: Sequence[str], options: Generate) -> Iterator[int]:
    """Print each completion when it is whole. Yields its number of tokens."""
    names = {"max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "batch_size"}
    completions = generate_many(loaded, prompts, **options.model_dump(include=names))

    def show() -> Iterator[int]:
        for done in completions:
            if options.as_json:
                print(json.dumps(asdict(done)), flush=True)
            else:
                write(done.prompt.encode("utf-8", "replace").decode() + done.completion + "\n")
            yield done.tokens

    return show()


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, or of standard input for `-`. Blank lines are none.

    Raises:
        UserError: it cannot be read, has no prompt, or a line is not what the name of the file promises.
    """
    name = "standard input" if str(path) == "-" else str(path)
    raw = _standard_input() if str(path) == "-" else read_file(path, MOST_BYTES)
    try:
        lines = [(number, line) for number, line in enumerate(raw.decode().split("\n"), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {name}: not valid UTF-8 at byte {error.start}.") from None
    if not lines:
        raise UserError(f"--prompts {name}: there is no prompt in it.")
    if path.suffix != ".jsonl":
        return [line.removesuffix("\r") for _, line in lines]
    return [_json_prompt(f"--prompts {name}, line {number}", line) for number, line in lines]


def _standard_input() -> bytes:
    """All of it. Raises UserError: it is closed, or it is longer than a file of prompts can be."""
    if sys.stdin is None:
        raise UserError("--prompts -: standard input is closed. Name a file, or pipe the prompts in.")
    raw = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UserError(f"--prompts -: standard input has more than {MOST_BYTES:,} bytes. Give the prompts in parts.")
    return raw


def _json_prompt(place: str, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{place}: not valid JSON.") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UserError(f'{place}: must be a JSON text, or an object whose "prompt" is one.')
    return prompt


def write(text: str) -> None:
    """Print a piece of the text at once. For a terminal, control characters are escaped, because it would obey them. A
    file or another program gets the text unchanged."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()

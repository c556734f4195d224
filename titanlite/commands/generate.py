"""`titanlite generate`: complete texts with a checkpoint."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint.find import find_checkpoints
from titanlite.config.errors import UserError, printable
from titanlite.config.files import read_file
from titanlite.config.options import (
    AsJson,
    Generation,
    OptionPath,
    TextModelOptions,
    parse_options,
)
from titanlite.observe.flops import num_params
from titanlite.runtime.logging import note

if TYPE_CHECKING:
    from titanlite.completion import Completion, LoadedCheckpoint

_MAX_BYTES = 1 << 28  # maximum size of a prompt file


class Generate(Generation, TextModelOptions):
    """Complete texts with a checkpoint.

    Prompts and completions go to standard output, and everything else goes to standard error.
    """

    checkpoint: OptionPath
    """A step folder (.../step-00000100), the folder of all steps, or the output folder of a run. If
    there are several steps, the newest undamaged one is used."""
    prompt: str = ""
    """Text to complete. Default: the beginning of a new document."""
    prompts: OptionPath | None = None
    """File with one prompt per line, or - for standard input. Each line of a .jsonl file is a JSON
    string, or an object with the key "prompt", so prompts can contain line breaks."""
    ema: bool = False
    """Use the moving average of the weights; see `titanlite help ema`."""
    as_json: AsJson = False
    """Print one line with a JSON object per prompt and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite generate`: complete prompts with a checkpoint and print the completions.

    Raises:
        UserError: If an option is invalid, a file does not exist, or a prompt does not fit the
            model.
        CheckpointError: If no checkpoint can be used.
    """
    options = parse_options(Generate, argv, "generate")
    if options.prompts is not None and options.prompt:
        raise UserError("--prompt and --prompts: pass only one of them.")
    prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts)
    find_checkpoints(options.checkpoint)  # raises an error if no checkpoint exists

    # Importing torch is slow, so invalid options are reported first.
    from titanlite.completion import load_checkpoint

    loaded = load_checkpoint(options.checkpoint, ema=options.ema, tokenizer=options.tokenizer_path)
    note(_describe_model(loaded))
    start = time.perf_counter()
    num_tokens = _write_completions(loaded, options, prompts)
    speed = num_tokens / (time.perf_counter() - start)
    note(f"{num_tokens} tokens, {speed:,.1f} tokens/s")


def _write_completions(loaded: LoadedCheckpoint, options: Generate, prompts: Sequence[str]) -> int:
    """Complete the prompts, and print the completions.

    The completion of --prompt is printed while it is generated.

    Returns:
        Number of generated tokens.
    """
    from titanlite.completion import generate, generate_many

    settings = options.model_dump(include=set(Generation.model_fields))  # such as temperature
    if options.prompts is None and not options.as_json:
        _write(options.prompt)
        return _write_pieces(generate(loaded, options.prompt, **settings))
    return _write_results(generate_many(loaded, prompts, **settings), options.as_json)


def _describe_model(loaded: LoadedCheckpoint) -> str:
    """Format the folder, parameter count, dtype and device of a loaded model in one line."""
    weight = loaded.model.get_parameter("tok_embeddings.weight")
    dtype = str(weight.dtype).removeprefix("torch.")
    size = num_params(loaded.model.arch)
    return f"{loaded.folder}: {size:,} parameters, {dtype} on {weight.device.type}"


def _write_pieces(pieces: Iterable[str]) -> int:
    """Print each piece of a completion as soon as it is generated.

    Args:
        pieces: Text of each generated token, then one last piece with the rest of the text, such as
            an incomplete character.

    Returns:
        Number of generated tokens. The last piece is not counted.
    """
    num_pieces = 0
    for piece in pieces:
        _write(piece)
        num_pieces += 1
    _write("\n")
    return num_pieces - 1  # without the final piece


def _write_results(results: Iterable[Completion], as_json: bool) -> int:
    """Print each prompt with its completion, or each result as a line of JSON.

    Returns:
        Number of generated tokens.
    """
    num_tokens = 0
    for result in results:
        line = json.dumps(asdict(result)) if as_json else result.prompt + result.completion
        _write(f"{line}\n")
        num_tokens += result.tokens
    return num_tokens


def read_prompts(path: Path) -> list[str]:
    """Read the prompts in a file, one per line, and skip blank lines.

    Args:
        path: Prompt file, or `-` for standard input. Each line of a .jsonl file is a JSON string,
            or an object with the key "prompt".

    Raises:
        UserError: If the file cannot be read, contains no prompt, or has an invalid line.
    """
    content = sys.stdin.buffer.read() if str(path) == "-" else read_file(path, _MAX_BYTES)
    is_json = path.suffix == ".jsonl"
    wrong_content = UserError(
        f"--prompts {path}: must contain one prompt per line in UTF-8. In a .jsonl file, each "
        'line must be a JSON string, or an object with a string "prompt".'
    )
    try:
        lines = content.decode().split("\n")
        prompts = [_parse_prompt(line, is_json) for line in lines if line.strip()]
    except (ValueError, RecursionError):  # not UTF-8, or an invalid line
        raise wrong_content from None
    if not prompts:
        raise wrong_content
    return prompts


def _parse_prompt(line: str, is_json: bool) -> str:
    """Parse one line of a prompt file.

    Args:
        line: Text of the line.
        is_json: Whether the line is JSON: a string, or an object with the key "prompt". Otherwise,
            the whole line is the prompt.

    Raises:
        ValueError: If a JSON line contains no prompt.
    """
    if not is_json:
        return line.removesuffix("\r")
    value = json.loads(line)
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ValueError("the prompt must be a string")
    return prompt


def _write(text: str) -> None:
    """Write text to standard output and flush it, so that it appears at once.

    On a terminal, control characters are escaped, because they could change its state. Files and
    pipes receive the text unchanged, except that invalid Unicode (surrogates) is replaced.
    """
    if sys.stdout.isatty():
        text = printable(text)
    else:
        text = text.encode("utf-8", "replace").decode()
    sys.stdout.write(text)
    sys.stdout.flush()

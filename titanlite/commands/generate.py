"""`titanlite generate`: let a checkpoint complete a text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from titanlite.completion import Generate, generate, load_checkpoint
from titanlite.config.errors import printable
from titanlite.config.options import parse
from titanlite.observe.flops import num_params
from titanlite.runtime.logging import note


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: a wrong option, no such folder, or a prompt that does not fit the model.
        CheckpointError: no usable checkpoint.
    """
    options = parse(Generate, argv, "generate")
    loaded = load_checkpoint(options.checkpoint)
    pieces = generate(loaded, **options.model_dump(exclude={"checkpoint"}))
    weight = loaded.model.get_parameter("tok_embeddings.weight")
    size, dtype = f"{num_params(loaded.model.arch):,} parameters", str(weight.dtype).removeprefix("torch.")
    note(f"{loaded.folder}: {loaded.job.model.flavor}, {size}, {dtype} on {weight.device.type}")
    started, count = time.perf_counter(), 0
    write(options.prompt.encode("utf-8", "replace").decode())
    for count, piece in enumerate(pieces):  # noqa: B007  # the last piece is the rest of the text and no token
        write(piece)
    write("\n")
    note(f"{count} tokens, {count / (time.perf_counter() - started):,.1f} tokens/s")


def write(text: str) -> None:
    """Print a piece of the text at once. For a terminal, control characters are escaped, because it would obey them. A
    file or another program gets the text unchanged."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()

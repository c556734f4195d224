"""`titanlite get`: download a tokenizer or training data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from titanlite.commands.common import format_table
from titanlite.commands.data import format_job_lines
from titanlite.config.errors import printable
from titanlite.config.mistakes import format_value
from titanlite.config.options import OptionPath, Options, parse_options
from titanlite.data.hub import SOURCE_OF_SUFFIX, HubFiles, load_presets
from titanlite.data.tokenizer import load_tokenizer


class Get(Options):
    """Download a tokenizer or training data, and print the job file lines that use it."""

    kind: Annotated[Literal["tokenizer", "data"], tyro.conf.Positional]
    """Kind of download: tokenizer or data."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """A known name, or the OWNER/NAME of any repository on the Hub. Default: list the known
    names."""
    out: OptionPath | None = None
    """Folder for the files. Default: assets/tokenizer/NAME or data/NAME. Existing files are not
    downloaded again, so you can repeat the command after an interruption."""
    origin: Annotated[Annotated[str, Field(min_length=1)] | None, tyro.conf.arg(name="from")] = None
    """URL of a mirror of huggingface.co, or a folder that contains the files of the repository."""
    include: str | None = None
    """Download only files whose path in the repository matches this pattern, such as
    "en/c4-train.0000*"."""
    dry_run: bool = False
    """List the files with their sizes instead of downloading them."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite get`: download a tokenizer or data, and print the job lines that use it.

    Raises:
        UserError: If the name is unknown, or the files cannot be downloaded or used.
    """
    options = parse_options(Get, argv, "get")
    if not options.name:
        print(_list_presets(options.kind))
        return

    # Look up the files and their sizes on the Hub.
    files = HubFiles(options.kind, options.name, options.origin, options.include)
    out = options.out or _default_folder(options, files)
    num_bytes = sum(files.sizes.values())
    total = f"{num_bytes:,} bytes of {files.repo} in {out} (files: {len(files.sizes)})"
    if options.dry_run:
        for path, size in files.sizes.items():
            print(printable(f"{size:>18,}  {path}"))
        print(printable(f"Not downloaded: {total}."))
        return

    files.fetch(out)
    lines = _format_job_lines(options.kind, files, out)
    print(printable(f"{total}. To use them, add these lines to a job file:\n\n{lines}"))


def _format_job_lines(kind: str, files: HubFiles, out: Path) -> str:
    """Return the lines to add to a job file to use the downloaded tokenizer or data.

    Args:
        kind: "tokenizer" or "data".
        files: The downloaded files.
        out: Folder that contains them.
    """
    if kind == "tokenizer":
        path = out / next(iter(files.sizes))
        return format_job_lines(path, load_tokenizer(path).vocab_size)
    source = SOURCE_OF_SUFFIX[files.suffix]
    pattern = format_value(f"{out}/**/*{files.suffix}")
    return f'[dataset]\nsource = "{source}"\npath = {pattern}'


def _default_folder(options: Get, files: HubFiles) -> Path:
    """Return the default folder for downloaded files, such as "assets/tokenizer/gpt2"."""
    name = files.repo if "/" in options.name else options.name
    parent = "assets/tokenizer" if options.kind == "tokenizer" else "data"
    return Path(parent, Path(name).name)


def _list_presets(kind: str) -> str:
    """Format a table of the tokenizers or datasets that `titanlite get` can download.

    Each row contains the command to download one of them.

    Args:
        kind: "tokenizer" or "data".
    """
    rows = []
    for name, preset in load_presets()[kind].items():
        rows.append((f"titanlite get {kind} {name}", preset["size"], preset["license"]))
    return format_table(("command", "size", "license"), rows)

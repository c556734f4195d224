"""`titanlite get`: a tokenizer or data, downloaded, and the lines of the job file that use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titanlite.commands.data import tokenizer_tables
from titanlite.config.errors import printable
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, Options, parse
from titanlite.data.hub import ENDINGS, Files, known
from titanlite.data.tokenizer import load_tokenizer


class Get(Options):
    """Download a tokenizer or training data, and print the lines of the job file that use it."""

    kind: Annotated[Literal["tokenizer", "data"], tyro.conf.Positional]
    """What to get."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """A known name, or OWNER/NAME: any repository of the hub. Left out: the known names are listed."""
    out: OptionPath | None = None
    """Folder for the files. Left out: assets/tokenizer/NAME or data/NAME. What is there already is not fetched again,
    so after an interruption the same command goes on."""
    origin: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """In place of huggingface.co: the URL of a mirror, or a folder that has the files of the repository."""
    include: str | None = None
    """Only the files whose path in the repository matches this, for example "en/c4-train.0000*"."""
    dry_run: bool = False
    """List the files and their bytes, and download nothing."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: an unknown name, or the files cannot be had or used."""
    options = parse(Get, argv, "get")
    if not options.name:
        rows = [{"name": name, **row} for name, row in known().items() if name.startswith(options.kind)]
        print("\n".join("titanlite get {name:<24}{size:<30}{licence}".format(**row) for row in rows))
        return
    files = Files(options.kind, options.name, options.origin, options.include)
    home = "assets/tokenizer" if options.kind == "tokenizer" else "data"
    out = options.out or Path(home, (files.repo if "/" in options.name else options.name).rpartition("/")[2])
    total = f"{sum(files.sizes.values()):,} bytes of {files.repo} in {out} (files: {len(files.sizes)})"
    if options.dry_run:
        rows = [f"{size:>18,}  {name}" for name, size in files.sizes.items()]
        print(printable("\n".join([*rows, f"Not downloaded: {total}."])))
        return
    files.fetch(out)
    if options.kind == "tokenizer":
        path = out / next(iter(files.sizes))
        job = tokenizer_tables(path, load_tokenizer(path).vocab_size)
    else:
        path = shown(f"{out}/**/*{files.ending}")
        job = f'[dataset]\nsource = "{ENDINGS["data"][files.ending]}"\npath = {path}'
    print(printable(f"{total}. A job that uses them needs\n\n{job}"))

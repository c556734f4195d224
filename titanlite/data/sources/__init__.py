"""Where documents come from: local files, tables, Hugging Face `datasets`, prepared shards.

`open_source` makes the source that a table of the job file names.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.schema import DataSource, TextSource
from titanlite.data.sources.base import Source
from titanlite.data.sources.files import COMPRESSED, CompressedLines, FileSpans, Parquet, open_datasets, stdlib_files
from titanlite.data.sources.shards import Shards

_KINDS = {".txt": "text", **dict.fromkeys((".jsonl", ".json", *COMPRESSED), "jsonl"), ".parquet": "parquet"}
# What is in a folder that a source reads: of `titanlite prepare`, and of datasets' save_to_disk.
_FOLDERS = {"shards": ("manifest.json",), "arrow": ("dataset_info.json", "dataset_dict.json")}


_READERS: dict[str, Callable[[TextSource, list[Path]], Source]] = {
    **dict.fromkeys(("python_stdlib", "text", "jsonl"), FileSpans),
    **dict.fromkeys(("huggingface", "c4", "arrow"), open_datasets),
    **{"parquet": Parquet, "shards": Shards},
}


def open_source(spec: TextSource) -> Source:
    """The source that a table names.

    Raises:
        UserError: a file is missing, the source is empty, or cannot be opened.
    """
    files = find_files(spec)
    packed = spec.source == "jsonl" and any(file.suffix in COMPRESSED for file in files)
    source = CompressedLines(spec, files) if packed else _READERS[spec.source](spec, files)
    if not source.num_units:
        raise UserError(f"{source.name} is empty: it holds no document")
    return source


def source_of_file(file: Path, column: str) -> DataSource:
    """The table for a file that the option --data of a command names. Raises UserError: its ending is unknown."""
    if file.suffix.lower() not in _KINDS:
        raise UserError(f"--data {file}: the name of a file must end in {', '.join(_KINDS)}.")
    keys = {"source": _KINDS[file.suffix.lower()], "path": str(file), "text_column": column}
    return DataSource.model_validate(keys)


def find_files(spec: TextSource) -> list[Path]:
    """The files of a source in a stable order; none for what `datasets` loads. Opens none of them, so that the checks
    before a run can call it.

    Raises:
        UserError: the path is missing, or matches no readable file.
    """
    if spec.source == "python_stdlib":
        return stdlib_files()
    if spec.source == "c4":
        return []
    if spec.path is None:
        raise UserError(f"dataset.path is missing: dataset.source = {spec.source!r} needs one")
    if spec.source == "huggingface":
        return []
    path = Path(spec.path)
    # Files of a folder that is read as a whole. Otherwise, a name that holds glob characters is still a name.
    names = [str(path / name) for name in _FOLDERS.get(spec.source, ())]
    names = names or ([spec.path] if path.is_file() else sorted(glob.glob(spec.path, recursive=True)))
    if not (files := [Path(name) for name in names if os.path.isfile(name)]):
        wanted = f"{' or '.join(names)} is not there" if spec.source in _FOLDERS else "a folder's files need a glob"
        raise UserError(f"dataset.path = {spec.path!r} matches no file ({wanted}; current folder: {Path.cwd()})")
    if spec.source == "text" and any(file.suffix in COMPRESSED for file in files):
        raise UserError(f'dataset.path = {spec.path!r}: source "text" reads plain files only; decompress them')
    return files

"""Where documents come from: local files, tables, Hugging Face `datasets`, prepared shards.

`open_source` makes the source that a table of the job file names.
"""

from __future__ import annotations

import glob
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.schema import DataSource, TextSource
from titanlite.data.sources.base import Source
from titanlite.data.sources.files import COMPRESSED, CompressedLines, JsonLines, open_stdlib, open_text, stdlib_files
from titanlite.data.sources.shards import Shards
from titanlite.data.sources.tables import Parquet, open_datasets

_KINDS = {".txt": "text", **dict.fromkeys((".jsonl", ".json", *COMPRESSED), "jsonl"), ".parquet": "parquet"}
# What is in a folder that a source reads, and what makes such folders.
_FOLDERS = {
    "shards": (("manifest.json",), "titanlite prepare"),
    "arrow": (("dataset_info.json", "dataset_dict.json"), "datasets' save_to_disk"),
}


def open_source(spec: TextSource) -> Source:
    """The source that a table names.

    Raises:
        UserError: a file is missing, the source is empty, or cannot be opened.
    """
    name, column = spec.source if spec.path is None else f"{spec.source} {spec.path}", spec.text_column
    files = find_files(spec)
    match spec.source:
        case "huggingface" | "c4" | "arrow":
            return open_datasets(name, spec)
        case "shards":
            return Shards(name, files[0].parent)
        case "python_stdlib":
            return open_stdlib(name, files)
        case "text":
            return open_text(name, files)
        case "parquet":
            return Parquet(name, files, column)
        case "jsonl":
            compressed = any(file.suffix in COMPRESSED for file in files)
            return CompressedLines(name, files, column) if compressed else JsonLines(name, files, column)


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
    if spec.source in _FOLDERS:
        marks, maker = _FOLDERS[spec.source]
        if not (files := [path / mark for mark in marks if (path / mark).is_file()]):
            missing = " or ".join(marks)
            raise UserError(f"dataset.path = {spec.path!r} is not a folder made by {maker}: no {missing} in it")
        return files
    # A name that holds glob characters is still a name.
    files = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(spec.path, recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        found = "is a folder; name files, for example with a glob" if path.is_dir() else "matches no file"
        raise UserError(f"dataset.path = {spec.path!r} {found} (current folder: {Path.cwd()})")
    packed = [file for file in files if file.suffix in COMPRESSED]
    if packed and spec.source == "text":
        raise UserError(f'{packed[0]}: source "text" reads plain files only; decompress them, or use "jsonl"')
    return files

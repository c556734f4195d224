"""Tokenizers and data from a Hugging Face hub, a mirror of it, or a folder: what `titanlite get` brings.

Invariant: a file appears under its name when it is whole. So the same command goes on where one ended early, and files
that are there are not fetched again.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import make_folder
from titanlite.config.mistakes import short
from titanlite.data.tokenizer import CONFIG
from titanlite.runtime.logging import note

ENDINGS = {
    "tokenizer": {"tokenizer.json": "", "tokenizer.model": ""},
    "model": {".safetensors": ""},
    "data": {".parquet": "parquet", ".jsonl": "jsonl", ".gz": "jsonl", ".zst": "jsonl", ".txt": "text"},
}
"""What the name of a file ends in, the best first, and the dataset.source that reads it."""


_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.model)")  # and no file


@cache
def known() -> dict[str, dict[str, Any]]:
    """What has a name here, such as "tokenizer gpt2" or "data c4"; hub.toml explains its values."""
    kinds = tomli.loads(Path(__file__).with_name("hub.toml").read_text(encoding="utf-8"))
    return {f"{kind} {name}": row for kind, rows in kinds.items() for name, row in rows.items()}


def remedy(kind: str, path: str, rows: int = 0) -> str:
    """The command that gets what a job names by `path`, if it has a name here; of a tokenizer also if it is OWNER/NAME,
    or one of so many ids has a name. Otherwise empty."""
    found = [asked for part in Path(path).parts if (asked := f"{kind} {part}") in known()]
    if kind == "tokenizer" and not found:
        fits = [name for name, row in known().items() if row.get("tokens") == rows]
        found = [f"tokenizer {path}"] if _REPOSITORY.fullmatch(path) else fits
    part = known().get(found[0], {}).get("part") if found else None
    return f"; `titanlite get {found[0]}` downloads it{f', and {part}' if part else ''}" if found else ""


class Files:
    """Files of a tokenizer, or of data.

    Args:
        name: that of hub.toml, or OWNER/NAME: a repository of the hub.
        origin: None: the hub, or the mirror that HF_ENDPOINT names. Otherwise the URL of a mirror, or a folder.
        include: pattern of their paths; None: that of hub.toml, or what titanlite can read.

    Attributes:
        sizes: path -> bytes.
        ending: the key of `ENDINGS`.

    Raises:
        UserError: no such name, files or folder, or the hub cannot be reached or refuses.
    """

    def __init__(self, kind: str, name: str, origin: str | None, include: str | None) -> None:
        row = _row(f"{kind} {name}")
        self._kind, self.repo, self._origin, there = kind, row["repo"], origin, dict[str, int]()
        self._folder = None if origin is None or re.match("https?://", origin) else Path(origin)
        self._place: dict[str, Any] = {"repo_type": "dataset" if kind == "data" else "model"}
        if self._folder is None:
            with self._answered():
                from huggingface_hub import HfApi
                from huggingface_hub.hf_api import RepoFile

                api = HfApi(endpoint=origin)
                self._place["revision"] = api.repo_info(self.repo, **self._place).sha
                tree = api.list_repo_tree(self.repo, recursive=True, **self._place)
                there = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
        elif origin and self._folder.is_dir():
            files = [path for path in self._folder.rglob("*.*") if path.is_file()]  # a folder can be called x.parquet
            there = {str(path.relative_to(self._folder)): path.stat().st_size for path in files}
        else:
            raise UserError(f"--from {origin}: is no URL, and there is no such folder.")
        pattern, ends = include or row.get("files", "*"), ENDINGS[kind]
        names = sorted(matching(there, pattern), key=lambda name: (name.count("/"), name))
        self.ending = next((end for end in ends if any(name.endswith(end) for name in names)), "")
        if not self.ending:
            other = ' With source = "huggingface", `datasets` reads other kinds.' if kind == "data" else ""
            found = f"has nothing that matches {pattern} and ends in {', '.join(ends)}"
            raise UserError(f"{self.repo} {found}; there: {short(', '.join(there)) or 'no file'}.{other}")
        names = [name for name in names if name.endswith(self.ending)]
        if kind == "tokenizer":  # the one at the top, and what says which of its tokens begin and end a document
            names = [name for name in (names[0], names[0].replace(self.ending, CONFIG)) if name in there]
        elif kind == "model":  # those that say what it is come last: then all of it is there
            says = "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", CONFIG, "config.json"
            names = [name for name in names if "/" not in name] + [name for name in says if name in there]
        elif pattern == "*":
            names = [name for name in names if "train" in name] or names
        self.sizes = {name: there[name] for name in names}

    def fetch(self, out: Path, names: Sequence[str] = ()) -> None:
        """Bring those that are not in `out` yet, of all or of these `names`. Raises UserError: the folder cannot be
        written, or the hub cannot be reached or refuses."""
        make_folder(out)
        with self._answered():
            for name, size in [(name, self.sizes[name]) for name in names or self.sizes]:
                if (out / name).is_file() and (out / name).stat().st_size == size:
                    continue
                note(f"{name} ({size:,} bytes)")  # a terminal gets a bar, too
                if self._folder is None:  # in this thread, so that Ctrl-C ends it at once
                    from huggingface_hub import hf_hub_download

                    hf_hub_download(self.repo, name, local_dir=out, endpoint=self._origin, **self._place)
                else:
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self._folder / name, unfinished := (out / name).with_suffix(".unfinished"))
                    os.replace(unfinished, out / name)

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Raises UserError: what a hub refuses, with what to do about it."""
        from huggingface_hub import constants
        from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError

        hub = (self._origin or constants.ENDPOINT).rstrip("/")
        page = f"{hub}/{'datasets/' if self._kind == 'data' else ''}{self.repo}"
        token = f"make a token on {hub}/settings/tokens, and give it by `hf auth login` or the variable HF_TOKEN"
        try:
            with warnings.catch_warnings(action="ignore"):  # of a full disk, which is answered below
                yield
        except GatedRepoError:
            raise UserError(f"{self.repo} is for those who accept its licence: do so on {page}, {token}.") from None
        except RepositoryNotFoundError:
            raise UserError(f"{page} is not there, or it is private: then {token}.") from None
        except Exception as error:  # each version of the library has errors of its own, and its HTTP client others
            why = short(one_line(str(error.__cause__ or error) or repr(error)))
            if "No space left" in why:
                raise UserError(f"{self.repo}: {why}. Free some space, or name another folder by --out.") from None
            mirror = "HF_ENDPOINT" if self._kind == "model" else "--from URL"
            ways = f"name a mirror by {mirror}, or a folder with a copy of it by --from FOLDER"
            raise UserError(f"{page} cannot be had: {why.rstrip('.')}. Start this again, {ways}.") from None


def _row(asked: str) -> dict[str, Any]:
    """What is known of "KIND NAME". Raises UserError: nothing."""
    kind, name = asked.split(" ", 1)
    name = re.sub("^https?://[^/]+/(datasets/)?|/(tree|blob)/.*", "", name)  # the address of its page
    if asked in known() or _REPOSITORY.fullmatch(name):
        return known().get(asked, {"repo": name})
    near = difflib.get_close_matches(name.lower(), [each.split()[1] for each in known()], n=1)
    near = [f"did you mean `titanlite get {each}`?" for each in known() if each.split()[1] in near]
    there = f"there are {', '.join(each.split()[1] for each in known() if each.startswith(kind))}."
    raise UserError(f"titanlite get {asked}: unknown; {(near or [there])[0]} OWNER/NAME is any repository of the hub.")

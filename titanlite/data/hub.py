"""Downloading tokenizers, data and models from the Hugging Face Hub, a mirror, or a local folder.

Invariant: A file gets its final name only after its size and checksum were compared with the values
that the Hub lists. Existing files are never overwritten: identical files are kept, and a different
file of the same name makes the download fail. An interrupted download resumes with the first
missing file. Nothing is written outside of the output folder, and nothing is read beyond the stated
size of a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import filter as filter_names
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import tomli
from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, RootModel, ValidationError

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import make_folder
from titanlite.config.mistakes import explain_error, shorten
from titanlite.data.tokenizer import TOKENIZER_CONFIG
from titanlite.runtime.logging import note

SOURCE_OF_SUFFIX = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".gz": "jsonl",
    ".zst": "jsonl",
    ".txt": "text",
}
"""The dataset.source that reads files with a suffix, in order of preference."""

# File suffixes that titanlite can read, for each kind of download, in order of preference.
_SUFFIXES = {
    "tokenizer": ("tokenizer.json", "tokenizer.model"),
    "model": (".safetensors",),
    "data": tuple(SOURCE_OF_SUFFIX),
}
_MODEL_FILES = (  # in download order: a folder that contains config.json is complete
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_CONFIG,
    "config.json",
)
_MAX_PAGES = 1000  # limit for listing a repository; the Hub lists 1,000 files per page
_REMEDY = (
    "Run the command again, set a mirror with HF_ENDPOINT, or use a local copy with --from FOLDER."
)
# OWNER/NAME, but not the path of a tokenizer file
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.model)")


@cache
def load_presets() -> dict[str, dict[str, dict[str, Any]]]:
    """Load the table of well-known tokenizers and datasets from hub.toml.

    Returns:
        For each kind ("tokenizer" and "data"), the entries keyed by name, such as "gpt2".
    """
    return tomli.loads(Path(__file__).with_name("hub.toml").read_text(encoding="utf-8"))


def propose_download(kind: str, path: str, vocab_size: int = 0) -> str:
    """Return the end of an error message, with a command that downloads a tokenizer or data.

    For example, return "; `titanlite get data tinystories` downloads tinystories and prints the job
    keys to set". For some large datasets, also name an option that downloads only a part, such as
    "fineweb-edu-10bt (only 2 GB with --include 'sample/10BT/000*')".

    Args:
        kind: "tokenizer" or "data".
        path: Path of the missing file in the job, such as "data/c4/*.jsonl".
        vocab_size: Vocabulary size of the model. If `path` contains no known name, a tokenizer of
            this size is proposed.

    Returns:
        The end of the message, or "" if no command is known.
    """
    name = _choose_download(kind, path, vocab_size)
    if not name:
        return ""

    part = ""
    preset = load_presets()[kind].get(name, {})
    if "part_option" in preset:
        part = f" (only {preset['part_size']} with {preset['part_option']})"
    return f"; `titanlite get {kind} {name}` downloads {name}{part} and prints the job keys to set"


def _choose_download(kind: str, path: str, vocab_size: int) -> str:
    """Return the name with which `titanlite get` downloads a missing file.

    For example, the path "data/c4/*.jsonl" gives "c4". Return "" if no name is known.

    Args:
        kind: "tokenizer" or "data".
        path: Path of the missing file in the job, or OWNER/NAME of a tokenizer.
        vocab_size: Vocabulary size of the model. If `path` contains no known name, choose a known
            tokenizer of this size.
    """
    # A folder with a known name.
    presets = load_presets()[kind]
    for folder in Path(path).parts:
        if folder in presets:
            return folder
    if kind != "tokenizer":
        return ""

    # The OWNER/NAME of a repository.
    if _REPOSITORY.fullmatch(path):
        return path

    # A known tokenizer of the right size.
    for name, preset in presets.items():
        if preset["vocab_size"] == vocab_size:
            return name
    return ""


class LfsPointer(BaseModel, strict=True, frozen=True):
    """Metadata of a file that the Hub stores in Git LFS (Large File Storage)."""

    oid: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the content."""


def _check_path(path: str) -> str:
    """Check that a path in a repository cannot lead out of the output folder, and return it.

    Raises:
        ValueError: If the path is absolute, or contains ".." or an empty name.
    """
    if {"", ".", ".."} & {*path.split("/")} or "\0" in path:
        raise ValueError("must be a path within a folder")
    return path


class TreeEntry(BaseModel, strict=True, frozen=True):
    """A file or folder of a repository, as the API of the Hugging Face Hub lists it."""

    type: str
    path: Annotated[str, AfterValidator(_check_path)]
    size: NonNegativeInt = 0
    """Size of the file in bytes."""
    oid: str = ""
    """Git hash of the content. If the file is in Git LFS, hash of the pointer instead."""
    lfs: LfsPointer | None = None

    @property
    def checksum(self) -> str:
        """Checksum of the file in hexadecimal, or "" if the Hub does not report one.

        Files in Git LFS have a SHA-256 checksum. Other files have the SHA-1 of their Git blob.
        """
        if self.lfs is not None:
            return self.lfs.oid
        return self.oid if re.fullmatch("[0-9a-f]{40}", self.oid) else ""

    def matches(self, path: Path) -> bool:
        """Return whether a local file has the size and the checksum of this entry.

        If the Hub does not report a checksum, compare only the size.
        """
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        if not self.checksum:
            return True

        digest = hashlib.sha256() if self.lfs else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest() == self.checksum


class _FileList(RootModel[list[TreeEntry]]):
    """One page of a list of files from the Hub API."""


class HubFiles:
    """Lists and downloads the files of a tokenizer, a dataset or a model in a repository.

    Only files that titanlite can read are selected, such as .parquet files of a dataset.

    Attributes:
        repo: OWNER/NAME of the repository.
        sizes: Size of each file in bytes, by its path in the repository.
        suffix: Suffix of the files, such as ".parquet". Models and tokenizers can also have files
            with other suffixes.
    """

    def __init__(self, kind: str, name: str, origin: str | None, include: str | None) -> None:
        """List the files of a repository, and select the files to download.

        Args:
            kind: "tokenizer", "data" or "model".
            name: A name in hub.toml, or the OWNER/NAME or page URL of a repository on the Hub.
            origin: URL of a mirror, or a local folder with a copy of the repository. Default: the
                Hub, or the mirror in HF_ENDPOINT.
            include: Pattern that paths must match. Default: the pattern in hub.toml, or all files
                that titanlite can read.

        Raises:
            UserError: If the name, file or folder does not exist, or if the Hub cannot be reached,
                denies access or returns a malformed list.
        """
        preset = _find_preset(kind, name)
        self.repo = preset["repo"]
        self._kind = kind
        self._origin = origin
        self._folder = None if origin is None or re.match("https?://", origin) else Path(origin)
        # Arguments with which huggingface_hub finds the repository. `_list_hub` adds "revision".
        repo_type = "dataset" if kind == "data" else "model"
        self._repo_options: dict[str, Any] = {"repo_type": repo_type}

        entries = self._list_hub() if self._folder is None else _list_folder(self._folder)
        pattern = include or preset.get("files", "*")
        # Topmost files first.
        matching = sorted(filter_names(entries, pattern), key=lambda name: (name.count("/"), name))
        self.suffix = _choose_suffix(kind, matching)
        if not self.suffix:
            raise UserError(f"{self.repo} {_explain_no_match(kind, pattern, entries)}")

        names = [name for name in matching if name.endswith(self.suffix)]
        if kind == "tokenizer":  # the topmost file, and the file with its BOS and EOS tokens
            names = names[:1]
            config = names[0].replace(self.suffix, TOKENIZER_CONFIG)
            if config in entries:
                names.append(config)
        elif kind == "model":  # the weights in the root folder, and the other files of the model
            names = [name for name in names if "/" not in name]
            names += [name for name in _MODEL_FILES if name in entries]
        elif pattern == "*":  # for a dataset, prefer the files of the training split
            names = [name for name in names if "train" in name] or names
        self._entries = {name: entries[name] for name in names}
        self.sizes = {name: entry.size for name, entry in self._entries.items()}

    def fetch(self, out: Path, names: Sequence[str] = ()) -> None:
        """Download all files that `out` does not contain yet, and verify their checksums.

        Args:
            out: Output folder, which is created if necessary.
            names: Paths in the repository of the files to download. Default: all selected files.

        Raises:
            UserError: If `out` cannot be written or contains a different file of the same name, the
                Hub cannot be reached or denies access, or a file does not match its checksum.
        """
        make_folder(out)
        with (
            self._convert_errors(),
            tempfile.TemporaryDirectory(prefix=".titanlite-get-", dir=out) as unfinished,
        ):
            for name in names or self._entries:
                self._fetch_file(self._entries[name], out / name, Path(unfinished))

    def _fetch_file(self, entry: TreeEntry, target: Path, unfinished: Path) -> None:
        """Download one file unless it exists, verify it, and move it to its final path.

        With a local copy of the repository, copy the file instead.

        Args:
            entry: The file in the repository.
            target: Final path of the file.
            unfinished: Temporary folder for the download.

        Raises:
            UserError: If `target` is a different file, the download fails, or the downloaded file
                does not match its checksum.
        """
        if entry.matches(target):
            return
        if os.path.lexists(target):
            choice = "" if self._kind == "model" else ", or choose another folder with --out"
            raise UserError(
                f"{target} differs from {entry.path} in {self.repo}. Move it away{choice}."
            )

        note(f"{entry.path} ({entry.size:,} bytes)")
        if self._folder is not None:
            path = Path(shutil.copyfile(self._folder / entry.path, unfinished / "file"))
        else:
            path = self._download(entry, unfinished)

        if not entry.matches(path):
            raise UserError(
                f"{self.repo}: {entry.path} does not have the size ({entry.size:,} bytes) and "
                f"checksum that the Hub lists, and was discarded. {_REMEDY}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, target)

    def _list_hub(self) -> dict[str, TreeEntry]:
        """Return the files of the newest revision of the repository on the Hub, keyed by path.

        Raises:
            UserError: If the Hub cannot be reached, denies access or returns a malformed list.
        """
        with self._convert_errors():
            from huggingface_hub import HfApi

            api = HfApi(endpoint=self._origin)
            revision = api.repo_info(self.repo, **self._repo_options).sha or "main"
            self._repo_options["revision"] = revision  # for the downloads
            repo_type = self._repo_options["repo_type"]
            url = f"{api.endpoint}/api/{repo_type}s/{self.repo}/tree/{revision}"
            entries = self._read_pages(url)
            return {entry.path: entry for entry in entries if entry.type == "file"}

    def _read_pages(self, url: str) -> Iterator[TreeEntry]:
        """Request a list of files from the Hub page by page, and yield the entries.

        Args:
            url: URL of the list, without a query.

        Raises:
            UserError: If a page is malformed, or the list does not end.
        """
        query = "recursive=true"
        previous_queries: set[str] = set()
        while query:
            # Stop if a link leads back to an earlier page.
            if query in previous_queries or len(previous_queries) == _MAX_PAGES:
                raise UserError(f"{url}: the list of files does not end. {_REMEDY}")
            previous_queries.add(query)
            entries, query = _request_page(url, query)
            yield from entries

    def _download(self, entry: TreeEntry, folder: Path) -> Path:
        """Download a file into `folder`, and return its path.

        Raises:
            UserError: If the file is longer than the size that the Hub lists.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import tqdm

        max_bytes = entry.size
        too_long = f"{self.repo}: {entry.path} is longer than {max_bytes:,} bytes. {_REMEDY}"

        # The library cannot limit the size of a download. However, it reports the received bytes to
        # a progress bar, and an exception in the progress bar ends the download.
        class LimitedBar(tqdm):
            """A progress bar that stops the download when the file exceeds its listed size."""

            received = 0

            def update(self, n: float | None = 1) -> bool | None:
                self.received += n or 0
                if self.received > max_bytes:
                    raise UserError(too_long)
                return super().update(n)

        # Download in this thread, so that Ctrl-C ends the download immediately.
        path = hf_hub_download(
            self.repo,
            entry.path,
            local_dir=folder,
            endpoint=self._origin,
            tqdm_class=LimitedBar,
            **self._repo_options,
        )

        if not entry.checksum:
            note(f"{entry.path}: the Hub lists no checksum, so only the size was verified.")
        return Path(path)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert huggingface_hub exceptions in a `with` block to `UserError` with a remedy."""
        try:
            with warnings.catch_warnings(action="ignore"):  # a full disk is reported below
                yield
        except UserError:
            raise
        except Exception as error:  # the client and its HTTP library have a dozen exception types
            raise UserError(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        """Return an error message with the cause of a huggingface_hub exception and remedies."""
        from huggingface_hub import constants
        from huggingface_hub.errors import RepositoryNotFoundError

        cause = shorten(describe_cause(error)).rstrip(".")
        if "No space left" in cause:
            choice = "" if self._kind == "model" else ", or choose another folder with --out"
            return f"{self.repo}: {cause}. Free some space{choice}."

        hub = (self._origin or constants.ENDPOINT).rstrip("/")
        page_path = f"datasets/{self.repo}" if self._kind == "data" else self.repo
        problem = f"{hub}/{page_path} cannot be downloaded: {cause}."

        # huggingface_hub also raises this error for gated and private repositories.
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{problem} Check that the page exists. If it is gated or private, accept its "
                f"license there, then create a token on {hub}/settings/tokens and pass it with "
                "`hf auth login` or HF_TOKEN."
            )
        return f"{problem} {_REMEDY}"


def describe_cause(error: Exception) -> str:
    """Return the message of the exception that caused `error`, or of `error` itself, as one line.

    If that message is empty, return the repr of `error`.
    """
    cause = error.__cause__ or error
    return one_line(str(cause) or repr(error))


def _request_page(url: str, query: str) -> tuple[list[TreeEntry], str]:
    """Request one page of a list of files from the Hub.

    Args:
        url: URL of the list, without a query.
        query: Query string that selects the page, such as "recursive=true".

    Returns:
        The entries of the page, and the query string of the next page ("" after the last page).

    Raises:
        UserError: If the page is malformed.
    """
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    response = http_backoff("GET", f"{url}?{query}", headers=build_hf_headers())
    hf_raise_for_status(response)
    try:
        entries = _FileList.model_validate_json(response.content).root
    except ValidationError as failure:
        cause = shorten(explain_error(_FileList, failure))
        raise UserError(f"{url}: the list of files is malformed: {cause}. {_REMEDY}") from None

    # Use only the query of the next link, so that it cannot lead to another host.
    next_link = response.links.get("next", {}).get("url", "")
    return entries, urlsplit(next_link).query


def _choose_suffix(kind: str, names: Sequence[str]) -> str:
    """Choose which files of a repository to download, by their suffix.

    Args:
        kind: "tokenizer", "data" or "model", which determines the supported suffixes.
        names: Paths of the files to choose from.

    Returns:
        The preferred suffix that any file has, for example ".parquet" rather than ".jsonl". Empty
        if no file has a supported suffix.
    """
    for suffix in _SUFFIXES[kind]:
        if any(name.endswith(suffix) for name in names):
            return suffix
    return ""


def _explain_no_match(kind: str, pattern: str, names: Iterable[str]) -> str:
    """Return an error message, to append to the name of a repository without suitable files.

    For example, "has no file that matches * and ends with .safetensors. It has README.md."

    Args:
        kind: "tokenizer", "data" or "model", which determines the supported suffixes.
        pattern: Glob pattern that the paths had to match.
        names: Paths of all files in the repository.
    """
    suffixes = ", ".join(_SUFFIXES[kind])
    existing = shorten(", ".join(names)) or "no files"
    problem = f"has no file that matches {pattern} and ends with {suffixes}. It has {existing}."
    if kind == "data":
        return f'{problem} With source = "huggingface", `datasets` can read other formats.'
    return problem


def _list_folder(folder: Path) -> dict[str, TreeEntry]:
    """Return the files in a local copy of a repository, keyed by their path relative to `folder`.

    Files without a suffix are skipped.

    Raises:
        UserError: If `folder` is not a folder.
    """
    if not folder.is_dir():
        raise UserError(f"--from {folder}: is neither a folder nor a URL.")

    entries = {}
    for path in folder.rglob("*.*"):
        if path.is_file():  # a folder can be called x.parquet
            name = str(path.relative_to(folder))
            entries[name] = TreeEntry(type="file", path=name, size=path.stat().st_size)
    return entries


def _find_preset(kind: str, name: str) -> Mapping[str, Any]:
    """Find the Hub repository of a tokenizer, dataset or model.

    Args:
        kind: "tokenizer", "data" or "model".
        name: Well-known name in hub.toml, OWNER/NAME of a repository, or the URL of its page.

    Returns:
        The entry of `name` in hub.toml, or {"repo": "OWNER/NAME"} if it has none.

    Raises:
        UserError: If `name` has none of these forms. The message lists the known names, if any.
    """
    presets = load_presets().get(kind, {})  # there are none for models
    if name in presets:
        return presets[name]

    # Reduce a URL such as https://huggingface.co/datasets/OWNER/NAME/tree/main to OWNER/NAME.
    path = re.sub("^https?://[^/]+/(datasets/)?", "", name)
    repo = re.sub("/(tree|blob)/.*", "", path)
    if _REPOSITORY.fullmatch(repo):
        return {"repo": repo}

    if not presets:
        raise UserError(
            f"{name} is not a folder, nor OWNER/NAME of a {kind} on the Hugging Face Hub."
        )
    raise UserError(
        f"titanlite get {kind} {name}: unknown name. Known names are {', '.join(presets)}. You can "
        "also pass the OWNER/NAME of any repository on the Hub."
    )

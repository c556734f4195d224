"""The mirror of a run's checkpoints: a copy of each at a URL, made while training goes on, from which another machine
can go on.

Invariant: a step there has a manifest only while all of its files are there and whole. The manifest is written last and
removed first. Training waits for a copy only when the run ends. One that fails costs nothing but itself. What belongs
to another run is never overwritten.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from hashlib import file_digest, md5
from pathlib import Path, PurePath
from typing import Any, TypeVar

import xxhash

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST, STEP_FOLDER
from titanlite.config.storage import PARALLEL, RemotePath, answered, checkpoints, fetch, listing, opened
from titanlite.runtime.logging import Event

_PAUSES = (1, 4, 16, 60, None)  # seconds between two tries of a copy
_BLOCK = 1 << 24  # bytes of a part of an object, of which S3 takes 10,000
_SLICE = 5  # seconds that ranks wait for the first one at a time

T = TypeVar("T")


def _run_of(path: Path) -> str | None:
    """Which run has saved a checkpoint; None where its manifest does not say it."""
    with contextlib.suppress(Damage):
        return step_folders.read_manifest(path)["info"]["train_state"].get("run")


class Mirror:
    """All ranks create one. They call together what is so marked. Rank 0 alone calls the rest.

    Args:
        compare: `Resumer.compare`: raises UserError if the job cannot go on from the checkpoint with this manifest.

    Attributes:
        sending: the checkpoint whose copy is under way.
        failed: names of those whose copy has failed since this start.
    """

    def __init__(self, folder: CheckpointFolder, compare: Callable[[PurePath, dict[str, Any]], None]) -> None:
        self._folder, self._config, self._ranks, self._log = folder, folder.config, folder.ranks, folder.log
        self._url, self._compare = str(folder.config.mirror).rstrip("/"), compare
        with answered(self._url):
            self._storage, self._root = opened(self._url)
        self.sending: Path | None = None
        self.failed, self._done = set[str](), set[str]()
        self._there: dict[str, Any] = {}  # the files at the mirror
        self._manifests: dict[str, dict[str, Any]] = {}  # of the complete checkpoints at the mirror, by name
        self._thread, self._last = ThreadPoolExecutor(1, "mirror"), Future[None]()
        self._lock, self._free, self._ending = threading.Lock(), 0.0, threading.Event()

    def restore(self) -> None:
        """All ranks: bring the newest good checkpoint into the folder if it is newer than what is there; with it the
        one of `load_step` and, with `keep_best`, the best one. Damaged ones are set aside there.

        Raises:
            UserError: the folder's checkpoints and those of the mirror are of different runs, or the job cannot go on
                from the mirror's.
            CheckpointError: the folder is empty and no checkpoint of the mirror is good, or it cannot be read.
        """
        self._ask(self._restore)

    def begin(self, step: int) -> None:
        """All ranks: the run goes on after `step`. What the mirror has of later steps is set aside, because they are
        written again. From now on the mirror is brought up to date."""

        def on_rank0() -> None:
            for later in [later for later in self._look() if later > step]:
                self._set_aside(step_folders.step_name(later), "superseded")
            self.wake()

        self._ask(on_rank0)

    def wake(self) -> None:
        """There may be a new checkpoint in the folder."""
        self._last = self._thread.submit(self._update)

    def finished(self, alive: Callable[[], None]) -> bool:
        """All ranks, at the end of a run: wait for the copy under way, for `timeout_seconds` at most, and call `alive`
        every few seconds. Whether the newest checkpoint is at the mirror."""
        deadline = time.monotonic() + self._config.timeout_seconds

        def look() -> bool | None:
            wait([self._last], min(_SLICE, self._config.timeout_seconds / 4))
            ends = self._last.done() or time.monotonic() > deadline
            return {self._name(path) for path in self._local()[-1:]} <= self._done if ends else None

        while (result := self._ask(look)) is None:
            alive()
        return result

    def close(self) -> None:
        """Leave the copy under way as it is. The next start makes it again."""
        self._ending.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------------------------------------- what is at the mirror

    def _ask(self, function: Callable[[], T]) -> T:
        """All ranks: what rank 0 gets from the storage. Raises CheckpointError: it refuses."""
        return self._ranks.on_rank0(answered(self._url, CheckpointError)(function))

    def _look(self, run: str | None = None) -> dict[int, str]:
        """The checkpoints at the mirror that a run resumes from: step -> name, by rising step. A damaged manifest is
        set aside. Raises UserError: they are of another run than `run`."""
        self._there, known = listing(self._storage, self._root), self._manifests
        names, self._manifests = checkpoints(self._there), {}
        for name in (*names, *checkpoints(self._there, "final/")):
            place = f"{self._root}/{name}/{MANIFEST}"
            try:
                manifest = known.get(name) or step_folders.parse_manifest(self._storage.cat_file(place), place)
            except Damage as damage:
                self._set_aside(name, "damaged", damage)
                continue
            if run and manifest["info"]["train_state"].get("run", run) != run:
                text = f"{self._url} holds checkpoints of another run than {self._folder.path}, such as {name}"
                raise UserError(f"{text}. Choose another checkpoint.mirror, or another job.dump_folder.")
            self._manifests[name] = manifest
        return {step_folders.step_of(Path(name)) or 0: name for name in names if name in self._manifests}

    def _restore(self) -> None:
        local = step_folders.list_checkpoints(self._folder.path)
        steps = self._look(next(filter(None, map(_run_of, reversed(local))), None))
        newest = max((step_folders.step_of(path) or 0 for path in local), default=-1)
        was = any(f"/{MANIFEST}" in path for path in self._there)
        brought = next((name for step, name in reversed(steps.items()) if step > newest and self._bring(name)), "")
        more = {steps.get(self._config.load_step, ""), self._best() if self._config.keep_best else ""} - {"", brought}
        brought = [name for name in more if not (self._folder.path / name).exists() and self._bring(name)] or brought
        if was and not (local or brought):
            raise CheckpointError(f"{self._url}: no checkpoint is good. Each has the manifest {MANIFEST}.damaged.")

    def _bring(self, name: str) -> bool:
        """Copy a checkpoint from the mirror; False if it is damaged, and set aside. Raises UserError before that: the
        job cannot go on from it."""
        self._compare(RemotePath(f"{self._url}/{name}"), self._manifests[name])
        started, unfinished = time.perf_counter(), self._folder.path / f"{step_folders.UNFINISHED}mirror"
        shutil.rmtree(unfinished, ignore_errors=True)
        names = (f"{name}/{file}" for file in (MANIFEST, *self._manifests[name]["files"]))
        files = {file: self._there[file]["size"] for file in names if file in self._there}
        (unfinished / name).mkdir(parents=True)
        fetch(self._storage, self._root, files, unfinished)
        try:
            step_folders.check_folder(unfinished / name)
        except Damage as damage:
            self._set_aside(name, "damaged", damage)
            return False
        for file in files:
            step_folders.flush(unfinished / file)
        step_folders.appear(unfinished / name, self._folder.path / name)
        unfinished.rmdir()
        self._log(f"brought {name} from {self._url} in {time.perf_counter() - started:.1f} s")
        return True

    def _best(self) -> str:
        """The name of what has the lowest validation loss, or ""."""
        losses = {name: step_folders.validation_loss(manifest) for name, manifest in self._manifests.items()}
        return min((name for name in losses if losses[name] < math.inf), key=losses.__getitem__, default="")

    def _set_aside(self, name: str, reason: str, why: object = "") -> None:
        """Rename a manifest, so that no reader takes its step for a checkpoint."""
        manifest = f"{self._root}/{name}/{MANIFEST}"
        self._storage.copy(manifest, f"{manifest}.{reason}")
        self._storage.rm_file(manifest)
        self._manifests.pop(name, None)
        self._log(f"{self._url}/{name} is {reason}: renamed its manifest to {MANIFEST}.{reason}. {why}".rstrip(". "))

    # -------------------------------------------------------------------------------------------------- in the thread

    def _local(self) -> list[Path]:
        """The complete checkpoints of the folder, and the weights in `final`, by rising step."""
        found = step_folders.list_checkpoints(self._folder.path, self._folder.path.parent / "final")
        return [path for path in found if (path / MANIFEST).is_file()]

    def _name(self, path: Path) -> str:
        return path.name if path.parent == self._folder.path else f"final/{path.name}"

    def _update(self) -> None:
        """Copy what the mirror lacks, the newest first."""
        tried = set(self._done)
        while left := [path for path in self._local() if self._name(path) not in tried]:
            tried.add(self._name(left[-1]))
            self.sending = left[-1].resolve()
            self._send(left[-1], self._name(left[-1]))
        self.sending = None

    def _send(self, path: Path, name: str) -> None:
        step, started, url = step_folders.step_of(path), time.perf_counter(), f"{self._url}/{name}"
        for pause in _PAUSES:
            try:
                with answered(url, CheckpointError):
                    if self._copy(path, name):
                        self._log(Event(f"copied {url} in {time.perf_counter() - started:.1f} s", "mirror", step))
                    self._done.add(name)
                    return self._purge()
            except UserError as error:
                if self._ending.is_set() or not (path / MANIFEST).is_file():
                    return  # the run ends, or the checkpoint was removed meanwhile
                if pause is None or not isinstance(error, CheckpointError) or self._ending.wait(pause):
                    if name not in self.failed:
                        self._log(Event(f"the copy of {name} FAILED ({error})", "failed mirror", step))
                    return self.failed.add(name)

    def _copy(self, path: Path, name: str) -> bool:
        """Make the mirror's copy of a checkpoint; False if it is there."""
        self._look(_run_of(path))
        raw, at = (path / MANIFEST).read_bytes(), f"{self._root}/{name}"
        files = step_folders.parse_manifest(raw, path / MANIFEST)["files"]
        if name in self._manifests:
            if self._storage.cat_file(f"{at}/{MANIFEST}") == raw:
                return False
            if path.parent == self._folder.path:  # what a run leaves in `final` it may write again
                raise UserError(f"{at} is another one: is the run started twice? Stop one, or name another mirror.")
            self._storage.rm_file(f"{at}/{MANIFEST}")
            del self._manifests[name]
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda file: self._copy_file(path / file, f"{at}/{file}", files[file]), files))
        self._storage.pipe_file(f"{at}/{MANIFEST}", raw)
        return True

    def _copy_file(self, path: Path, to: str, entry: step_folders.Entry) -> None:
        """Copy a file and look whether it has arrived. S3 tells the MD5 of each part; elsewhere it is read again."""
        sent, parts, back = xxhash.xxh3_128(), list[bytes](), None
        with step_folders.open_file(path) as file, self._storage.open(to, "wb", block_size=_BLOCK) as out:
            for block in iter(partial(file.read, _BLOCK), b""):
                self._throttle(len(block))
                sent.update(block)
                parts.append(md5(block, usedforsecurity=False).digest())
                out.write(block)
        info, whole = self._storage.info(to), md5(b"".join(parts), usedforsecurity=False).hexdigest()
        if (info.get("ETag") or "").strip('"') not in (f"{whole}-{len(parts)}", *(p.hex() for p in parts[:1])):
            with self._storage.open(to, "rb", block_size=_BLOCK) as file:
                back = file_digest(file, xxhash.xxh3_128)
        if info["size"] != entry["size"] or {entry["xxh3_128"]} != {x.hexdigest() for x in (sent, back) if x}:
            raise OSError(f"{path.name} is not there as it was saved")

    def _throttle(self, size: int) -> None:
        """Wait until so many bytes may be sent. Raises InterruptedError: the run ends first."""
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + size * 8e-6 / (self._config.mirror_mbps or math.inf)
        if self._ending.wait(max(0.0, begin - time.monotonic())):
            raise InterruptedError("the run has ended")

    def _purge(self) -> None:
        """Keep there what is kept in the folder, and remove what is left of a copy that was cut short."""
        steps, local = self._look(), {self._name(path) for path in self._local()}
        doomed = {steps[step] for step in step_folders.outdated([*steps], self._config)}
        doomed -= {self._best()} if self._config.keep_best else set()
        places = re.compile(f"((?:final/)?{STEP_FOLDER.pattern})/")  # deeper ones may be another run's
        begun = {place[1] for place in map(places.match, self._there) if place}
        described = {path.rpartition("/")[0] for path in self._there if f"/{MANIFEST}" in path}
        for name in doomed | (begun - described - local):
            if name in self._manifests:
                self._storage.rm_file(f"{self._root}/{name}/{MANIFEST}")
            self._storage.rm(f"{self._root}/{name}", recursive=True)

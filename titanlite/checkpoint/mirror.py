"""Copy the checkpoints of a run to a URL during training, so that it can resume on another node.

The URL (`checkpoint.mirror`) is called the mirror.

Invariant: A step on the mirror has a manifest only while all of its files are complete. The
manifest is written last and removed first. Training waits for a copy only at the end of the run. A
failed copy never stops training.

Only files of this run, which are listed in a manifest with its run ID, are overwritten, renamed or
removed. While a checkpoint is being copied or removed, its manifest is called
`manifest.json.incomplete`.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from hashlib import file_digest, md5
from pathlib import Path, PurePath
from typing import Any, TypeVar

import xxhash

from titanlite.checkpoint.manifest import (
    TMP_PREFIX,
    CheckpointContext,
    Entry,
    Manifest,
    belongs_to_run,
    check_checkpoint,
    get_run_id,
    get_step,
    get_validation_loss,
    holds_run_state,
    is_titanlite_manifest,
    list_checkpoints,
    open_file,
    parse_manifest,
    publish_folder,
    read_manifest,
    select_outdated,
    sync,
)
from titanlite.config.errors import CheckpointError, Damage, UserError, one_line
from titanlite.config.files import INCOMPLETE, MANIFEST
from titanlite.config.storage import (
    DISK_FULL,
    PARALLEL,
    RemotePath,
    download_files,
    find_checkpoints,
    list_files,
    open_storage,
    storage_errors,
)
from titanlite.runtime.logging import Event

_RETRY_PAUSES = (1, 4, 16, 60)
"""Seconds to wait after each failed attempt to copy a checkpoint."""
_BLOCK_SIZE = 1 << 24
"""Bytes per part of an uploaded object. S3 accepts up to 10,000 parts."""
_POLL_SECONDS = 5
"""Maximum time for which rank 0 waits for a copy before it reports to the other ranks."""

T = TypeVar("T")


class Mirror:
    """Copies the checkpoints of a run to a URL (the mirror) and downloads them at the next start.

    All ranks create a Mirror and call `restore`, `begin` and `wait_until_copied` together. Only
    rank 0 accesses the files on the mirror. It copies them in a background thread.

    Args:
        context: Checkpoint folder, options and ranks of the run.
        check_job: Given the path and the manifest of a checkpoint, raises UserError if the run
            cannot resume from it.

    Attributes:
        sending: Local path of the checkpoint that is being copied, or None.
        num_failed: Number of failures since the process started. A checkpoint that could not be
            copied counts only once.
    """

    def __init__(
        self, context: CheckpointContext, check_job: Callable[[PurePath, Manifest], None]
    ) -> None:
        self._context = context
        self._folder = context.folder
        self._config = context.config
        self._ranks = context.ranks
        self._log = context.log
        self._check_job = check_job
        self._url = str(context.config.mirror).rstrip("/")
        with storage_errors(self._url):
            self._storage, self._root = open_storage(self._url)

        self.sending: Path | None = None
        self.num_failed = 0
        self._failed = set[str]()  # names of the checkpoints that could not be copied
        self._copied = set[str]()  # names of the checkpoints known to be on the mirror
        # Set by `_update_listing`: all files on the mirror by path, and the manifests of complete
        # checkpoints by checkpoint name.
        self._files: dict[str, Any] = {}
        self._manifests: dict[str, Manifest] = {}
        # Contents of damaged manifests by checkpoint name, to check whether titanlite wrote them.
        self._damaged_manifests: dict[str, bytes] = {}

        self._thread = ThreadPoolExecutor(1, "mirror")
        # The copies that the last call of `start_copying` has started. Until the first call, this
        # is a placeholder that never completes.
        self._last_copies = Future[None]()
        self._is_ending = threading.Event()
        self._throttle_lock = threading.Lock()
        self._next_send_time = 0.0

    def restore(self) -> None:
        """Download from the mirror the checkpoints that the run needs but does not have locally.

        A run needs the newest checkpoint, the one from step `checkpoint.load_step` and, with
        `checkpoint.keep_best`, the best one. If a checkpoint is damaged, rename its manifest on the
        mirror. Call this on all ranks, before the run loads its checkpoint.

        Raises:
            UserError: If the mirror has checkpoints from a different run, or if the job cannot
                resume from them.
            CheckpointError: If the mirror cannot be read, or if it has checkpoints but no valid one
                and there is no local checkpoint.
        """
        self._run_on_rank0(self._restore)

    def begin(self, step: int) -> None:
        """Archive obsolete checkpoints on the mirror, then start copying checkpoints to it.

        Checkpoints of this run after `step` are obsolete, because the run will train these steps
        again. Call this on all ranks, once the run has loaded its checkpoint.

        Args:
            step: Step of the loaded checkpoint, or 0 if none was loaded.
        """

        def archive_and_start_copying() -> None:
            self._archive_after(step)
            self.start_copying()

        self._run_on_rank0(archive_and_start_copying)

    def _archive_after(self, step: int) -> None:
        """Archive the checkpoints of this run after `step` on the mirror. Readers then ignore them.

        Call this on rank 0.
        """
        run_id = self._find_run_id()
        self._update_listing()
        for mirrored_step, name in self._names_by_step().items():
            if mirrored_step > step and belongs_to_run(self._manifests[name], run_id):
                self._set_aside(name, "archived")

    def start_copying(self) -> None:
        """Start copying all checkpoints that are not yet on the mirror, in the background.

        Call this on rank 0 after each save.
        """
        self._last_copies = self._thread.submit(self._update)

    def wait_until_copied(self, report_alive: Callable[[], None]) -> bool:
        """Wait until all copies have ended, for at most `checkpoint.timeout_seconds`.

        Call this on all ranks at the end of the run.

        Args:
            report_alive: Called every few seconds during the wait, so that the watchdog does not
                report a hang.

        Returns:
            Whether the newest checkpoint is on the mirror, or there is no checkpoint.
        """
        deadline = time.monotonic() + self._config.timeout_seconds
        while True:
            # Only rank 0 copies, so it decides for all ranks whether to continue waiting.
            is_wait_over = self._run_on_rank0(lambda: self._wait_briefly(deadline))
            if is_wait_over:
                return self._run_on_rank0(self._is_newest_copied)
            report_alive()

    def _wait_briefly(self, deadline: float) -> bool:
        """Wait a few seconds for the copies. Return whether they have ended or timed out.

        Args:
            deadline: Value of `time.monotonic()` in seconds at which the copies time out.
        """
        # Meanwhile, the other ranks wait in a collective, which fails after `timeout_seconds`.
        wait([self._last_copies], min(_POLL_SECONDS, self._config.timeout_seconds / 4))
        return self._last_copies.done() or time.monotonic() > deadline

    def _is_newest_copied(self) -> bool:
        """Return whether the mirror has the newest local checkpoint.

        Also return True if there are no local checkpoints.
        """
        checkpoints = self._list_local()
        return not checkpoints or self._get_name(checkpoints[-1]) in self._copied

    def close(self) -> None:
        """Abort the copy in progress. When the run restarts, it copies this checkpoint again."""
        self._is_ending.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run_on_rank0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on all ranks.

        Raises:
            CheckpointError: On all ranks, if an access to the storage fails.
        """
        return self._ranks.run_on_rank0(storage_errors(self._url, CheckpointError)(function))

    # Files on the mirror and in the local folder

    def _update_listing(self) -> None:
        """List the files on the mirror and read the manifests of its checkpoints.

        Store the files in `_files` and the manifests in `_manifests`, except damaged ones.
        """
        self._files = list_files(self._storage, self._root)
        # Add the weights in `final` last. If losses are equal, `_find_best` prefers the first name.
        names = find_checkpoints(self._files) + find_checkpoints(self._files, "final/")
        manifests = {}
        for name in names:
            # A valid manifest never changes, so read it only once.
            manifest = self._manifests.get(name) or self._read_manifest(name)
            if manifest is not None:
                manifests[name] = manifest
        self._manifests = manifests

    def _read_manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a checkpoint on the mirror, or None if it is damaged.

        Log damage once. Store the damaged content in `_damaged_manifests`, so that
        `_has_checkpoints` can check whether titanlite wrote it. Do not rename the manifest, because
        another program may have written it.
        """
        path = f"{self._root}/{name}/{MANIFEST}"
        content = self._storage.cat_file(path)
        try:
            return parse_manifest(content, path)
        except Damage as damage:
            if name not in self._damaged_manifests:
                self._log(f"Ignoring {self._url}/{name}: {damage}")
            self._damaged_manifests[name] = content
            return None

    def _names_by_step(self) -> dict[int, str]:
        """Return the names of the checkpoints on the mirror by step, in ascending order.

        Omit the weights in the folder `final`, because a run cannot resume from them.
        """
        names = [name for name in self._manifests if not name.startswith("final/")]
        return {get_step(Path(name)): name for name in names}

    def _list_local(self) -> list[Path]:
        """Return the complete local checkpoints, including the weights in the folder `final`."""
        final = self._folder.parent / "final"
        paths = list_checkpoints(self._folder, final)
        return [path for path in paths if (path / MANIFEST).is_file()]

    def _get_name(self, path: Path) -> str:
        """Return the name for a local checkpoint on the mirror, such as "final/step-00000100"."""
        return path.name if path.parent == self._folder else f"final/{path.name}"

    def _get_path(self, name: str) -> Path:
        """Return the local path for the name of a checkpoint on the mirror. Inverts `_get_name`."""
        is_final = name.startswith("final/")
        return (self._folder.parent if is_final else self._folder) / name

    def _find_run_id(self) -> str | None:
        """Return the ID of the run that saved the local checkpoints, or None if it is unknown."""
        for path in reversed(self._list_local()):
            with suppress(Damage):
                run_id = get_run_id(read_manifest(path))
                if run_id is not None:
                    return run_id
        return None

    def _check_run(self, run_id: str | None) -> None:
        """Check that the mirror has no checkpoints from a different run.

        Args:
            run_id: ID of this run. If None, because it is not known yet, skip the check.

        Raises:
            UserError: If a checkpoint on the mirror has a different run ID.
        """
        if run_id is None:
            return
        for name, manifest in self._manifests.items():
            if get_run_id(manifest) not in (None, run_id):
                raise UserError(
                    f"{self._url} has checkpoints of another run than {self._folder}, such as "
                    f"{name}. Choose another checkpoint.mirror, or another job.dump_folder."
                )

    def _find_best(self) -> str | None:
        """Return the name of the checkpoint on the mirror with the lowest validation loss.

        Return None if no checkpoint has a validation loss.
        """
        lowest = math.inf
        best = None
        for name, manifest in self._manifests.items():
            loss = get_validation_loss(manifest)
            if loss < lowest:
                lowest = loss
                best = name
        return best

    # Restore

    def _restore(self) -> None:
        """Download the checkpoints that the run needs (see `restore`). Call this on rank 0."""
        self._update_listing()
        names = self._names_by_step()
        run_id = self._find_run_id()
        self._check_run(run_id)
        self._download_newest(names)
        self._download_selected(names)

        # Never start from scratch if the mirror has checkpoints, but all of them are unusable.
        # Weights in `final` are not enough to resume.
        if self._has_checkpoints() and not list_checkpoints(self._folder):
            raise CheckpointError(
                f"{self._url} has no valid checkpoint. Each has a damaged {MANIFEST}, or one that "
                f"was renamed to {MANIFEST}.damaged or {MANIFEST}.archived."
            )

    def _download_selected(self, names: dict[int, str]) -> None:
        """Download the checkpoints needed for `load_step` and `keep_best` if they are missing.

        Args:
            names: Names of the checkpoints on the mirror, by step.
        """
        selected = [names.get(self._config.load_step)]
        if self._config.keep_best:
            selected.append(self._find_best())

        for name in selected:
            # Checkpoints that turned out to be damaged are no longer in `_manifests`. An empty
            # local folder, which an interrupted removal may leave, does not count as a checkpoint.
            if name in self._manifests and not any(self._get_path(name).glob("*")):
                self._download(name)

    def _download_newest(self, names: dict[int, str]) -> None:
        """Download the newest valid checkpoint on the mirror if it is newer than all local ones.

        Args:
            names: Names of the checkpoints on the mirror by step, in ascending order.

        Raises:
            UserError: If the checkpoint contains imported weights, from which no run can resume.
        """
        local_steps = [get_step(path) for path in list_checkpoints(self._folder)]
        newest_local_step = max(local_steps, default=-1)
        newer_names = [name for step, name in names.items() if step > newest_local_step]
        for name in reversed(newer_names):
            if not holds_run_state(self._manifests[name]):
                url = f"{self._url}/{name}"
                raise UserError(
                    f"{url} contains imported weights, not a checkpoint of a run. "
                    "Choose another checkpoint.mirror. "
                    f'To start from it, set checkpoint.initial_load_path = "{url}".'
                )
            if self._download(name):
                return

    def _has_checkpoints(self) -> bool:
        """Return whether the mirror has any titanlite checkpoint, even a damaged or renamed one."""
        for path in self._files:
            name, _, file = path.rpartition("/")
            is_manifest = file.startswith(MANIFEST) and file != INCOMPLETE
            if not is_manifest:
                continue

            # Ignore damaged manifests that other programs wrote. The content is None if the
            # manifest is not damaged. An empty one counts, because it may be from titanlite.
            content = self._damaged_manifests.get(name)
            if not content or is_titanlite_manifest(content):
                return True
        return False

    def _download(self, name: str) -> bool:
        """Download a checkpoint, such as "step-00000100", to the local folder and verify it.

        If it is damaged, rename its manifest on the mirror.

        Returns:
            Whether the checkpoint is valid and now in the local folder.

        Raises:
            UserError: If the job cannot resume from the checkpoint. It is then not downloaded.
        """
        self._check_job(RemotePath(f"{self._url}/{name}"), self._manifests[name])

        # Download the files to a temporary folder and verify them.
        started = time.perf_counter()
        tmp_folder = self._folder / f"{TMP_PREFIX}mirror-{self._context.token}"
        shutil.rmtree(tmp_folder, ignore_errors=True)  # left over from a damaged checkpoint
        self._download_files(name, tmp_folder)
        downloaded = tmp_folder / name
        try:
            check_checkpoint(downloaded)
        except Damage as damage:
            self._set_aside(name, "damaged", str(damage))
            return False

        # Move the valid checkpoint to the folder of the run.
        self._publish_download(downloaded, name)
        shutil.rmtree(tmp_folder)
        seconds = time.perf_counter() - started
        self._log(f"Downloaded {name} from {self._url} in {seconds:.1f} s")
        return True

    def _publish_download(self, downloaded: Path, name: str) -> None:
        """Sync a downloaded checkpoint to disk and move it to the folder of the run.

        Args:
            downloaded: The step folder with the downloaded files.
            name: Name of the checkpoint, such as "step-00000100".
        """
        for file in downloaded.iterdir():
            sync(file)
        target = self._get_path(name)
        target.parent.mkdir(exist_ok=True)
        publish_folder(downloaded, target)

    def _download_files(self, name: str, tmp_folder: Path) -> None:
        """Download the files of a checkpoint to `tmp_folder / name`.

        Skip files that are missing on the mirror, because verifying the checkpoint reports them.
        """
        wanted = {f"{name}/{file}" for file in (MANIFEST, *self._manifests[name]["files"])}
        sizes = {path: info["size"] for path, info in self._files.items() if path in wanted}
        download_files(self._storage, self._root, sizes, tmp_folder)

    def _set_aside(self, name: str, reason: str, damage: str = "") -> None:
        """Rename the manifest of a checkpoint on the mirror so that readers ignore the checkpoint.

        Args:
            name: Name of the checkpoint.
            reason: Suffix of the new name of the manifest, "damaged" or "archived".
            damage: Description of the damage, for the log.
        """
        renamed = f"{MANIFEST}.{reason}"
        self._rename_manifest(name, renamed)
        detail = f" ({damage})" if damage else ""
        self._log(f"{self._url}/{name} is {reason}{detail}: renamed its manifest to {renamed}")

    def _rename_manifest(self, name: str, new_name: str) -> None:
        """Rename the manifest of a checkpoint on the mirror."""
        folder = f"{self._root}/{name}"
        # Object stores cannot rename files.
        self._storage.copy(f"{folder}/{MANIFEST}", f"{folder}/{new_name}")
        self._storage.rm_file(f"{folder}/{MANIFEST}")
        del self._manifests[name]

    # Copies, in the thread

    def _update(self) -> None:
        """Copy missing checkpoints to the mirror, and log and count an unexpected failure.

        Runs in the background thread.
        """
        try:
            self._copy_missing()
        except Exception as error:  # for example, the local folder cannot be listed
            self.num_failed += 1
            text = f"{type(error).__name__}: {one_line(str(error))}"
            self._log(Event(f"Could not copy to the mirror: {text}", "failed mirror"))
        finally:
            self.sending = None

    def _copy_missing(self) -> None:
        """Copy the checkpoints that the mirror lacks, newest first."""
        tried = set(self._copied)
        while True:
            # List again after each copy, because the run may have saved or removed checkpoints.
            missing = [path for path in self._list_local() if self._get_name(path) not in tried]
            if not missing:
                break
            path = missing[-1]
            tried.add(self._get_name(path))
            self.sending = path.resolve()
            self._send(path)

    def _send(self, path: Path) -> None:
        """Copy a local checkpoint to the mirror. Log and count a failure once per checkpoint."""
        error = self._send_with_retries(path)
        name = self._get_name(path)
        if error is not None and name not in self._failed:
            text = f"Could not copy {name} to the mirror: {error}"
            self._log(Event(text, "failed mirror", get_step(path)))
            self._failed.add(name)
            self.num_failed += 1

    def _send_with_retries(self, path: Path) -> UserError | None:
        """Copy a local checkpoint to the mirror, and retry if the storage cannot be accessed.

        Stop retrying when the run ends.

        Returns:
            The error of the last attempt. None if it succeeded, or if its failure does not matter,
            for example because the run has removed the checkpoint (see `_try_to_send`).
        """
        for pause in _RETRY_PAUSES:
            error = self._try_to_send(path)
            is_storage_failure = isinstance(error, CheckpointError)
            if not is_storage_failure:
                return error
            has_run_ended = self._is_ending.wait(pause)
            if has_run_ended:
                return error
        return self._try_to_send(path)

    def _try_to_send(self, path: Path) -> UserError | None:
        """Copy a checkpoint to the mirror and return the error if this fails.

        If it fails because the run removed the checkpoint or `close` aborted the copy, return None.
        """
        try:
            self._copy_and_remove_outdated(path)
        except UserError as error:
            was_removed = not (path / MANIFEST).is_file()
            if not was_removed and not self._is_ending.is_set():
                return error
        return None

    def _copy_and_remove_outdated(self, path: Path) -> None:
        """Copy a checkpoint to the mirror, then remove outdated checkpoints from the mirror.

        Raises:
            CheckpointError: If an access to the storage fails. Another attempt may succeed.
            UserError: If a different run uses the mirror, or if the copy would overwrite files that
                this run did not write.
        """
        name = self._get_name(path)
        url = f"{self._url}/{name}"
        started = time.perf_counter()
        with storage_errors(url, CheckpointError):
            was_copied = self._copy(path, name)  # False if the mirror already had it
            if was_copied:
                seconds = time.perf_counter() - started
                text = f"Copied {url} in {seconds:.1f} s"
                self._log(Event(text, "mirror", get_step(path)))
            self._copied.add(name)
            self._remove_outdated()

    def _copy(self, path: Path, name: str) -> bool:
        """Copy the files of a checkpoint to the mirror, ending with its manifest.

        Args:
            path: The local step folder.
            name: Name of the checkpoint on the mirror.

        Returns:
            Whether anything was copied. False means that the mirror already has this checkpoint.

        Raises:
            UserError: If a different run uses the mirror, or if the copy would overwrite files that
                this run did not write.
        """
        manifest = (path / MANIFEST).read_bytes()
        entries = parse_manifest(manifest, path / MANIFEST)["files"]
        folder = f"{self._root}/{name}"
        run_id = self._find_run_id()
        self._update_listing()
        self._check_run(run_id)

        is_mirrored = name in self._manifests
        if is_mirrored and self._storage.cat_file(f"{folder}/{MANIFEST}") == manifest:
            return False

        # Only checkpoints in the folder `final` may change. A run that is resumed writes a new one
        # when it ends again.
        is_in_final_folder = path.parent != self._folder
        if is_mirrored and not is_in_final_folder:
            raise UserError(
                f"{folder} has other content. The run may have been started twice. Stop one of "
                "them, or choose another checkpoint.mirror."
            )
        if is_mirrored:
            self._remove(name)
        elif not self._may_write(name, entries, run_id):
            raise UserError(
                f"{folder} contains files that this run did not write. Move them, or choose "
                "another checkpoint.mirror."
            )

        # Readers ignore the checkpoint until its manifest has its final name.
        self._storage.pipe_file(f"{folder}/{INCOMPLETE}", manifest)
        try:
            self._copy_files(path, folder, entries)
            self._storage.pipe_file(f"{folder}/{MANIFEST}", manifest)
        except OSError as error:
            # Delete the partial copy. Otherwise, the disk stays full, and the next start cannot
            # write the small file that tests the access.
            if error.errno in DISK_FULL:
                with suppress(OSError):  # the first error is more important
                    self._update_listing()
                    self._delete(name, [*entries, MANIFEST])
            raise
        self._storage.rm_file(f"{folder}/{INCOMPLETE}")
        return True

    def _copy_files(self, path: Path, folder: str, entries: dict[str, Entry]) -> None:
        """Copy all files of a step folder in parallel, except the manifest.

        Args:
            path: The local step folder.
            folder: Path of the copy in the storage.
            entries: Manifest entry of each file, by name.
        """

        def copy(file: str) -> None:
            self._copy_file(path / file, f"{folder}/{file}", entries[file])

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(copy, entries))  # raises the error of a copy that failed

    def _may_write(self, name: str, files: Iterable[str], run_id: str | None) -> bool:
        """Return whether copying a checkpoint to the mirror overwrites only files from this run.

        Args:
            name: Name of the checkpoint on the mirror.
            files: Names of its files, without the manifest.
            run_id: ID of this run.
        """
        targets = [f"{name}/{file}" for file in (MANIFEST, *files)]
        overwrites_nothing = self._files.keys().isdisjoint(targets)
        return overwrites_nothing or self._has_manifest_of(run_id, name)

    def _has_manifest_of(self, run_id: str | None, name: str) -> bool:
        """Return whether a checkpoint folder on the mirror has a manifest from a given run.

        A run uploads the manifest before all other files, as "manifest.json.incomplete", and may
        later rename it, for example to "manifest.json.damaged". Any of these names counts.

        Args:
            run_id: ID of the run.
            name: Name of the checkpoint.
        """
        for path in self._files:
            if path.startswith(f"{name}/{MANIFEST}"):
                content = self._storage.cat_file(f"{self._root}/{path}")
                if _is_manifest_of(run_id, content):
                    return True
        return False

    def _copy_file(self, path: Path, target: str, entry: Entry) -> None:
        """Copy a file to the path `target` in the storage and verify the copy.

        Raises:
            OSError: If the copy differs from the manifest.
        """
        # Copy the file in parts and compute the checksums of the bytes that were read.
        checksum = xxhash.xxh3_128()
        part_md5s: list[bytes] = []  # S3 combines these digests in the ETag of the copy
        with (
            open_file(path) as file,
            self._storage.open(target, "wb", block_size=_BLOCK_SIZE) as copy,
        ):
            while part := file.read(_BLOCK_SIZE):
                self._throttle(len(part))
                checksum.update(part)
                part_md5 = md5(part, usedforsecurity=False)
                part_md5s.append(part_md5.digest())
                copy.write(part)

        # Verify the bytes that were read, and then the copy.
        was_read_correctly = checksum.hexdigest() == entry["xxh3_128"]
        if not was_read_correctly or not self._is_intact(target, entry, part_md5s):
            raise OSError(f"the copy of {path.name} differs from the checkpoint")

    def _is_intact(self, target: str, entry: Entry, part_md5s: list[bytes]) -> bool:
        """Return whether a file on the mirror has the size and checksum in its manifest entry.

        Args:
            target: Path of the file in the storage.
            entry: Its manifest entry.
            part_md5s: MD5 digest of each uploaded part, in order.
        """
        info = self._storage.info(target)
        if info["size"] != entry["size"]:
            return False

        # S3 returns a hash of the received bytes as ETag. For other storage, read the copy back.
        etag = (info.get("ETag") or "").strip('"')
        if etag in _possible_etags(part_md5s):
            return True
        with self._storage.open(target, "rb", block_size=_BLOCK_SIZE) as copy:
            return file_digest(copy, xxhash.xxh3_128).hexdigest() == entry["xxh3_128"]

    def _throttle(self, size: int) -> None:
        """Wait until `size` more bytes can be sent without exceeding `checkpoint.mirror_mbps`.

        Raises:
            InterruptedError: If the run ends during the wait.
        """
        # Several threads copy files, so each one reserves a time slot for its bytes.
        with self._throttle_lock:
            start = max(self._next_send_time, time.monotonic())
            bytes_per_second = (self._config.mirror_mbps or math.inf) * 1e6 / 8  # 0: no limit
            self._next_send_time = start + size / bytes_per_second
        if self._is_ending.wait(max(0.0, start - time.monotonic())):
            raise InterruptedError("the run has ended")

    # Removals, in the thread

    def _remove_outdated(self) -> None:
        """Remove the outdated checkpoints of this run from the mirror.

        Keep the checkpoints that `keep_latest_k`, `keep_every_n_steps` or `keep_best` selects. Also
        remove the files that interrupted copies and removals left on the mirror.
        """
        run_id = self._find_run_id()
        self._update_listing()
        self._remove_leftovers(run_id)

        # List the checkpoints of this run.
        names_by_step: dict[int, str] = {}
        for step, name in self._names_by_step().items():
            if belongs_to_run(self._manifests[name], run_id):
                names_by_step[step] = name

        # Remove the outdated ones, except the best.
        best_name = self._find_best() if self._config.keep_best else None
        outdated_steps = select_outdated(list(names_by_step), self._config)
        for step in outdated_steps:
            name = names_by_step[step]
            if name != best_name:
                self._remove(name)

    def _remove_leftovers(self, run_id: str | None) -> None:
        """Delete the files that interrupted copies and removals of this run left on the mirror.

        Args:
            run_id: ID of this run. Files from other runs are not deleted.
        """
        local_names = [self._get_name(path) for path in self._list_local()]
        for name in find_checkpoints(self._files, "(?:final/)?", INCOMPLETE):
            path = f"{self._root}/{name}/{INCOMPLETE}"
            if name in self._manifests:  # the copy is complete; only this file is left over
                self._storage.rm_file(path)
            elif name not in local_names:  # local checkpoints will be copied again
                with suppress(Damage):
                    manifest = parse_manifest(self._storage.cat_file(path), path)
                    if belongs_to_run(manifest, run_id):
                        self._delete(name, manifest["files"])

    def _remove(self, name: str) -> None:
        """Remove a complete checkpoint from the mirror. Rename its manifest first.

        If the removal is interrupted, a later call of `_remove_leftovers` completes it.
        """
        files = self._manifests[name]["files"]
        self._rename_manifest(name, INCOMPLETE)
        self._delete(name, files)

    def _delete(self, name: str, files: Iterable[str]) -> None:
        """Delete files of a checkpoint on the mirror, and then its manifest.

        The manifest must already have been renamed to `manifest.json.incomplete`.

        Args:
            name: Name of the checkpoint.
            files: Names of the files to delete. All other files are kept.
        """
        folder = f"{self._root}/{name}"
        present = [f"{folder}/{file}" for file in files if f"{name}/{file}" in self._files]
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(self._storage.rm_file, present))  # raises the first error
        self._storage.rm_file(f"{folder}/{INCOMPLETE}")
        if self._url.startswith(("file:", "local:")):  # on object stores, rmdir may delete files
            with suppress(OSError):  # not empty
                os.rmdir(folder)


def _is_manifest_of(run_id: str | None, raw: bytes) -> bool:
    """Return whether a given run wrote a manifest, which may be damaged.

    Args:
        run_id: ID of the run.
        raw: Content of the manifest file.
    """
    try:
        return belongs_to_run(parse_manifest(raw, MANIFEST), run_id)
    except Damage:
        return run_id is not None and run_id.encode() in raw  # run IDs are random


def _possible_etags(part_md5s: list[bytes]) -> list[str]:
    """Return the ETags that S3 may assign to an uploaded object.

    The ETag depends on whether the object was uploaded in parts or in a single request.

    Args:
        part_md5s: MD5 digest of each part, in order.
    """
    combined = md5(b"".join(part_md5s), usedforsecurity=False).hexdigest()
    etags = [f"{combined}-{len(part_md5s)}"]
    if part_md5s:  # an empty file has no parts
        etags.append(part_md5s[0].hex())  # of a file that is uploaded in a single request
    return etags

"""Define certificates, the JSON results of `titanlite prove`, and find the newest one for a run."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

from titanlite import __version__
from titanlite.config.models import FileModel
from titanlite.config.registry import find_plugin_module
from titanlite.config.run import Degrees, Run
from titanlite.config.schema import LENGTH_KEYS, JobConfig

FOLDER = "proof"
"""Subfolder of job.dump_folder that contains the certificates."""
HASHED_SECTIONS = {
    "model",
    "training",
    "optimizer",
    "lr_scheduler",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "float8",
    "ema",
}
"""Sections of a job that determine what a step computes."""
KEYS_LEFT_OUT = {
    "training": {*LENGTH_KEYS, "seed", "num_threads", "gc_freq"},
    "lr_scheduler": {"warmup_steps", "total_steps", "decay_steps"},
    "model": {"vocab_size"},  # a proof always uses a small vocabulary
}
"""Keys of the `HASHED_SECTIONS` that do not affect whether a certificate is valid, by section."""


class Row(FileModel):
    """One row of the result table of `titanlite prove`, which summarizes comparisons of one kind.

    The worst comparison is the one with the largest error relative to its tolerance.

    Attributes:
        check: Kind of comparison, such as "gradient".
        error: Error of the worst comparison.
        tolerance: Tolerance of the worst comparison. 0 if it is bitwise.
        worst: Step and parameter or rank of the worst comparison.
        count: Number of comparisons.
        passed: Whether all comparisons of this kind passed.
    """

    check: str
    error: float
    tolerance: float
    worst: str
    count: int
    passed: bool


class Certificate(FileModel):
    """Result of `titanlite prove`, which compares the steps of a small job with a reference.

    Attributes:
        proven: Whether all comparisons passed.
        first_difference: Description and likely cause of the first failed comparison, or "".
        job_hash: Result of `hash_job` for the job.
        job: Name of the job file, or "".
        time: Unix time of the proof.
        layout: Parallelism degrees of the small job.
        precision: Precision of the computation.
        device: Name of the device.
        optimizer_reference: Description of the expected optimizer updates.
        versions: Versions of titanlite, torch, torchao and Python.
        commit: Git commit of titanlite, or "".
        changes: Options with a new value in the small job, such as "training.seq_len: 4096 -> 64".
        not_kept: Descriptions of the parts of the job that the small job leaves out.
        rows: One row per kind of comparison.
    """

    proven: bool
    first_difference: str
    job_hash: str
    job: str
    time: float
    layout: dict[str, int]
    precision: str
    device: str
    optimizer_reference: str
    versions: dict[str, str]
    commit: str
    changes: list[str]
    not_kept: list[str]
    rows: list[Row]

    @property
    def is_valid(self) -> bool:
        """Whether all comparisons passed, according to both `proven` and the individual rows."""
        return self.proven and all(row.passed for row in self.rows)

    def covers(self, degrees: Degrees) -> bool:
        """Return whether the certificate applies to a run with the given parallelism degrees.

        The proof must have used every kind of parallelism that the run uses. The degrees may
        differ: for example, a proof with 2 tensor-parallel ranks covers a run with 8.

        Args:
            degrees: Parallelism degrees of the run.
        """
        for name, degree in self.layout.items():
            if getattr(degrees, name) > 1 and degree <= 1:
                return False
        return True

    def day(self) -> str:
        """Return the local date of the proof, such as "2026-11-24"."""
        return time.strftime("%Y-%m-%d", time.localtime(self.time))


def hash_job(job: JobConfig) -> str:
    """Return a hash of everything that determines what a training step of a job computes.

    A certificate, the result of `titanlite prove`, is valid only for jobs with the same hash. The
    hash covers keys of the job, library versions, and the source code of titanlite and of plugins.
    It does not cover other modules that a plugin imports.
    """
    built_in_sections = job.model_dump(mode="json", include=HASHED_SECTIONS, exclude=KEYS_LEFT_OUT)
    plugin_sections = job.model_dump(mode="json", exclude=set(JobConfig.model_fields))
    versions = read_versions()
    plugin_hashes = {name: _hash_module(find_plugin_module(name)) for name in job.job.plugins}
    hashed = {
        **built_in_sections,
        # Other built-in sections have only these keys that change what a step computes.
        "hooks": job.job.hooks,
        "dataset": [job.dataset.document_mask, job.dataset.packing],
        "plugin_sections": plugin_sections,
        "versions": versions,
        "plugins": plugin_hashes,
        "titanlite": _hash_module("titanlite"),
    }
    text = json.dumps(hashed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_versions() -> dict[str, str]:
    """Return the versions of titanlite, torch, torchao and Python."""
    libraries = {name: version(name) for name in ("torch", "torchao")}
    python = sys.version.split()[0]
    return {"titanlite": __version__, "python": python} | libraries


def _hash_module(name: str) -> str:
    """Return a hash of the source files of a module or package.

    Args:
        name: Name of the module. If it has no source file, the hash is "".
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.has_location:
        return ""
    origin = Path(spec.origin)
    files = [origin]
    if origin.name == "__init__.py":
        # Skip broken links such as ".#x.py", which editors create.
        files = sorted(path for path in origin.parent.rglob("*.py") if path.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def find_certificate(run: Run) -> tuple[Path, Certificate] | None:
    """Find the newest certificate (a result of `titanlite prove`) that applies to a run.

    Search the output folder of the run. A certificate applies if it has the hash of the job and
    covers the parallel layout. The proof may still have failed; see `Certificate.is_valid`.

    Returns:
        The path of the file and the certificate, or None if there is no such certificate.
    """
    paths = list(Path(run.dump_folder, FOLDER).glob("certificate-*.json"))
    if not paths:
        return None

    job_hash = hash_job(run.job)
    for path in sorted(paths, reverse=True):  # the names contain the time, so the newest is first
        try:
            certificate = Certificate.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        if certificate.job_hash == job_hash and certificate.covers(run.degrees):
            return path, certificate
    return None

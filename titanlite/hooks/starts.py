"""What each start of a run runs with, and what of it differs from the start before: code, packages, machine, data, job.

Invariant: the record of each start stays in events.jsonl. To make it costs no collective and reads no data, and git has
a limit of time: without its answer, the hash of the package's files tells whether the code has changed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, ValidationError

from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.config.files import FileModel
from titanlite.config.load import PACKAGE
from titanlite.config.schema import JobConfig
from titanlite.data.sources.base import Source
from titanlite.report.json_lines import JsonLines

GIT_SECONDS = 5.0
_MOST_LINES, _MOST_HOSTS = 40, 8  # that a person is shown of a difference


class Start(FileModel):
    """What a start runs with, as a line of events.jsonl keeps it."""

    code: dict[str, str]
    """"files": a hash of the package's files. In a clone of the repository also "commit", and "state": "clean" or
    "changed", if the package differs from the commit."""
    packages: dict[str, str]
    """Name -> version, with Python as one of them."""
    machine: dict[str, str | int]
    hosts: Annotated[tuple[str, ...], Field(strict=False)]
    """Names of all machines, each once."""
    data: dict[str, str]
    """Name of a source, or "tokenizer" -> fingerprint of its contents."""
    job: dict[str, dict[str, Any]]
    """Section -> key -> value, where it is not the default."""

    @classmethod
    def of(
        cls,
        job: JobConfig,
        environment: Mapping[str, Any],
        hosts: Iterable[str],
        sources: Iterable[Source],
        tokenizer: str,
    ) -> Start:
        """The record of this start.

        Args:
            environment: What `describe_environment` returns.
            hosts: Name and address of the machine of each rank.
            tokenizer: Its fingerprint.
        """
        data = {"tokenizer": tokenizer}
        for source in sources:  # two sources can have one name
            data[source.name] = data.get(source.name, "") + source.fingerprint
        defaults = JobConfig().model_dump(mode="json")
        tables = {
            section: {key: value for key, value in table.items() if value != defaults[section][key]}
            for section, table in job.model_dump(mode="json").items()
        }
        return cls(
            code=environment["code"],
            packages={"Python": environment["python"], **environment["packages"]},
            machine={"ranks": environment["world_size"]}
            | {key: environment[key] for key in ("device", "platform", "threads")},
            hosts=tuple(sorted({host.partition(",")[0] for host in hosts})),
            data=data,
            job={section: table for section, table in tables.items() if table},
        )

    def differences(self, before: Start) -> list[tuple[str, str]]:
        """What differs from the start before: the part that it belongs to, and a line."""
        found = [("code", line) for line in _code_changes(before.code, self.code)]
        found += [("packages", f"{name} {change}") for name, change in _changes(before.packages, self.packages)]
        for verb, hosts in (
            ("left", set(before.hosts) - set(self.hosts)),
            ("new", set(self.hosts) - set(before.hosts)),
        ):
            if hosts:
                more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
                found.append(("machine", f"{verb}: {', '.join(sorted(hosts)[:_MOST_HOSTS])}{more}"))
        found += [("machine", f"{name} {change}") for name, change in _changes(before.machine, self.machine)]
        for name in sorted(before.data.keys() | self.data.keys()):
            what = "the tokenizer" if name == "tokenizer" else f"the source {name}"
            if name not in before.data or name not in self.data:
                found.append(("data", f"{what} is {'new' if name in self.data else 'gone'}"))
            elif before.data[name] != self.data[name]:  # in the words of `Loader.compare`
                found.append(("data", f"{what} has changed since: other files, contents or text_column"))
        return found + [("job", line) for line in compare_jobs(_whole(before.job), _whole(self.job)).differences()]


def start_before(events: Path) -> Start | None:
    """The record of the last start in events.jsonl; None if there is none, as in those of version 0.1."""
    starts = [event for event in JsonLines(events).new() if event.get("event") == "start"]
    try:
        return Start.model_validate(starts[-1]["record"]) if starts else None
    except (KeyError, ValidationError):
        return None


def told(differences: Iterable[tuple[str, str]], said: Iterable[str]) -> str:
    """The end of the log's line about a start. Lines that the log has `said` already are left out."""
    differences = list(differences)
    if not differences:
        return "; nothing has changed since the start before"
    known = set(said)
    lines = [f"{part}: {line}" for part, line in differences if line not in known]
    if not lines:
        return "; what has changed since the start before is said above"
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join(["; changed since the start before:", *lines[:_MOST_LINES], *more])


def describe_code(package: Path = PACKAGE) -> dict[str, str]:
    """Which code of this package runs, as `Start.code` has it."""
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        if file.is_file():  # an editor's lock is a link to nothing
            digest.update(os.fsencode(file.relative_to(package)) + b"\0" + file.read_bytes())
    return {"files": digest.hexdigest(), **_commit(package)}


def _commit(package: Path) -> dict[str, str]:
    """The commit of a clone, and whether its package differs from it. Empty if there is no clone, or no answer."""
    if not (package.parent / ".git").exists():
        return {}
    # No lock in the repository and no process that outlives this one; GIT_DIR may name another repository.
    status = [
        "git",
        "-C",
        str(package),
        "-c",
        "core.fsmonitor=false",
        "status",
        "--porcelain=v2",
        "--branch",
        "--",
        ".",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        said = subprocess.run(
            status, env=environment | {"GIT_OPTIONAL_LOCKS": "0"}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=GIT_SECONDS, check=True,
        ).stdout.decode(errors="replace")  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # no git, or another user's repository
        return {}
    lines = said.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    state = "changed" if any(not line.startswith("#") for line in lines) else "clean"
    return {"commit": commits[0], "state": state} if commits else {}


def _code_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    same_files = before.get("files") == now.get("files")
    if before == now or (same_files and not ("commit" in before and "commit" in now)):
        return []
    old, new = _code_name(before), _code_name(now)
    return [f"{old} -> {new}" if old != new else f"{new}, which are others than before"]


def _code_name(code: Mapping[str, str]) -> str:
    if "commit" not in code:
        return f"files {code.get('files', '?')[:12]}"
    return f"commit {code['commit'][:12]}" + (" with changes" if code.get("state") == "changed" else "")


def _changes(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> list[tuple[str, str]]:
    """Of each key that differs: "before -> now"."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [(key, f"{before.get(key, 'none')} -> {now.get(key, 'none')}") for key in keys]


def _whole(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A job with its defaults, from what is not the default."""
    defaults = JobConfig().model_dump(mode="json")
    return {section: {**table, **tables.get(section, {})} for section, table in defaults.items()}

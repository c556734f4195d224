"""What each start of a run runs with, and what of it differs from the start before: code, packages, machine, data, job.

Invariant: the record of each start stays in events.jsonl. To make it costs no collective and reads no data, and git has
a limit of time: without its answer, the hash of the package's files tells whether the code has changed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.config.load import PACKAGE
from titanlite.config.schema import JobConfig
from titanlite.data.sources.base import Source

_GIT_SECONDS = 5.0

Record = dict[str, Any]


def record_of(
    job: JobConfig, environment: Mapping[str, Any], hosts: Iterable[str], sources: Iterable[Source], tokenizer: str
) -> Record:
    """What a start runs with, as a line of events.jsonl keeps it.

    Args:
        environment: The content of environment.json.
        hosts: Name and address of the machine of each rank.
        tokenizer: Its fingerprint.

    Returns:
        "code", "packages" and "machine", as environment.json has them; "hosts", names of machines, each once; "data",
        name of a source -> fingerprint; "job", section -> key -> value, where it is not the default.
    """
    data = {"tokenizer": tokenizer}
    for source in sources:  # two sources can have one name
        data[source.name] = data.get(source.name, "") + source.fingerprint
    defaults, tables = JobConfig().model_dump(mode="json"), {}
    for section, table in job.model_dump(mode="json").items():
        if changed := {key: value for key, value in table.items() if value != defaults[section][key]}:
            tables[section] = changed
    machine = {key: environment[key] for key in ("device", "platform", "threads")}
    return {
        "code": environment["code"],
        "packages": {"Python": environment["python"], **environment["packages"]},
        "machine": {"ranks": environment["world_size"], **machine},
        "hosts": sorted({host.partition(",")[0] for host in hosts}),
        "data": data,
        "job": tables,
    }


def differences(before: Record, now: Record) -> list[tuple[str, str]]:
    """What differs from the start before: the part that it belongs to, and a line."""
    found = []
    if now["code"].get("files") != before["code"].get("files"):
        found.append(("code", f"{_name(before['code'])} -> {_name(now['code'])}"))
    for part in ("packages", "machine"):
        found += [(part, f"{key} {old} -> {new}") for key, old, new in _changes(before[part], now[part])]
    for host, _, new in _changes(dict.fromkeys(before["hosts"], 1), dict.fromkeys(now["hosts"], 1)):
        found.append(("machine", f"{host} is {'new' if new else 'gone'}"))
    for name, old, new in _changes(before["data"], now["data"]):
        what = "the tokenizer" if name == "tokenizer" else f"the source {name}"
        # In the words of `Loader.compare`.
        changed = "has changed since: other files, contents or text_column"
        found.append(("data", f"{what} {changed if old and new else 'is new' if new else 'is gone'}"))
    return found + [("job", line) for line in compare_jobs(_whole(before["job"]), _whole(now["job"])).differences()]


def start_before(events: Path) -> Record | None:
    """The record of the last start in events.jsonl; None if there is none, as in those of version 0.1."""
    found = None
    for line in events.read_bytes().splitlines() if events.exists() else ():
        try:
            event = json.loads(line)
            if event["event"] == "start":
                found = event.get("record")
        except (ValueError, KeyError, TypeError):  # a crash can cut a line
            continue
    return found


def told(changes: Iterable[tuple[str, str]], said: Iterable[str]) -> str:
    """The end of the log's line about a start. Lines that the log has `said` already are left out."""
    changes, known = list(changes), set(said)
    if not changes:
        return "; nothing has changed since the start before"
    lines = [f"{part}: {line}" for part, line in changes if line not in known]
    if not lines:
        return "; what has changed since the start before is said above"
    return "\n".join(["; changed since the start before:", *lines])


def describe_code(package: Path = PACKAGE) -> dict[str, str]:
    """Which code of this package runs. "files": a hash of its files. In a clone of the repository also "commit", and
    "state": "clean" or "changed", if the package differs from the commit."""
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        if file.is_file():  # an editor's lock is a link to nothing
            digest.update(os.fsencode(file.relative_to(package)) + b"\0" + file.read_bytes())
    code = {"files": digest.hexdigest()}
    if not (package.parent / ".git").exists():
        return code
    # No lock in the repository and no process that outlives this one; GIT_DIR may name another repository.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--", "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        ended = subprocess.run(
            command, cwd=package, env=environment | {"GIT_OPTIONAL_LOCKS": "0"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # no git, or another user's repository
        return code
    lines = ended.stdout.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    changed = any(not line.startswith("#") for line in lines)
    return {**code, "commit": commits[0], "state": "changed" if changed else "clean"} if commits else code


def _name(code: Mapping[str, str]) -> str:
    if code.get("state") == "clean":
        return f"commit {code['commit'][:12]}"
    changed = f"commit {code['commit'][:12]} with changes, " if "commit" in code else ""
    return f"{changed}files {code.get('files', '?')[:12]}"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Of each key that differs: the value before and now; None where there is none."""
    keys = {**before, **now}
    return [(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]


def _whole(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A job with its defaults, from what is not the default."""
    defaults = JobConfig().model_dump(mode="json")
    return {section: {**table, **tables.get(section, {})} for section, table in defaults.items()}

"""Mutants of the job files: each is a valid job or a UserError, within two seconds, whatever was done to the file."""

import copy
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomlkit

from titanlite.config.errors import UserError
from titanlite.config.load import JOB_FILES, dump_config, load_job
from titanlite.config.schema import KEYS, SECTIONS
from titanlite.load_run import load_run

FILES = sorted(JOB_FILES.glob("*.toml"))
VALUES: list[Any] = [
    *(0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 1e308, float("nan"), float("inf")),
    *(True, False, "", "x", "\x1b[2J", "..", "/", "~", "a" * 5000, "\u202e", "1", "none", "debugmodel", "fused"),
    *([], [[]], [0], ["model"], {}, {"x": 1}, [{}], [{"source": "c4"}], [{"start_step": 0, "weights": [1.0]}]),
]
WORDS = [b"[", b"]", b"=", b"\n", b'"', b"'", b'"""', b"#", b"{", b"}", b",", b".", b"\\", b"\\u0000", b"\xff", b"\0"]


def change_bytes(raw: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, cut out, doubled, or replaced by signs of the language."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randint(0, len(raw)), rng.randint(0, len(raw))))
        end = min(end, at + 40)
        middle = rng.choice([b"", raw[at:end] * 2, rng.choice(WORDS) * rng.choice([1, 1, 2, 2000]), rng.randbytes(4)])
        raw = raw[:at] + middle + raw[rng.choice([at, end]) :]
    return raw


def change_structure(raw: bytes, rng: random.Random) -> bytes:
    """Keys and sections dropped, renamed, moved, or given another value."""
    job: dict[str, Any] = tomli.loads(raw.decode())
    for _ in range(rng.randint(1, 4)):
        section = rng.choice([*SECTIONS, *job])
        table = job.setdefault(section, {})
        if not isinstance(table, dict):
            continue
        known = list(SECTIONS[section].model_fields) if section in SECTIONS else ["x"]
        key = rng.choice([*known, *table, "x", rng.choice(list(KEYS)).split(".")[1]])
        action = rng.randrange(6)
        if action < 3:
            table[key] = copy.deepcopy(rng.choice(VALUES))
        elif action == 3:
            table.pop(key, None)
        elif action == 4:
            job[rng.choice([section[:-1], section.upper(), key, "x.y"])] = job.pop(section)
        else:
            job[section] = copy.deepcopy(rng.choice(VALUES))
    return tomlkit.dumps(job).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("change", [change_bytes, change_structure])
@pytest.mark.parametrize("count", [100, pytest.param(1500, marks=pytest.mark.long)])
def test_a_mutant_is_a_job_or_a_users_error(
    change: Callable[[bytes, random.Random], bytes], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    valid, argv = 0, ["--job.config_file", "mutant.toml"]
    for number in range(count):
        rng = random.Random(f"{change.__name__} {number}")
        Path("mutant.toml").write_bytes(change(FILES[number % len(FILES)].read_bytes(), rng))  # stays if it fails
        started = time.process_time()
        try:
            answer = load_run(argv, rng.choice([1, 8, 512])).job
        except UserError as error:
            answer = error
        assert time.process_time() - started < 2
        if isinstance(answer, UserError):
            assert re.fullmatch(r"[^\x00-\x08\x0b-\x1f\x7f]+", str(answer))
            assert answer.exit_code == 2
            continue
        Path("copy.toml").write_text(dump_config(answer), encoding="utf-8")
        assert load_job(["--job.config_file", "copy.toml"]) == answer
        valid += 1
    assert 0 < valid < count  # mutants that all fail at the same place would prove little

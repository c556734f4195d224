"""Damaged and hostile variants of a good file, the same for the same number, and what may come of them."""

import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from titanlite.config.errors import UserError

SAMPLE = pytest.param(40, id="sample")
ALL = pytest.param(1500, marks=pytest.mark.long, id="long")

_DEEP: Any = []
for _ in range(400):
    _DEEP = [_DEEP]
_VALUES = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**40, 10**400, 0.5, 1e308, 1e-320, -0.0),
    *(float("nan"), float("inf"), "", "x", "0", "\x1b[2J\u202e", "\ud800", "a" * 10**5, "../../etc/passwd"),
    *("(a+)+$", "*", "(?<n", "llama3", "default", "Split", "BPE", [], {}, [[]], [None], {"": {}}, _DEEP),
)  # fmt: skip


def mutant(good: bytes, number: int, is_json: bool = False) -> bytes:
    """`good` with one to three changes of its bytes, or of the values and keys of its JSON."""
    rng = random.Random(number)
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            value = json.loads(good) if is_json and rng.random() < 0.7 else None
        except (ValueError, RecursionError):
            continue
        good = _change_value(value, rng) if value and isinstance(value, dict) else _change_bytes(good, rng)
    return good


def _change_value(root: dict[str, Any], rng: random.Random) -> bytes:
    """A value somewhere within `root` goes, gets another name, or is replaced, near the root or deep in it."""
    table: Any = root
    while True:
        key: Any = rng.choice(list(table)) if isinstance(table, dict) else rng.randrange(len(table))
        if not isinstance(table[key], dict | list) or not table[key] or rng.random() < 0.3:
            break
        table = table[key]
    match rng.randrange(4):
        case 0:
            del table[key]
        case 1 if isinstance(table, dict):
            table[rng.choice(("x", "", key.upper(), f"{key}s", *root))] = table.pop(key)
        case 2:
            table[key] = copy.deepcopy(rng.choice([*root.values()]))
        case _:
            table[key] = rng.choice(_VALUES)
    return json.dumps(root).encode()


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = start + rng.choice((1, 1, 4, 64))
    junk = rng.choice((b"\0", b"-", b"9" * 20, b"{", b"]", b'"', b"\n", b"\xff", b"\x1b"))
    middle = rng.choice((b"", data[start:end] * 2, rng.randbytes(end - start), junk))
    return data[:start] + middle + data[end if rng.random() < 0.9 else len(data) :]


def ends_well(number: int, act: Callable[[], object]) -> bool:
    """Whether `act` ended without an error. Fails the test for any other error than a printable UserError, and for more
    than two seconds of a processor (not of a clock, because other tests run beside this one)."""
    before, refusal = time.process_time(), ""
    try:
        act()
    except UserError as error:
        refusal = str(error)
    except BaseException as error:
        error.add_note(f"mutant {number}")
        raise
    assert time.process_time() - before < 2.0, f"mutant {number} took {time.process_time() - before:.1f} s"
    assert refusal.replace("\n", "x").isprintable(), f"mutant {number}: {refusal!r}"
    assert len(refusal) < 10_000, f"mutant {number}: a message of {len(refusal)} characters"
    return not refusal

"""Damaged and hostile variants of a good file, the same for the same number, and what may come of them."""

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
        if is_json and rng.random() < 0.7:
            try:
                value = json.loads(good)
            except (ValueError, RecursionError):
                continue
            _change_value(value, rng)
            good = json.dumps(value).encode()
        else:
            good = _change_bytes(bytearray(good), rng)
    return good


def _change_value(value: Any, rng: random.Random) -> None:
    if not isinstance(value, dict | list) or not value:
        return
    table, key = _place(value, rng)
    other, name = _place(value, rng)
    match rng.randrange(4):
        case 0:
            del table[key]
        case 1 if isinstance(table, dict):
            table[rng.choice(("x", "", key.upper(), f"{key}s", str(name)))] = table.pop(key)
        case 2:
            table[key] = json.loads(json.dumps(other[name]))  # a copy
        case _:
            table[key] = rng.choice(_VALUES)


def _place(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """A table or a list somewhere within `value`, and a key of it: as likely near the root as in the longest list."""
    while True:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if not isinstance(value[key], dict | list) or not value[key] or rng.random() < 0.3:
            return value, key
        value = value[key]


def _change_bytes(data: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(data)) if data else 0
    end = min(len(data), start + rng.choice((1, 1, 4, 64)))
    match rng.randrange(6):
        case 0 if data:
            data[start] ^= 1 << rng.randrange(8)
        case 1:
            data[start:end] = rng.randbytes(end - start)
        case 2:
            del data[start:end]
        case 3:
            data[start:start] = data[start:end]
        case 4:
            del data[start:]
        case _:
            data[start:start] = rng.choice((b"\0", b"-", b"9" * 20, b"{", b"]", b'"', b"\n", b"\xff", b"\x1b"))
    return bytes(data)


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

"""What commands share: how they print, and how they start further ranks.

Invariant: with --json, standard output has one JSON object and nothing else, from the first rank only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.runtime.logging import note


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def print_result(value: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print a command's result on the first rank: as strict JSON, where what is not finite is a text, or as `text`."""
    if is_first_rank():
        strict = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
        print(json.dumps(strict, allow_nan=False) if as_json else text)


def note_once(line: str) -> None:
    """Say something on standard error, on the first rank."""
    if is_first_rank():
        note(line)


def start_ranks(command: str, argv: Sequence[str]) -> int | None:
    """The exit code of `titanlite COMMAND` on NGPU processes, if that asks for several and this is not one of them."""
    if os.environ.get("NGPU", "1") == "1" or "WORLD_SIZE" in os.environ:
        return None
    from titanlite.launch.launcher import launch_command

    return launch_command([command, *argv])

"""What commands share: how they print, and how they start further ranks.

Invariant: with --json, standard output has one JSON object and nothing else, from the first rank only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def print_result(value: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print a command's result on the first rank: as strict JSON, where what is not finite is a text, or as `text`."""
    if is_first_rank():
        strict = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
        print(json.dumps(strict, allow_nan=False) if as_json else text)


def start_ranks(command: str, argv: Sequence[str]) -> None:
    """If NGPU asks for several processes, and this is not one of them: run `titanlite COMMAND` on them in place of this
    one, which ends with their exit code."""
    if os.environ.get("NGPU", "1") != "1" and "WORLD_SIZE" not in os.environ:
        from titanlite.launch.launcher import launch_command

        raise SystemExit(launch_command([command, *argv]))

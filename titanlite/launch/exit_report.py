"""What is said about the end of the ranks, and the exit code that follows from it.

Invariant: if a rank stopped for a known reason (an exit code of `titanlite.config.errors`), the launcher has the same
exit code and shows no traceback. After a crash, the root cause is said first and once.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.errors import CheckpointError, GuardError, StoppedBySignal, UserError
from titanlite.runtime.process import STOP_SIGNALS

KNOWN_EXITS = tuple(error.exit_code for error in (UserError, GuardError, CheckpointError, StoppedBySignal))
# Codes of a stop before there was anything to save: the rank's own exit code, or minus the signal that killed it.
UNSAVED_STOPS = tuple(code for number in STOP_SIGNALS for code in (128 + number, -number))


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: with its exit code (minus the signal's number if a signal killed it), when, the reason that it
    gave, and whether the launcher killed it."""

    rank: int
    code: int
    time: float
    reason: str
    killed: bool


def explain(ends: Sequence[RankEnd], stopped_by: int) -> tuple[RankEnd, str, int]:
    """The rank that decides, what to print about it, and the exit code of the launcher.

    Args:
        ends: Of the ranks that did not end with 0, in order of time, those that the launcher killed last. There is at
            least one.
        stopped_by: Number of the signal that was passed on to the ranks, or 0.
    """
    # A rank that stopped without a save, but said why, also stopped for a known reason.
    known = [end for end in ends if end.code in KNOWN_EXITS or (end.code in UNSAVED_STOPS and end.reason)]
    root = min(known, key=lambda end: end.rank, default=ends[0])
    late = ", ".join(str(end.rank) for end in ends if end.killed)
    if known:
        return root, root.reason, root.code
    if stopped_by and (root.code in UNSAVED_STOPS or root.killed):  # other ends after it are its consequences
        why = f"without a save: ranks {late} had to be killed" if late else "before there was anything to save"
        return root, f"Stopped by {signal.Signals(stopped_by).name} {why}.", 128 + stopped_by
    how = f"it ended with {f'exit code {root.code}' if root.code > 0 else signal.Signals(-root.code).name}."
    if root.code == -signal.SIGKILL:
        how = "it was killed (SIGKILL). The system does that when memory runs out."
    consequence = f"Ranks that then did not end by themselves and were killed: {late}." if late else ""
    lines = (f"Rank {root.rank} failed first: {how}", root.reason, consequence)
    return root, "\n".join(filter(None, lines)), root.code if root.code > 0 else 128 - root.code


def explain_hang(hangs: Sequence[dict[str, Any]]) -> str:
    """Which rank was late, and in which collective the others waited for it.

    Args:
        hangs: What `titanlite.runtime.hang_report.HangWatch` wrote, one for each rank.
    """
    furthest: dict[str, int] = {}  # process group -> number of the last collective that any rank has joined
    for hang in hangs:
        for group, (number, *_) in hang["collectives"].items():
            furthest[group] = max(number, furthest.get(group, 0))
    late, waiting = [], []
    for hang in sorted(hangs, key=lambda hang: hang["rank"]):
        who = f"Rank {hang['rank']} ({hang['hosts'][hang['rank']]}), step {hang['step']},"
        collectives = hang["collectives"]
        behind = [name for group, (number, name, _) in collectives.items() if number < furthest[group]]
        pending = [f"{name} number {number}" for number, name, done in collectives.values() if not done]
        if pending and not behind:
            waiting.append(f"{who} waits in {pending[-1]}, at {hang['line']}")
        else:
            missed = f"after its last {behind[-1]} it did not join the next one. " if behind else ""
            late.append(f"{who} is LATE: {missed}It is at {hang['line']}\n    inside of {hang['inside']}")
    here = {hang["rank"] for hang in hangs}
    silent = [f"{rank} ({host})" for hang in hangs[:1] for rank, host in enumerate(hang["hosts"]) if rank not in here]
    if silent and not late:
        late = [f"LATE, stopped or lost is one that wrote no report on this machine: rank {', '.join(silent)}."]
    return "\n".join(late + waiting)

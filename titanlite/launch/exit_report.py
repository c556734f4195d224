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
    """How a rank ended.

    It has the exit code (minus the signal's number if a signal killed the rank), the time, the reason that the rank
    gave, the closing lines, which say how to resume, and whether the launcher killed it.
    """

    rank: int
    code: int
    time: float
    reason: str = ""
    closing: str = ""
    killed: bool = False

    def __str__(self) -> str:
        if self.code == -signal.SIGKILL:
            return "it was killed (SIGKILL). The system does that when memory runs out."
        return f"it ended with {f'exit code {self.code}' if self.code > 0 else signal.Signals(-self.code).name}."

    def as_consequence(self) -> str:
        """The line about it where another rank has the root cause."""
        if self.killed:
            return f"Then rank {self.rank} did not end by itself and was killed."
        return f"Then rank {self.rank} failed: {self.reason.rstrip().rpartition(chr(10))[2] or self}"


def explain(ends: Sequence[RankEnd], stopped_by: int) -> tuple[str, int]:
    """What to print about the ranks that did not end with 0, and the exit code of the launcher.

    Args:
        ends: In order of time, those that the launcher killed last. There is at least one.
        stopped_by: Number of the signal that was passed on to the ranks, or 0.
    """
    root = ends[0]
    # A rank that stopped without a save, but said why, also stopped for a known reason.
    known = [end for end in ends if end.code in KNOWN_EXITS or (end.code in UNSAVED_STOPS and end.reason)]
    if known:
        reasons: dict[str, list[int]] = {}  # equal ones of many ranks are said once
        for end in known:
            if end.reason:
                reasons.setdefault(end.reason, []).append(end.rank)
        lines = list(reasons) if len(reasons) == 1 else [f"[{_names(r)}] {text}" for text, r in reasons.items()]
        return "\n".join([*lines, *(end.as_consequence() for end in ends if end not in known)]), known[0].code
    # The stop came before there was anything to save. What other ranks report after it is a consequence.
    if stopped_by and (root.code in UNSAVED_STOPS or root.killed):
        late = [end.rank for end in ends if end.killed]
        why = f"without a save: {_names(late)} had to be killed" if late else "before there was anything to save"
        return f"Stopped by {signal.Signals(stopped_by).name} {why}.", 128 + stopped_by
    lines = [f"Rank {root.rank} failed first: {root}", root.reason.rstrip(), *(e.as_consequence() for e in ends[1:])]
    return "\n".join(filter(None, lines)), root.code if root.code > 0 else 128 - root.code


def explain_hang(hangs: Sequence[dict[str, Any]], killed: Sequence[int]) -> str:
    """Which rank was late, and in which collective the others waited for it.

    Args:
        hangs: What `titanlite.runtime.hang_report.HangWatch` wrote, one for each rank.
        killed: Ranks that the launcher killed.
    """
    if not hangs:
        return ""
    furthest: dict[str, int] = {}  # process group -> number of the last collective that any rank has joined
    for hang in hangs:
        for group, (number, *_) in hang["collectives"].items():
            furthest[group] = max(number, furthest.get(group, 0))
    silent = set(killed) - {hang["rank"] for hang in hangs}
    late = [f"Rank {rank} is LATE: its process was stopped, or hangs outside of Python." for rank in sorted(silent)]
    waiting = []
    for hang in hangs:
        who, where = f"Rank {hang['rank']} ({hang['host']}), step {hang['step']},", f"{hang['line']}"
        collectives = hang["collectives"]
        behind = [name for group, (number, name, _) in collectives.items() if number < furthest[group]]
        pending = [f"{name} number {number}" for number, name, done in collectives.values() if not done]
        if pending and not behind:
            waiting.append(f"{who} waits in {pending[-1]}, at {where}")
        else:
            missed = f"after its last {behind[-1]} it did not join the next one. " if behind else ""
            late.append(f"{who} is LATE: {missed}It is at {where}\n    inside of {hang['inside']}")
    here = {hang["rank"] for hang in hangs} | silent
    elsewhere = [f"{rank} ({host})" for rank, host in enumerate(hangs[0]["hosts"]) if rank not in here]
    if not late and elsewhere:
        late = [f"No rank of this machine is late. Lost or late on other machines: rank {', '.join(elsewhere)}."]
    return "\n".join(late + waiting)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"

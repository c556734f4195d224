"""The message about the end of the workers, and the exit code that follows from it.

Invariant: if a worker stopped for a known reason (an exit code of `titanlite.config.errors`), the launcher has the same
exit code and shows no traceback. After a crash, the root cause is printed first and once.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.errors import CheckpointError, GuardError, StoppedBySignal, UserError
from titanlite.runtime.process import STOP_SIGNALS

KNOWN_EXITS = tuple(error.exit_code for error in (UserError, GuardError, CheckpointError, StoppedBySignal))
# Codes of a stop before there was anything to save: the worker's own exit code, or minus the signal that killed it.
UNSAVED_STOPS = tuple(code for number in STOP_SIGNALS for code in (128 + number, -number))


@dataclass(frozen=True)
class End:
    """How a worker ended.

    It has the exit code (minus the signal's number if a signal killed the worker), the time, the message of the worker,
    and its closing lines, which say how to continue.
    """

    rank: int
    code: int
    time: float
    message: str | None
    closing: str = ""


def explain_hang(hangs: Sequence[dict[str, Any]], killed: set[int]) -> str:
    """Which rank was late, and in which collective the others waited for it.

    Args:
        hangs: The content of the files that `titanlite.runtime.hang_report.HangWatch` wrote, one per rank.
        killed: Ranks that the launcher killed.
    """
    if not hangs:
        return ""
    reached: dict[str, int] = {}  # process group -> number of the last collective that any rank has joined
    for hang in hangs:
        for group, (number, _) in hang["collectives"].items():
            reached[group] = max(number, reached.get(group, 0))
    silent = killed - {hang["rank"] for hang in hangs}
    lines = [f"Rank {rank} is LATE: its process was stopped, or hangs outside of Python." for rank in sorted(silent)]
    here = {hang["rank"] for hang in hangs} | silent
    elsewhere = [f"{rank} ({host})" for rank, host in enumerate(hangs[0]["hosts"]) if rank not in here]
    waiting = []
    for hang in hangs:
        behind = [group for group, (number, _) in hang["collectives"].items() if number < reached[group]]
        who = f"Rank {hang['rank']} ({hang['host']}), step {hang['step']}, "
        last = list(hang["collectives"].values())[-1:] or [(0, "none")]
        if behind:
            number, name = hang["collectives"][behind[0]]
            lines.insert(
                0,
                f"{who}is LATE: after {name} number {number} it did not join the next one. It is at "
                f"{hang['line']}\n    inside of {hang['inside']}",
            )
        else:
            number, name = last[0]
            waiting.append(f"{who}waits in {name} number {number}, at {hang['line']}")
    if not lines and elsewhere:
        lines = [f"No rank of this machine is late. Lost or late on other machines: rank {', '.join(elsewhere)}."]
    return "\n".join(lines + waiting)


def explain(ends: Sequence[End], stopped_by: int | None, killed: set[int]) -> tuple[str, int]:
    """What to print about the end of the workers, and the exit code of the launcher.

    Args:
        ends: The workers that did not end with 0, in order of time. There is at least one.
        stopped_by: Number of the signal that was forwarded to the workers, if any.
        killed: Ranks that the launcher killed.
    """
    # A worker that stopped without a save, but said why, also stopped for a known reason.
    known = [end for end in ends if end.code in KNOWN_EXITS or (end.code in UNSAVED_STOPS and end.message)]
    if known:
        code = known[0].code
        texts: dict[str, list[int]] = {}  # equal messages of many ranks are printed once
        for end in known:
            if end.message:
                texts.setdefault(end.message, []).append(end.rank)
        lines = list(texts) if len(texts) == 1 else [f"[{_ranks(ranks)}] {text}" for text, ranks in texts.items()]
        return "\n".join([*lines, *(_short(end, killed) for end in ends if end not in known)]), code
    # The stop came before there was anything to save. What other ranks report after it is a consequence.
    if stopped_by is not None and (ends[0].code in UNSAVED_STOPS or all(end.rank in killed for end in ends)):
        late = [end.rank for end in ends if end.rank in killed]
        why = f"without a save: {_ranks(late)} had to be killed" if late else "before there was anything to save"
        return f"Stopped by {signal.Signals(stopped_by).name} {why}.", 128 + stopped_by
    root, *others = ends
    lines = [f"Rank {root.rank} failed first: {_how(root)}", (root.message or "").rstrip()]
    lines += [_short(end, killed) for end in others]
    return "\n".join(line for line in lines if line), root.code if root.code > 0 else 128 - root.code


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _how(end: End) -> str:
    if end.code == -signal.SIGKILL:
        return "it was killed (SIGKILL). The system does that when memory runs out."
    return f"it ended with {f'exit code {end.code}' if end.code > 0 else signal.Signals(-end.code).name}."


def _short(end: End, killed: set[int]) -> str:
    if end.rank in killed:
        return f"Then rank {end.rank} did not end by itself and was killed."
    last_line = (end.message or "").rstrip().rpartition("\n")[2]
    return f"Then rank {end.rank} failed: {last_line or _how(end)}"

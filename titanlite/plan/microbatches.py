"""Few microbatches of a pipeline are run, and the others are inserted where its schedule has them.

Invariant: the schedule itself decides the order, because it runs with all microbatches. Those that are left out take
what microbatch `MODEL` took, event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from titanlite.observe.counter import Counter, Place

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

# The first microbatch allocates gradients, and the last one reduces them. The one before the model is there because
# some of its memory is freed while the model runs, as some of the model's is while the next one runs.
MODEL = 2
FEWEST = 6  # microbatches from which on some are left out

# Method of a stage -> what it does, in which phase. The last two hand over what is sent.
_ACTIONS = {
    "forward_one_chunk": Place("forward", "stage"),
    "backward_one_chunk": Place("backward", "stage"),
    "backward_weight_one_chunk": Place("backward", "weights of a stage"),
    "get_fwd_send_ops": Place("forward", "sent"),
    "get_bwd_send_ops": Place("backward", "sent"),
}
_BETWEEN = "between stages"
_NAMES = {place.name for place in _ACTIONS.values()}


def _at(place: Place, stage: int, microbatch: int, name: str = "") -> Place:
    return Place(place.phase, name or place.name, stage, place.block, microbatch)


def is_run(microbatch: int, count: int) -> bool:
    """Whether a microbatch of `count` is run."""
    return count < FEWEST or microbatch <= MODEL or microbatch == count - 1


def times(place: Place, op: str, count: int) -> int:
    """How often `op` runs with `count` microbatches, for each time that it ran in `place`. What runs between stages
    runs once, except for what they send, because the schedule gathers weights there."""
    if count < FEWEST or place.microbatch != MODEL or (place.name == _BETWEEN and op != "send"):
        return 1
    return count - MODEL - 1


@contextmanager
def run_microbatches(counter: Counter, runs: Callable[[int], bool]) -> Iterator[None]:
    """Run those microbatches of each stage that `runs` names, and tell `counter` where each is in the schedule."""
    from torch.distributed.pipelining import PipelineStage

    kept: list[torch.Tensor] = []  # a loss

    def stand_in(method: str, stage: PipelineStage) -> Any:
        """What a microbatch that is left out returns."""
        if method == "forward_one_chunk":
            counter.next_microbatch(stage.stage_index)
            return (kept[0] if kept else torch.zeros(())) if stage.is_last else None
        return [] if method.endswith("_ops") else None

    def action(method: str) -> Any:
        own, sort = getattr(PipelineStage, method), _ACTIONS[method]

        def act(stage: PipelineStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            place = _at(sort, stage.stage_index, microbatch)
            counter.go_to(place)
            if not runs(microbatch):
                counter.go_to(_at(place, place.stage, microbatch, _BETWEEN))
                return stand_in(method, stage)
            result = own(stage, microbatch, *args, **kwargs)
            if method == "forward_one_chunk" and stage.is_last:
                kept[:] = [result.detach()]
            counter.go_to(_at(place, place.stage, microbatch, _BETWEEN))
            return result

        return act

    methods = {name: action(name) for name in _ACTIONS}
    with patch.multiple(PipelineStage, create=True, **methods):
        yield


def all_microbatches(
    places: list[Place], numbers: np.ndarray, changes: np.ndarray, where: np.ndarray, count: int
) -> tuple[list[Place], np.ndarray, np.ndarray, np.ndarray]:
    """The places and events of a step in which all `count` microbatches ran, from one in which few did.

    Args:
        places: As `Counter.places`.
        numbers: Number of the storage of each event.
        changes: Its change in bytes.
        where: Number of its place.
    """
    begins = [i for i, place in enumerate(places) if place.name in _NAMES]
    end = next(i for i in range(begins[-1], len(places)) if places[i].phase == "optimizer")
    spans = {places[a]: range(a, b) for a, b in zip(begins, [*begins[1:], end], strict=True)}
    left_out = {place for place in spans if not is_run(place.microbatch, count)}
    in_action = np.zeros(len(places) + 1, dtype=bool)  # one more for the place -1
    last_of = np.arange(len(places) + 1)  # number of a place of a microbatch left out -> that of the last one
    for place, span in spans.items():
        in_action[list(span[:-1])] = True
        if place in left_out:
            last_of[span[-1]] = spans[_at(place, place.stage, count - 1)][-1]
    last_of[-1] = -1

    born = np.full(numbers.max() + 1, -1)  # storage -> number of the place of its latest allocation
    of_action = np.zeros(len(numbers), dtype=bool)  # of each event: whether its storage is from an action
    for i, (number, change, place) in enumerate(zip(numbers.tolist(), changes.tolist(), where.tolist(), strict=True)):
        if change > 0:
            born[number] = place
        of_action[i] = in_action[born[number]]
    # What the model leaves to the next microbatch, the last but one leaves to the last.
    where = np.where(of_action, last_of[where], where)

    at = [np.flatnonzero(where == i) for i in range(len(places))] if left_out else []
    longer: list[Place] = []
    events, positions = [np.flatnonzero(where == -1)], [np.full((where == -1).sum(), -1)]

    def add(place: Place, found: np.ndarray) -> None:
        longer.append(place)
        events.append(found)
        positions.append(np.full(len(found), len(longer) - 1))

    i = 0
    while i < len(places):
        if places[i] not in left_out:
            add(places[i], at[i] if left_out else np.flatnonzero(where == i))
            i += 1
            continue
        own, microbatch = spans[places[i]], places[i].microbatch
        model = spans[_at(places[i], places[i].stage, MODEL)]
        for j in model[:-1]:
            add(_at(places[j], places[j].stage, microbatch), at[j])
        freed = at[model[-1]][of_action[at[model[-1]]]]
        add(places[own[-1]], np.concatenate([freed, at[own[-1]]]))
        i = own[-1] + 1
    chosen = np.concatenate(events)
    return longer, numbers[chosen], changes[chosen], np.concatenate(positions)

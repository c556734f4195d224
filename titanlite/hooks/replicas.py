"""Silent corruption: weights that several ranks hold must have the same bits on all of them.

Invariant: a bit that differs is found, at the latest guards.compare_every steps after it changed, and before a save of
that step. A run in which no weight has a copy pays nothing.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.distributed.tensor import DTensor

from titanlite.config.errors import GuardError
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import number_of_copies
from titanlite.runtime.world import gathered


class ReplicaGuard(Hook):
    """Compares the copies every guards.compare_every steps: those of HSDP's replicas, and the norms of tensor ranks."""

    def built(self, training: Training) -> None:
        self._training, self._every = training, training.run.job.guards.compare_every
        self._shared = {  # name of a parameter and place of its shard, which the ranks that hold copies have in common
            (name, _place(parameter)): parameter
            for name, parameter in training.model.named_parameters()
            if number_of_copies(parameter) > 1
        }

    def act(self, step: int, asked: Request) -> None:
        if step % self._every == 0:
            self.compare(step)

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """Compare sums of the bit patterns, which a change of a single element always changes. Waits for the device.

        Raises:
            GuardError: names the ranks that differ from most, with their machines.
        """
        # Of a pipeline, each stage has other parameters, but all or none of the ranks have shared ones.
        sums = [_bits(local_shard(parameter)) for parameter in self._shared.values()]
        if not sums:
            return
        own = dict(zip(self._shared, torch.stack(sums).tolist(), strict=True))
        of_ranks = gathered(own, self._training.mesh.world_group)
        for key in dict.fromkeys(key for sums in of_ranks for key in sums):
            copies = {rank: sums[key] for rank, sums in enumerate(of_ranks) if key in sums}
            (most, count), *others = Counter(copies.values()).most_common()
            if not others:
                continue
            # Where no value has a majority, nobody knows which one is right.
            odd = [rank for rank, value in copies.items() if value != most or 2 * count <= len(copies)]
            named = ", ".join(f"rank {rank} ({self._training.hosts[rank]})" for rank in odd)
            raise GuardError(
                f"Step {step}: {key[0]} should have the same bits on the ranks {', '.join(map(str, copies))}, but "
                f"differs on {named}. Memory, a device or a network has changed them. The step was not saved. Check "
                "that machine before you start again."
            )


def _place(parameter: torch.Tensor) -> tuple[int, ...]:
    """Where this rank is in the dimensions of the mesh over which the parameter is cut."""
    assert isinstance(parameter, DTensor)
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    return tuple(at for at, placement in zip(place, parameter.placements, strict=True) if not placement.is_replicate())


def _bits(shard: torch.Tensor) -> torch.Tensor:
    return shard.view(torch.int32 if shard.itemsize == 4 else torch.int16).sum(dtype=torch.int64)

"""Muon (https://kellerjordan.github.io/posts/muon/) for matrices, with AdamW for all else.

The update of a matrix is its momentum with singular values near 1, times 0.2 sqrt(max(rows, columns)). So it is as
large as one of AdamW, whose rates and decay serve (https://arxiv.org/abs/2502.16982).

Invariant: in each step a matrix is orthogonalized once, whole, by one of the ranks that hold it. Its new value depends
on the old one, its gradient and its momentum, bit for bit, and not on the number of ranks that hold parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config import schema
from titanlite.optim.adamw import local_shard

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # of the page above
ROUND = 2**24
"""Elements that a rank takes together, so that collectives are large. A larger matrix comes alone."""


class Muon(torch.optim.Optimizer):
    """With momentum and Nesterov's look ahead, as `torch.optim.Muon`.

    A step goes in rounds, in each of which every rank owns some matrices. The ranks send their shards of the momentum
    to the owners, in bfloat16, and get back their shards of the results. That traffic overlaps with the matmuls of the
    rounds before and after.

    Args:
        groups: Of matrices that are sharded (DTensor).
        others: The optimizer of the other parameters. Its state and groups become a part of those of this one.
        ranks: Those of the meshes of the matrices, in their order. None: the world.
        compiled: Compile what is done to a shard into two kernels.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        others: torch.optim.Optimizer,
        config: schema.Optimizer,
        state_dtype: torch.dtype,
        ranks: dist.ProcessGroup | None,
        compiled: bool,
    ) -> None:
        super().__init__([*groups, *others.param_groups], {"lr": config.lr})
        self.state |= others.state
        others.state = self.state
        self._others, self._beta, self._ranks = others, config.momentum, ranks
        self._group_of = {matrix: group for group in self.param_groups[: len(groups)] for matrix in group["params"]}
        for matrix in self._group_of:
            self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix, dtype=state_dtype)
        self._rounds = _rounds(list(self._group_of), dist.get_rank(ranks), dist.get_world_size(ranks))
        self._look_ahead: Callable[..., Tensor] = torch.compile(_look_ahead, dynamic=True) if compiled else _look_ahead
        self._apply: Callable[..., None] = torch.compile(_apply, dynamic=True) if compiled else _apply

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter. Nothing is read from the device."""
        skip = getattr(self, "found_inf", None)
        if skip is None:
            skip = torch.zeros((), device=next(iter(self._group_of)).device)
        else:
            self._others.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        coming, returning = [self._gather(self._rounds[0], skip)], list[_Sent]()
        self._others.step()
        for i, own in enumerate(self._rounds):
            gathered = coming.pop().wait()
            coming += [self._gather(following, skip) for following in self._rounds[i + 1 : i + 2]]
            returning.append(self._return(own, gathered))
            if i:
                self._update(self._rounds[i - 1], returning.pop(0).wait(), skip)
        self._update(self._rounds[-1], returning.pop().wait(), skip)

    def _gather(self, own: _Round, skip: Tensor) -> _Sent:
        """Update the momentum of a round's matrices, and send this rank's shards of it to their owners."""
        shards = list[Tensor]()
        for matrix, sends in zip(own.matrices, own.sends, strict=True):
            assert matrix.grad is not None
            flat = [local_shard(tensor).view(-1) for tensor in (matrix.grad, self.state[matrix]["momentum_buffer"])]
            shard = self._look_ahead(*flat, skip, self._beta)
            shards += [shard] if sends else []
        return self._send(shards, own.to_owners, own.from_ranks)

    def _return(self, own: _Round, gathered: Tensor) -> _Sent:
        """Orthogonalize the matrices of a round that this rank owns, and send each rank its shards."""
        pieces, shards = iter(gathered.split(own.pieces)), [list[Tensor]() for _ in own.to_ranks]
        wholes = [torch.empty(m.shape, dtype=gathered.dtype, device=gathered.device) for m in own.owned]
        for rank in own.senders:
            for whole, matrix in zip(wholes, own.owned, strict=True):
                part = _part(whole, matrix, rank)
                part.copy_(next(pieces).view_as(part))
        for i, matrix in enumerate(own.owned):
            wholes[i] = orthogonalized(wholes[i])
            for rank, of_rank in enumerate(shards):
                of_rank.append(_part(wholes[i], matrix, rank).flatten())
        return self._send([shard for of_rank in shards for shard in of_rank], own.to_ranks, own.from_owners)

    def _update(self, own: _Round, returned: Tensor, skip: Tensor) -> None:
        shards = [local_shard(matrix).view(-1) for matrix in own.matrices]
        directions = returned.to(shards[0].device).split([len(shard) for shard in shards])
        for matrix, shard, direction in zip(own.matrices, shards, directions, strict=True):
            group = self._group_of[matrix]
            # Tensors, so that a new rate causes no new compilation.
            lr = torch.tensor(group["lr"], dtype=torch.float32)
            rate, decay = lr * (0.2 * math.sqrt(max(matrix.shape))), 1 - lr * group["weight_decay"]
            self._apply(shard, direction, rate, decay, skip)

    def _send(self, parts: list[Tensor], to: list[int], coming: list[int]) -> _Sent:
        """`to` and `coming` are the numbers of elements for and from each rank. With CPU offload, parts are not where
        matmuls and collectives are."""
        device = next(iter(self._group_of)).device_mesh.device_type  # pyright: ignore[reportAttributeAccessIssue]
        source = (torch.cat(parts) if parts else torch.empty(0, dtype=torch.bfloat16)).to(device)
        result = torch.empty(sum(coming), dtype=source.dtype, device=source.device)
        work = dist.all_to_all_single(result, source, coming, to, self._ranks, async_op=True)
        assert work is not None
        return _Sent(result, source, work)


class _Sent(NamedTuple):
    """A collective on its way. Its `source` must live as long."""

    result: Tensor
    source: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


def _look_ahead(gradient: Tensor, momentum: Tensor, skip: Tensor, beta: float) -> Tensor:
    """Update the momentum of a flat shard; the direction of the step, in bfloat16.

    Products and sums are apart, because eager kernels round them once together where a vector is full and twice where
    it is not, so that bits would depend on the size of the shard.
    """
    gradient = gradient.float()
    new = momentum.float() * beta + gradient * (1 - beta)
    momentum.copy_(torch.where(skip > 0, momentum, new))
    return (new * beta + gradient * (1 - beta)).bfloat16()


def _apply(shard: Tensor, direction: Tensor, rate: Tensor, decay: Tensor, skip: Tensor) -> None:
    """The new value of a flat shard, in place."""
    shard.copy_(torch.where(skip > 0, shard, shard.float() * decay - direction.float() * rate))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Of a matrix U S V^T the matrix U V^T, about: its singular values are near 1 (0.7 to 1.2, by Newton and Schulz's
    iteration in the dtype of the matrix).

    The norm that it begins with is summed row by row, because a sum over all of it would depend on the number of
    threads of a CPU.
    """
    x, (a, b, c) = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix, COEFFICIENTS
    rows = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    x = x / torch.linalg.vector_norm(rows).to(x.dtype).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


# ------------------------------------------------------------------------------------------------------- who owns what


@dataclass(frozen=True)
class _Round:
    """What a rank does in a round. Sizes are numbers of elements.

    Attributes:
        matrices: All of the round, owner by owner.
        sends: Whether this rank sends its shard of each of them: of replicas, only that of the owner does.
        owned: Those that this rank owns.
        senders: The ranks that send it their shards of these.
        pieces: The sizes of these shards, sender by sender.
        to_owners, from_ranks, to_ranks, from_owners: What is sent on the way there and back, rank by rank.
    """

    matrices: list[Any]
    sends: list[bool]
    owned: list[Any]
    senders: list[int]
    pieces: list[int]
    to_owners: list[int]
    from_ranks: list[int]
    to_ranks: list[int]
    from_owners: list[int]


def _rounds(matrices: Sequence[Any], me: int, ranks: int) -> list[_Round]:
    """Give each matrix to an owner, the costliest first and to the one who has least, and cut what an owner has into
    rounds."""
    cost = [0] * ranks
    bins = [[list[DTensor]()] for _ in range(ranks)]  # owner -> round -> matrices
    for matrix in sorted(matrices, key=lambda matrix: -_flops(matrix)):
        owner = cost.index(min(cost))
        cost[owner] += _flops(matrix)
        if sum(each.numel() for each in bins[owner][-1]) >= ROUND:
            bins[owner].append([])
        bins[owner][-1].append(matrix)
    count, found = max(map(len, bins)), []
    for number in range(count):
        by_owner = [own[number] if number < len(own) else [] for own in bins]
        owned, mine = by_owner[me], [[_size(matrix, me) for matrix in own] for own in by_owner]
        copies = [[_replica(m, me) == _replica(m, owner) for m in own] for owner, own in enumerate(by_owner)]
        senders = [r for r in range(ranks) if owned and _replica(owned[0], r) == _replica(owned[0], me)]
        of_ranks = [[_size(matrix, rank) for matrix in owned] for rank in range(ranks)]
        found.append(
            _Round(
                matrices=[matrix for own in by_owner for matrix in own],
                sends=[sends for own in copies for sends in own],
                owned=owned,
                senders=senders,
                pieces=[size for rank in senders for size in of_ranks[rank]],
                to_owners=[sum(a * b for a, b in zip(*own, strict=True)) for own in zip(mine, copies, strict=True)],
                from_ranks=[sum(sizes) * (rank in senders) for rank, sizes in enumerate(of_ranks)],
                to_ranks=[sum(sizes) for sizes in of_ranks],
                from_owners=[sum(own) for own in mine],
            )
        )
    return found


def _flops(matrix: Tensor) -> int:
    """Of an iteration."""
    short, long = sorted(matrix.shape)
    return 4 * short * short * long + 2 * short**3


def _part(whole: Tensor, like: Any, rank: int) -> Tensor:
    """The part of a matrix that a rank of the mesh has, as a view. The last dimension of the mesh cuts first (see
    `keep_shard`)."""
    for size, placement in zip(reversed(like.device_mesh.shape), reversed(like.placements), strict=True):
        rank, place = divmod(rank, size)
        if not placement.is_replicate():
            parts = whole.chunk(size, placement.dim)
            whole = parts[place] if place < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def _size(matrix: Any, rank: int) -> int:
    return _part(torch.empty(matrix.shape, device="meta"), matrix, rank).numel()


def _replica(matrix: Any, rank: int) -> int:
    """Which of the copies of a matrix a rank of the mesh has a part of."""
    number = 0
    for size, placement in zip(reversed(matrix.device_mesh.shape), reversed(matrix.placements), strict=True):
        rank, place = divmod(rank, size)
        number = number * size + place if placement.is_replicate() else number
    return number

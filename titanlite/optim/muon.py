"""Muon (https://kellerjordan.github.io/posts/muon/) for matrices, with AdamW for other parameters.

Each step combines the momentum of a matrix and its gradient into a Nesterov direction. The update
is the orthogonalized direction. Its learning rate is scaled by 0.2 * sqrt(max(rows, columns)), so
that the weights change as much as with AdamW, and AdamW learning rates and weight decay carry over
(https://arxiv.org/abs/2502.16982).

Each matrix has an owner, which is one of the ranks that hold a shard of the matrix. In every step
the owner gathers the direction of the whole matrix, orthogonalizes it, and sends each rank its
shard of the update. Matrices are processed in rounds, so that only a few whole matrices exist at
once.

Invariant: The new value of a matrix depends, bit for bit, only on its old value, its gradient and
its momentum. It does not depend on the number of ranks that share the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.optim.adamw import Groups, Recipe, shard_slices
from titanlite.optim.clip import local_shard

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # from the page linked above
NEWTON_SCHULZ_ITERATIONS = 5
EPS = 1e-7
ADAMW_UPDATE_RMS = 0.2
"""Typical root mean square of an AdamW update, to which updates are scaled
(https://arxiv.org/abs/2502.16982)."""
ROUND_NUMEL = 2**24
"""An owner starts a new round when its current round has at least this many elements, so that
collectives are large."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for sharded matrices.

    The result matches `torch.optim.Muon`. A step is divided into rounds in which every rank owns a
    few matrices. Ranks send their shards of the Nesterov directions to the owners in bfloat16 and
    receive their shards of the orthogonalized updates. This communication overlaps with the matmuls
    of neighboring rounds.

    Args:
        groups: Parameter groups of the matrices, which must be DTensors.
        adamw: Optimizer of all other parameters. Its groups and state become part of this
            optimizer.
        recipe: Options of the optimizer, the dtype of the momentum, and whether to compile the
            elementwise part of the update into two kernels. `recipe.ranks` are the ranks of the
            device mesh of the matrices, in mesh order.
    """

    found_inf: Tensor | None = None
    """Scalar tensor on the device, 1 to skip the step. None never skips."""

    def __init__(self, groups: Groups, adamw: torch.optim.Optimizer, recipe: Recipe) -> None:
        super().__init__([*groups, *adamw.param_groups], {"lr": recipe.config.lr})
        # Both optimizers share the groups and the state of the other parameters.
        self.state |= adamw.state
        adamw.state = self.state
        self._adamw = adamw
        self._beta = recipe.config.momentum
        self._ranks = recipe.ranks

        self._group_of_matrix: dict[Any, dict[str, Any]] = {}
        for group in self.param_groups[: len(groups)]:  # the groups of the matrices
            for matrix in group["params"]:
                self._group_of_matrix[matrix] = group
                momentum_buffer = torch.zeros_like(matrix, dtype=recipe.state_dtype)
                self.state[matrix]["momentum_buffer"] = momentum_buffer

        matrices = list(self._group_of_matrix)
        # With CPU offload, the shards are on the CPU, but the mesh and its collectives use the GPU.
        self._shard_device: torch.device = matrices[0].device
        self._collective_device: str = matrices[0].device_mesh.device_type
        rank = dist.get_rank(recipe.ranks)
        rounds_of_owner = _assign_owners(matrices, dist.get_world_size(recipe.ranks))
        # An owner with fewer rounds owns no matrix in the last rounds.
        rounds = zip_longest(*rounds_of_owner, fillvalue=[])
        self._rounds = [_plan_round(matrices_of_owner, rank) for matrices_of_owner in rounds]
        self._accumulate_momentum: Callable[..., Tensor] = _accumulate_momentum_
        self._apply_update: Callable[..., None] = _apply_update_
        if recipe.compiles_elementwise:
            self._accumulate_momentum = torch.compile(_accumulate_momentum_, dynamic=True)
            self._apply_update = torch.compile(_apply_update_, dynamic=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter, without a host sync.

        Matrices are updated in rounds; see `_run_rounds`. AdamW updates all other parameters while
        the directions of the first round are gathered.

        To skip the step on the device, set the attribute `found_inf` to a scalar tensor of 1.
        Parameters and state then keep their values.
        """
        skip = self.found_inf
        if skip is None:
            skip = torch.zeros((), device=self._shard_device)

        first_gather = self._start_gather(self._rounds[0], skip)
        self._adamw.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        self._adamw.step()
        self._run_rounds(first_gather, skip)

    def _run_rounds(self, first_gather: _Transfer, skip: Tensor) -> None:
        """Orthogonalize the directions of all rounds, and update their matrices.

        In each round, the owners gather the directions, orthogonalize them and scatter the updates.
        Then all ranks update their shards. Transfers run in the background, while the matmuls of
        other rounds run. With rounds 0, 1 and 2:

            orthogonalize | transfers meanwhile      | then update
            round 0       | gather 1                 |
            round 1       | gather 2, scatter 0      | round 0
            round 2       | scatter 1                | round 1
                          | scatter 2                | round 2

        Args:
            first_gather: Transfer that gathers the directions of round 0.
            skip: Scalar tensor, 1 to leave the parameters unchanged.
        """
        rounds = self._rounds
        last = len(rounds) - 1
        # Transfers in progress, by index of the round
        gathers = {0: first_gather}
        scatters: dict[int, _Transfer] = {}

        for index, plan in enumerate(rounds):
            gathered = gathers.pop(index).wait()
            # Start the gather of the next round first, so that it overlaps with the matmuls.
            if index < last:
                gathers[index + 1] = self._start_gather(rounds[index + 1], skip)
            scatters[index] = self._orthogonalize_and_scatter(plan, gathered)

            # The scatter of the previous round has overlapped with the matmuls.
            if index > 0:
                self._update_matrices(rounds[index - 1], scatters.pop(index - 1).wait(), skip)

        # No matmuls are left to overlap with the last scatter.
        self._update_matrices(rounds[last], scatters.pop(last).wait(), skip)

    def _start_gather(self, plan: _RoundPlan, skip: Tensor) -> _Transfer:
        """Update the momentum of each matrix in a round, and start to send directions to owners.

        The Nesterov direction of a matrix combines the new momentum with the gradient. The owner of
        a matrix is the rank that orthogonalizes this direction.
        """
        sent_matrices = {shard.matrix for shard in chain.from_iterable(plan.gather.sent_to)}
        directions = []  # in the order of `plan.gather.sent_to`: both are ordered by owner
        for matrix in plan.matrices:
            direction = self._update_momentum(matrix, skip)
            # With HSDP, several ranks hold and update the same shard, but only one sends it.
            if matrix in sent_matrices:
                directions.append(direction)
        return self._start_transfer(directions, plan.gather)

    def _update_momentum(self, matrix: Any, skip: Tensor) -> Tensor:
        """Update this rank's momentum shard of a matrix, and return its flat Nesterov direction."""
        assert matrix.grad is not None
        gradient = local_shard(matrix.grad).view(-1)
        momentum = local_shard(self.state[matrix]["momentum_buffer"]).view(-1)
        return self._accumulate_momentum(gradient, momentum, skip, self._beta)

    def _orthogonalize_and_scatter(self, plan: _RoundPlan, gathered: Tensor) -> _Transfer:
        """Orthogonalize directions into updates, and start to send each rank its update shards.

        Args:
            plan: Communication plan of the round.
            gathered: Flat shards of the directions, received by the transfer from `_start_gather`.
        """
        # Keep no reference to the whole directions, which use as much memory as the updates.
        updates = {
            matrix: orthogonalize(direction)
            for matrix, direction in _assemble_directions(plan, gathered).items()
        }
        shards = chain.from_iterable(plan.scatter.sent_to)
        sent = [updates[shard.matrix][shard.slices].flatten() for shard in shards]
        return self._start_transfer(sent, plan.scatter)

    def _update_matrices(self, plan: _RoundPlan, received: Tensor, skip: Tensor) -> None:
        """Apply the orthogonalized updates of a round to this rank's shards.

        Args:
            plan: Communication plan of the round.
            received: Flat updates of the shards, in the order of `plan.matrices`. Result of the
                transfer from `_orthogonalize_and_scatter`.
            skip: Scalar tensor, 1 to leave the parameters unchanged.
        """
        shards = [local_shard(matrix).view(-1) for matrix in plan.matrices]
        updates = received.to(shards[0].device).split([len(shard) for shard in shards])
        for matrix, shard, update in zip(plan.matrices, shards, updates, strict=True):
            group = self._group_of_matrix[matrix]
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # a new float would recompile
            # A matrix whose singular values are 1 has the root mean square 1 / sqrt(longer side).
            scaled_lr = lr * (ADAMW_UPDATE_RMS * math.sqrt(max(matrix.shape)))
            decay = 1 - lr * group["weight_decay"]
            self._apply_update(shard, update, scaled_lr, decay, skip)

    def _start_transfer(self, tensors: list[Tensor], plan: _TransferPlan) -> _Transfer:
        """Start an all-to-all, in which each rank sends tensors to every rank.

        Args:
            tensors: Flat bfloat16 tensors, one for each shard in `plan.sent_to`, in this order.
            plan: Shards to send and to receive.
        """
        received_sizes = _count_elements(plan.received_from)
        # A rank with nothing to send takes part with an empty tensor.
        source = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.bfloat16)
        source = source.to(self._collective_device)
        result = torch.empty(sum(received_sizes), dtype=source.dtype, device=source.device)
        work = dist.all_to_all_single(
            result,
            source,
            output_split_sizes=received_sizes,
            input_split_sizes=_count_elements(plan.sent_to),
            group=self._ranks,
            async_op=True,
        )
        assert work is not None
        return _Transfer(result, source, work)


@dataclass
class _Transfer:
    """An all-to-all in progress.

    Attributes:
        result: Received elements, which are valid after `wait`.
        source: Elements to send, kept in memory until the collective has read them.
        work: Handle of the collective. With gloo, it also keeps the sent elements in memory.
    """

    result: Tensor
    source: Tensor | None
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Wait for the collective, free the sent elements, and return the received elements."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.source = None
        return self.result


def _assemble_directions(plan: _RoundPlan, gathered: Tensor) -> dict[DTensor, Tensor]:
    """Assemble the whole Nesterov direction of each matrix in `plan.owned`, as a plain tensor.

    Args:
        plan: Communication plan of the round. This rank orthogonalizes the matrices in `owned`.
        gathered: Flat shards of the directions, in the order of `plan.gather.received_from`.
    """
    directions = {
        matrix: torch.empty(matrix.shape, dtype=gathered.dtype, device=gathered.device)
        for matrix in plan.owned
    }
    shards = list(chain.from_iterable(plan.gather.received_from))
    parts = gathered.split([shard.numel for shard in shards])
    for shard, part in zip(shards, parts, strict=True):
        destination = directions[shard.matrix][shard.slices]  # a view of the whole direction
        destination.copy_(part.view_as(destination))
    return directions


def _accumulate_momentum_(gradient: Tensor, momentum: Tensor, skip: Tensor, beta: float) -> Tensor:
    """Update the momentum of a flat shard in place and return the Nesterov direction in bfloat16.

    Args:
        gradient: Gradient of the shard, shape (N,).
        momentum: Momentum of the shard, shape (N,).
        skip: Scalar tensor, 1 to leave the momentum unchanged.
        beta: Momentum coefficient.
    """
    # No `lerp`: CPU kernels fuse its multiply-add only in full vector registers, so the result
    # would depend on the size of the shard.
    gradient = gradient.float()
    new_momentum = momentum.float() * beta + gradient * (1 - beta)
    momentum.copy_(torch.where(skip > 0, momentum, new_momentum))
    direction = new_momentum * beta + gradient * (1 - beta)
    return direction.bfloat16()


def _apply_update_(shard: Tensor, update: Tensor, lr: Tensor, decay: Tensor, skip: Tensor) -> None:
    """Apply weight decay and the orthogonalized update to a flat shard, in place.

    Args:
        shard: Shard of the matrix, shape (N,).
        update: Orthogonalized update of the shard, shape (N,).
        lr: Learning rate, including the scale of the matrix.
        decay: Factor by which the shard is multiplied first, such as 0.9999.
        skip: Scalar tensor, 1 to leave the shard unchanged.
    """
    new_shard = shard.float() * decay - update.float() * lr
    shard.copy_(torch.where(skip > 0, shard, new_shard))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of `matrix`, but singular values close to 1.

    For a matrix with the singular value decomposition U S V^T, the exact result is U V^T. The
    Newton-Schulz iteration approximates it using only matmuls, with singular values between about
    0.7 and 1.2. It runs in the dtype of `matrix`.

    Args:
        matrix: Matrix of shape (rows, columns), for example the direction of a weight.
    """
    # Transpose a tall matrix, so that the product x x^T below is as small as possible.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix

    # Divide by the norm, because the iteration needs singular values of at most 1. A single sum
    # over all elements would depend on the number of CPU threads; row sums do not.
    row_norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    norm = torch.linalg.vector_norm(row_norms).to(x.dtype)
    x = x / norm.clamp(min=EPS)

    # Each iteration moves all singular values closer to 1.
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # b * gram + c * gram @ gram
        x = torch.addmm(x, polynomial, x, beta=a)  # a * x + polynomial @ x
    return x.T if is_tall else x


# Ownership: which rank orthogonalizes which matrix, and what is sent where.


@dataclass(frozen=True)
class _Shard:
    """Part of a matrix that one rank holds.

    Attributes:
        matrix: The whole matrix.
        slices: Rows and columns of the shard.
    """

    matrix: DTensor
    slices: tuple[slice, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(part.stop - part.start for part in self.slices)


@dataclass(frozen=True)
class _TransferPlan:
    """The shards that this rank sends and receives in an all-to-all.

    Attributes:
        sent_to: Shards to send to each rank.
        received_from: Shards to receive from each rank.
    """

    sent_to: list[list[_Shard]]
    received_from: list[list[_Shard]]


@dataclass(frozen=True)
class _RoundPlan:
    """Communication plan of this rank for a round, in which a set of matrices is updated.

    Attributes:
        matrices: All matrices of the round, ordered by owner.
        owned: The matrices that this rank owns, which means that it orthogonalizes them.
        gather: Transfer of the Nesterov directions to the owners.
        scatter: Transfer of the orthogonalized updates from the owners to all ranks.
    """

    matrices: list[DTensor]
    owned: list[DTensor]
    gather: _TransferPlan
    scatter: _TransferPlan


def _assign_owners(matrices: Sequence[DTensor], num_ranks: int) -> list[list[list[DTensor]]]:
    """Assign each matrix, largest first, to the rank with the least work so far.

    To limit its memory, an owner processes its matrices in rounds of about `ROUND_NUMEL` elements.

    Args:
        matrices: All matrices that Muon updates, in the same order on every rank.
        num_ranks: Number of ranks in the device mesh.

    Returns:
        Lists of matrices, indexed by owner and round: `result[owner][round]`.
    """
    flops_of_rank = [0] * num_ranks
    rounds_of_owner: list[list[list[DTensor]]] = [[[]] for _ in range(num_ranks)]
    for matrix in sorted(matrices, key=_iteration_flops, reverse=True):
        # Choose the rank with the least work.
        owner = flops_of_rank.index(min(flops_of_rank))
        flops_of_rank[owner] += _iteration_flops(matrix)

        # Add the matrix to the last round of its owner, or to a new round if that one is full.
        rounds = rounds_of_owner[owner]
        last_round_numel = sum(assigned.numel() for assigned in rounds[-1])
        if last_round_numel >= ROUND_NUMEL:
            rounds.append([])
        rounds[-1].append(matrix)
    return rounds_of_owner


def _plan_round(matrices_of_owner: Sequence[list[DTensor]], this_rank: int) -> _RoundPlan:
    """Plan the two transfers of a round: the gather to the owners, and the scatter to all ranks.

    Args:
        matrices_of_owner: The matrices of the round, indexed by owner.
        this_rank: Index of this rank in the flattened device mesh.
    """
    return _RoundPlan(
        matrices=list(chain.from_iterable(matrices_of_owner)),
        owned=matrices_of_owner[this_rank],
        gather=_plan_gather(matrices_of_owner, this_rank),
        scatter=_plan_scatter(matrices_of_owner, this_rank),
    )


def _plan_gather(matrices_of_owner: Sequence[list[DTensor]], this_rank: int) -> _TransferPlan:
    """Plan the transfer in which the owner of each matrix gathers its shards.

    For example, two ranks hold shards of the matrices A and B. Rank 0 owns A, and rank 1 owns B.
    Rank 0 sends its shard of A to itself and its shard of B to rank 1, and receives both shards of
    A.
    """
    owned = matrices_of_owner[this_rank]
    return _TransferPlan(
        sent_to=[
            _gathered_shards(matrices, sender=this_rank, owner=owner)
            for owner, matrices in enumerate(matrices_of_owner)
        ],
        received_from=[
            _gathered_shards(owned, sender=rank, owner=this_rank)
            for rank in range(len(matrices_of_owner))
        ],
    )


def _plan_scatter(matrices_of_owner: Sequence[list[DTensor]], this_rank: int) -> _TransferPlan:
    """Plan the transfer in which the owner of each matrix sends every rank its shard.

    For example, rank 0 owns matrix A, and rank 1 owns matrix B. Rank 0 sends each rank its shard of
    A, and receives its own shards of A and B.
    """
    owned = matrices_of_owner[this_rank]
    return _TransferPlan(
        sent_to=[_shards_of_rank(owned, rank) for rank in range(len(matrices_of_owner))],
        received_from=[_shards_of_rank(matrices, this_rank) for matrices in matrices_of_owner],
    )


def _count_elements(shards_by_rank: list[list[_Shard]]) -> list[int]:
    """Return the number of elements of the shards of each rank."""
    return [sum(shard.numel for shard in shards) for shards in shards_by_rank]


def _iteration_flops(matrix: Tensor) -> int:
    """Return the FLOPs of one Newton-Schulz iteration for a matrix, to balance work over ranks."""
    short, long = sorted(matrix.shape)
    return 4 * short * short * long + 2 * short**3


def _shards_of_rank(matrices: Sequence[DTensor], rank: int) -> list[_Shard]:
    """Return the shard that a rank holds of each matrix."""
    return [_Shard(matrix, shard_slices(matrix, _coordinates(matrix, rank))) for matrix in matrices]


def _gathered_shards(matrices: Sequence[DTensor], sender: int, owner: int) -> list[_Shard]:
    """Return the shards that `sender` sends to `owner`, which gathers the whole matrices.

    If a matrix has replicas, only the ranks in the replica of its owner send their shards. With
    HSDP on 4 ranks, for example, ranks 0 and 1 hold one replica, and ranks 2 and 3 hold another. If
    rank 3 is the owner, ranks 2 and 3 send their shards.
    """
    sent = [matrix for matrix in matrices if _are_in_same_replica(matrix, sender, owner)]
    return _shards_of_rank(sent, sender)


def _are_in_same_replica(matrix: DTensor, rank: int, other_rank: int) -> bool:
    """Return whether the shards of two ranks belong to the same replica of a matrix.

    This is the case if both ranks have the same coordinate along each mesh dimension that
    replicates the matrix.
    """
    coordinates = _coordinates(matrix, rank)
    other_coordinates = _coordinates(matrix, other_rank)
    mesh_dims = zip(matrix.placements, coordinates, other_coordinates, strict=True)
    return all(a == b for placement, a, b in mesh_dims if placement.is_replicate())


def _coordinates(matrix: DTensor, rank: int) -> list[int]:
    """Return the position of a rank along each dimension of the device mesh of a matrix."""
    return list(map(int, np.unravel_index(rank, matrix.device_mesh.shape)))

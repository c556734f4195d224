"""Muon (https://kellerjordan.github.io/posts/muon/) for matrices, with AdamW for other parameters.

The update of a matrix is its orthogonalized momentum, scaled by 0.2 * sqrt(max(rows, columns)).
This gives the update the size of an AdamW update, so AdamW learning rates and weight decay carry
over (https://arxiv.org/abs/2502.16982).

Each matrix has an owner, which is one of the ranks that hold a shard of the matrix. In every step
the owner gathers the momentum of the whole matrix, orthogonalizes it, and sends each rank its shard
of the result. Matrices are processed in rounds, so that only a few whole matrices exist at once.

Invariant: The new value of a matrix depends, bit for bit, only on its old value, its gradient and
its momentum. It does not depend on the number of ranks that share the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

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
ROUND_NUMEL = 2**24
"""An owner starts a new round when its current round has at least this many elements, so that
collectives are large."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for sharded matrices.

    The result matches `torch.optim.Muon`. A step is divided into rounds in which every rank owns a
    few matrices. Ranks send their momentum shards to the owners in bfloat16 and receive their
    shards of the orthogonalized result. This communication overlaps with the matmuls of neighboring
    rounds.

    Args:
        groups: Parameter groups of the matrices, which must be DTensors.
        others: Optimizer of all other parameters. Its groups and state become part of this
            optimizer.
        recipe: Options of the optimizer, the dtype of the momentum, and whether to compile the
            elementwise part of the update into two kernels. `recipe.ranks` are the ranks of the
            device mesh of the matrices, in mesh order.
    """

    def __init__(self, groups: Groups, others: torch.optim.Optimizer, recipe: Recipe) -> None:
        super().__init__([*groups, *others.param_groups], {"lr": recipe.config.lr})
        # Both optimizers share the groups and the state of the other parameters.
        self.state |= others.state
        others.state = self.state
        self._others = others
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
        self._collective_device: str = matrices[0].device_mesh.device_type
        rank = dist.get_rank(recipe.ranks)
        rounds_of_owner = _assign_owners(matrices, dist.get_world_size(recipe.ranks))
        # An owner with fewer rounds owns no matrix in the last rounds.
        rounds = zip_longest(*rounds_of_owner, fillvalue=[])
        self._rounds = [_plan_round(by_owner, rank) for by_owner in rounds]
        self._accumulate_momentum: Callable[..., Tensor] = _accumulate_momentum_
        self._apply_update: Callable[..., None] = _apply_update_
        if recipe.compiles_elementwise:
            self._accumulate_momentum = torch.compile(_accumulate_momentum_, dynamic=True)
            self._apply_update = torch.compile(_apply_update_, dynamic=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter, without a host sync.

        To skip the step on the device, set the attribute `found_inf` to a scalar tensor of 1.
        Parameters and state then keep their values.
        """
        # If the caller has not set `found_inf`, never skip. Create the zero flag only in this case,
        # because creating it launches a kernel.
        skip = getattr(self, "found_inf", None)
        if skip is None:
            matrix = next(iter(self._group_of_matrix))
            skip = torch.zeros((), device=matrix.device)
        self._others.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]

        # Update the other parameters while the momentum of the first round is gathered.
        first_gather = self._start_round(self._rounds[0], skip)
        self._others.step()
        self._run_rounds(first_gather, skip)

    def _run_rounds(self, first_gather: _Transfer, skip: Tensor) -> None:
        """Orthogonalize the momentum of all rounds, and update their matrices.

        Gather the momentum on the owners of the matrices, orthogonalize it there, and return the
        results. Transfers overlap with matmuls. With rounds 0, 1 and 2, the three loop iterations
        and the final update do this:

            orthogonalize | transfers meanwhile      | then update
            round 0       | gather 1                 |
            round 1       | gather 2, return 0       | round 0
            round 2       | return 1                 | round 1
                          | return 2                 | round 2

        Args:
            first_gather: Transfer of the first round, from `_start_round`.
            skip: Scalar tensor, 1 to leave the parameters unchanged.
        """
        last = len(self._rounds) - 1
        gathers = {0: first_gather}  # transfers in progress, by round
        returns: dict[int, _Transfer] = {}
        for i, plan in enumerate(self._rounds):
            momenta = gathers.pop(i).wait()
            if i < last:
                gathers[i + 1] = self._start_round(self._rounds[i + 1], skip)
            returns[i] = self._orthogonalize_and_return(plan, momenta)
            if i > 0:
                self._update(self._rounds[i - 1], returns.pop(i - 1), skip)

        self._update(self._rounds[last], returns.pop(last), skip)

    def _start_round(self, plan: _RoundPlan, skip: Tensor) -> _Transfer:
        """Update this rank's momentum shards, and start sending them to the owners of the matrices.

        The owner of a matrix is the rank that orthogonalizes it.

        Args:
            plan: Communication plan of the round: its matrices, and what each rank sends and
                receives.
            skip: Scalar tensor, 1 to leave the momentum unchanged.

        Returns:
            The all-to-all in progress. Its result holds the shards of the matrices that this rank
            owns, ordered by sending rank.
        """
        # With HSDP several ranks hold and update the same shard, but only one of them sends it.
        sent_directions: list[list[Tensor]] = [[] for _ in plan.numel_from_ranks]  # by owner
        for matrix, receiver in zip(plan.matrices, plan.receivers, strict=True):
            assert matrix.grad is not None
            gradient = local_shard(matrix.grad).view(-1)
            momentum = local_shard(self.state[matrix]["momentum_buffer"]).view(-1)
            # Update `momentum` in place, and compute the Nesterov direction.
            direction = self._accumulate_momentum(gradient, momentum, skip, self._beta)
            if receiver is not None:
                sent_directions[receiver].append(direction)
        return self._start_transfer(sent_directions, plan.numel_from_ranks)

    def _orthogonalize_and_return(self, plan: _RoundPlan, gathered: Tensor) -> _Transfer:
        """Orthogonalize the matrices that this rank owns and start sending every rank its shards.

        Args:
            plan: Communication plan of the round.
            gathered: Result of the transfer from `_start_round`.

        Returns:
            The all-to-all in progress. Its result holds this rank's shards, ordered by owner.
        """
        # Do not keep the momenta, which use as much memory as the directions.
        directions = [orthogonalize(momentum) for momentum in _assemble_owned(plan, gathered)]
        # Results are sent to the ranks of all replicas.
        shards: list[list[Tensor]] = [[] for _ in plan.numel_from_owners]  # by receiving rank
        for rank, rank_shards in enumerate(shards):
            for direction, matrix in zip(directions, plan.owned, strict=True):
                rank_shards.append(direction[shard_slices(matrix, rank)].flatten())
        return self._start_transfer(shards, plan.numel_from_owners)

    def _update(self, plan: _RoundPlan, result: _Transfer, skip: Tensor) -> None:
        """Wait for the orthogonalized momentum of a round, and apply it to this rank's shards.

        Args:
            plan: Communication plan of the round.
            result: Transfer from `_orthogonalize_and_return`.
            skip: Scalar tensor, 1 to leave the parameters unchanged.
        """
        shards = [local_shard(matrix).view(-1) for matrix in plan.matrices]
        directions = result.wait().to(shards[0].device).split([len(shard) for shard in shards])
        for matrix, shard, direction in zip(plan.matrices, shards, directions, strict=True):
            group = self._group_of_matrix[matrix]
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # a new float would recompile
            scaled_lr = lr * (0.2 * math.sqrt(max(matrix.shape)))
            decay = 1 - lr * group["weight_decay"]
            self._apply_update(shard, direction, scaled_lr, decay, skip)

    def _start_transfer(
        self, tensors_by_rank: list[list[Tensor]], numel_from: list[int]
    ) -> _Transfer:
        """Start an all-to-all that sends tensors to every rank.

        Args:
            tensors_by_rank: Flat bfloat16 tensors to send to each rank.
            numel_from: Number of elements to receive from each rank.
        """
        tensors = list(chain.from_iterable(tensors_by_rank))
        # A rank with nothing to send takes part with an empty tensor.
        source = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.bfloat16)
        source = source.to(self._collective_device)
        result = torch.empty(sum(numel_from), dtype=source.dtype, device=source.device)
        work = dist.all_to_all_single(
            result,
            source,
            output_split_sizes=numel_from,
            input_split_sizes=[sum(map(len, part)) for part in tensors_by_rank],
            group=self._ranks,
            async_op=True,
        )
        assert work is not None
        return _Transfer(result, source, work)


class _Transfer(NamedTuple):
    """An all-to-all in progress.

    Attributes:
        result: Received elements, which are valid after `wait`.
        source: Elements to send, kept alive because the collective still reads them.
        work: Handle of the collective.
    """

    result: Tensor
    source: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Wait for the collective and return the received elements."""
        self.work.wait()
        return self.result


def _assemble_owned(plan: _RoundPlan, gathered: Tensor) -> list[Tensor]:
    """Assemble the whole momentum of each matrix that this rank owns, as plain tensors.

    Args:
        plan: Communication plan of the round.
        gathered: Momentum shards, ordered by sending rank, then by matrix.
    """
    momenta = [
        torch.empty(matrix.shape, dtype=gathered.dtype, device=gathered.device)
        for matrix in plan.owned
    ]
    # These are views, so copying the received shards into them fills the momenta.
    shards = [momenta[i][shard_slices(plan.owned[i], rank)] for rank, i in plan.received]
    received_shards = gathered.split([shard.numel() for shard in shards])
    for shard, received_shard in zip(shards, received_shards, strict=True):
        shard.copy_(received_shard.view_as(shard))
    return momenta


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


def _apply_update_(
    shard: Tensor, direction: Tensor, lr: Tensor, decay: Tensor, skip: Tensor
) -> None:
    """Update a flat shard in place, with weight decay and the orthogonalized momentum.

    Args:
        shard: Shard of the matrix, shape (N,).
        direction: Orthogonalized momentum of the shard, shape (N,).
        lr: Learning rate, including the scale of the matrix.
        decay: Factor by which the shard is multiplied first, such as 0.9999.
        skip: Scalar tensor, 1 to leave the shard unchanged.
    """
    updated = shard.float() * decay - direction.float() * lr
    shard.copy_(torch.where(skip > 0, shard, updated))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of `matrix`, but singular values close to 1.

    For a matrix with the singular value decomposition U S V^T, the exact result is U V^T. The
    Newton-Schulz iteration approximates it using only matmuls, with singular values between about
    0.7 and 1.2. It runs in the dtype of `matrix`.

    Args:
        matrix: Matrix of shape (rows, columns), for example the momentum of a weight.
    """
    # Transpose a tall matrix, so that the product x x^T below is as small as possible.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix

    # Divide by the norm, because the iteration needs singular values of at most 1. A single sum
    # over all elements would depend on the number of CPU threads; row sums do not.
    row_norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    norm = torch.linalg.vector_norm(row_norms).to(x.dtype)
    x = x / norm.clamp(min=EPS)

    # Each iteration computes x = a x + (b G + c G^2) x with G = x x^T, which moves all singular
    # values closer to 1.
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


# Ownership: which rank orthogonalizes which matrix, and what is sent where.


@dataclass(frozen=True)
class _RoundPlan:
    """Communication plan of one round, as seen by one rank.

    Attributes:
        matrices: All matrices of the round, ordered by owner.
        receivers: For each of `matrices`, its owner if this rank sends its shard to the owner, or
            None. If several ranks hold replicas of a shard, only the ranks in the replica of the
            owner send.
        owned: The matrices that this rank owns.
        received: Sending rank and index in `owned` of each shard that this rank receives.
        numel_from_ranks: Number of momentum elements that this rank receives from each rank.
        numel_from_owners: Number of elements of the result that this rank receives from each rank.
    """

    matrices: list[Any]
    receivers: list[int | None]
    owned: list[Any]
    received: list[tuple[int, int]]
    numel_from_ranks: list[int]
    numel_from_owners: list[int]


def _assign_owners(matrices: Sequence[DTensor], num_ranks: int) -> list[list[list[DTensor]]]:
    """Assign each matrix, largest first, to the rank with the least work so far.

    An owner processes its matrices in rounds of about `ROUND_NUMEL` elements, to limit its memory.

    Args:
        matrices: All matrices that Muon updates, in the same order on every rank.
        num_ranks: Number of ranks in the device mesh.

    Returns:
        Lists of matrices, indexed by owner and round: `result[owner][round]`.
    """
    work = [0] * num_ranks
    rounds_of_owner: list[list[list[DTensor]]] = [[[]] for _ in range(num_ranks)]
    for matrix in sorted(matrices, key=_iteration_flops, reverse=True):
        owner = work.index(min(work))
        work[owner] += _iteration_flops(matrix)

        rounds = rounds_of_owner[owner]
        last_round_numel = sum(other.numel() for other in rounds[-1])
        if last_round_numel >= ROUND_NUMEL:
            rounds.append([])
        rounds[-1].append(matrix)
    return rounds_of_owner


def _plan_round(by_owner: Sequence[list[DTensor]], this_rank: int) -> _RoundPlan:
    """Plan what this rank sends and receives in one round of a step.

    In a round, the owner of each matrix gathers its momentum and sends back the update.

    Args:
        by_owner: The matrices of the round, indexed by owner.
        this_rank: Index of this rank in the flattened device mesh.
    """
    matrices: list[DTensor] = []
    receivers: list[int | None] = []
    numel_from_owners: list[int] = []
    for owner, owner_matrices in enumerate(by_owner):
        for matrix in owner_matrices:
            matrices.append(matrix)
            is_sender = _are_in_same_replica(matrix, this_rank, owner)
            receivers.append(owner if is_sender else None)
        numel_from_owners.append(sum(_shard_numel(matrix, this_rank) for matrix in owner_matrices))

    # As an owner, this rank receives each matrix from the ranks in its replica of the matrix. With
    # tensor parallelism, a plugin can replicate some of the matrices and shard the others.
    owned = by_owner[this_rank]
    received: list[tuple[int, int]] = []
    numel_from_ranks = [0] * len(by_owner)
    for rank in range(len(by_owner)):
        for i, matrix in enumerate(owned):
            if _are_in_same_replica(matrix, rank, this_rank):
                received.append((rank, i))
                numel_from_ranks[rank] += _shard_numel(matrix, rank)

    return _RoundPlan(matrices, receivers, owned, received, numel_from_ranks, numel_from_owners)


def _iteration_flops(matrix: Tensor) -> int:
    """Return the FLOPs of one Newton-Schulz iteration for a matrix, to balance work over ranks."""
    short, long = sorted(matrix.shape)
    return 4 * short * short * long + 2 * short**3


def _shard_numel(matrix: DTensor, rank: int) -> int:
    """Return the number of elements of `matrix` that a rank holds."""
    return math.prod(part.stop - part.start for part in shard_slices(matrix, rank))


def _are_in_same_replica(matrix: DTensor, rank: int, other_rank: int) -> bool:
    """Return whether the shards of two ranks belong to the same replica of a matrix.

    This is the case if both ranks have the same coordinate along each mesh dimension that
    replicates the matrix.
    """
    shape = matrix.device_mesh.shape
    coordinates = np.unravel_index(rank, shape)
    other_coordinates = np.unravel_index(other_rank, shape)
    mesh_dims = zip(matrix.placements, coordinates, other_coordinates, strict=True)
    return all(a == b for placement, a, b in mesh_dims if placement.is_replicate())

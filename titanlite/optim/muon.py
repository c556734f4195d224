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
        the momentum of the first round is gathered.

        To skip the step on the device, set the attribute `found_inf` to a scalar tensor of 1.
        Parameters and state then keep their values.
        """
        skip = self.found_inf
        if skip is None:
            skip = torch.zeros((), device=self._shard_device)

        first_gather = self._update_momenta_and_start_gather(self._rounds[0], skip)
        self._adamw.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        self._adamw.step()
        self._run_rounds(first_gather, skip)

    def _run_rounds(self, first_gather: _Transfer, skip: Tensor) -> None:
        """Orthogonalize the momentum of all rounds, and update their matrices.

        A round has three stages: its owners gather the momentum, they orthogonalize it and return
        the result, and all ranks update their shards. Transfers run in the background until `wait`
        is called, so they overlap with the matmuls of other rounds. With rounds 0, 1 and 2:

            orthogonalize | transfers meanwhile      | then update
            round 0       | gather 1                 |
            round 1       | gather 2, return 0       | round 0
            round 2       | return 1                 | round 1
                          | return 2                 | round 2

        Args:
            first_gather: Transfer of the first round, from `_update_momenta_and_start_gather`.
            skip: Scalar tensor, 1 to leave the parameters unchanged.
        """
        pending_gather = first_gather
        pending_update: tuple[_RoundPlan, _Transfer] | None = None
        for plan, next_plan in zip_longest(self._rounds, self._rounds[1:]):
            momenta = pending_gather.wait()
            if next_plan is not None:
                pending_gather = self._update_momenta_and_start_gather(next_plan, skip)

            pending_return = self._orthogonalize_and_return(plan, momenta)
            if pending_update is not None:
                self._update(*pending_update, skip)
            pending_update = plan, pending_return

        assert pending_update is not None
        self._update(*pending_update, skip)

    def _update_momenta_and_start_gather(self, plan: _RoundPlan, skip: Tensor) -> _Transfer:
        """Update this rank's momentum shards, and start to send Nesterov directions to the owners.

        The owner of a matrix is the rank that orthogonalizes its direction. The direction combines
        the new momentum with the gradient, and is orthogonalized instead of the momentum. The rest
        of this module calls the directions momentum.

        Args:
            plan: Communication plan of the round.
            skip: Scalar tensor, 1 to leave the momentum unchanged.

        Returns:
            The all-to-all in progress. Its result holds the shards of the matrices that this rank
            owns, ordered by sending rank.
        """
        directions_by_owner: list[list[Tensor]] = []
        for matrices in plan.matrices_of_owner:
            sent_directions: list[Tensor] = []
            for matrix in matrices:
                direction = self._update_momentum(matrix, skip)
                # With HSDP, several ranks hold and update the same shard, but only one sends it.
                if matrix in plan.sent:
                    sent_directions.append(direction)
            directions_by_owner.append(sent_directions)
        return self._start_transfer(directions_by_owner, plan.gather_sizes)

    def _update_momentum(self, matrix: Any, skip: Tensor) -> Tensor:
        """Update this rank's momentum shard of a matrix, and return its flat Nesterov direction."""
        assert matrix.grad is not None
        gradient = local_shard(matrix.grad).view(-1)
        momentum = local_shard(self.state[matrix]["momentum_buffer"]).view(-1)
        return self._accumulate_momentum(gradient, momentum, skip, self._beta)

    def _orthogonalize_and_return(self, plan: _RoundPlan, gathered: Tensor) -> _Transfer:
        """Orthogonalize the matrices that this rank owns and start sending every rank its shards.

        Args:
            plan: Communication plan of the round.
            gathered: Result of the transfer from `_update_momenta_and_start_gather`.

        Returns:
            The all-to-all in progress. Its result holds this rank's shards, ordered by owner.
        """
        # Keep no reference to the whole momenta, which use as much memory as the directions.
        directions = [orthogonalize(momentum) for momentum in _assemble_owned(plan, gathered)]
        num_ranks = len(plan.matrices_of_owner)
        sent_to_ranks = [_cut_shards(directions, plan.owned, rank) for rank in range(num_ranks)]
        return self._start_transfer(sent_to_ranks, plan.return_sizes)

    def _update(self, plan: _RoundPlan, pending_return: _Transfer, skip: Tensor) -> None:
        """Wait for the orthogonalized momentum of a round, and apply it to this rank's shards.

        Args:
            plan: Communication plan of the round.
            pending_return: Transfer from `_orthogonalize_and_return`.
            skip: Scalar tensor, 1 to leave the parameters unchanged.
        """
        matrices = list(chain.from_iterable(plan.matrices_of_owner))
        shards = [local_shard(matrix).view(-1) for matrix in matrices]
        received = pending_return.wait().to(shards[0].device)
        directions = received.split([len(shard) for shard in shards])
        for matrix, shard, direction in zip(matrices, shards, directions, strict=True):
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


def _assemble_owned(plan: _RoundPlan, gathered: Tensor) -> list[Tensor]:
    """Assemble the whole momentum of each matrix that this rank owns, as plain tensors.

    Args:
        plan: Communication plan of the round.
        gathered: Momentum shards, ordered by sending rank, then by matrix.
    """
    momenta = {
        matrix: torch.empty(matrix.shape, dtype=gathered.dtype, device=gathered.device)
        for matrix in plan.owned
    }
    start = 0  # index of the next shard in `gathered`
    for rank, matrices in enumerate(plan.received_from_rank):
        for matrix in matrices:
            shard = momenta[matrix][shard_slices(matrix, rank)]  # a view of the whole momentum
            end = start + shard.numel()
            shard.copy_(gathered[start:end].view_as(shard))
            start = end
    return list(momenta.values())


def _cut_shards(
    directions: Sequence[Tensor], matrices: Sequence[DTensor], rank: int
) -> list[Tensor]:
    """Cut out the part of each direction that a rank needs to update its shard of the matrix.

    Args:
        directions: Orthogonalized momentum of each matrix, as plain tensors.
        matrices: The matrices, whose layouts determine the shards.
        rank: Index of the rank in the flattened device mesh.

    Returns:
        A flat tensor for each matrix.
    """
    pairs = zip(directions, matrices, strict=True)
    return [direction[shard_slices(matrix, rank)].flatten() for direction, matrix in pairs]


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
        matrices_of_owner: All matrices of the round, indexed by owner.
        sent: The matrices whose momentum shard this rank sends to their owner.
        owned: The matrices that this rank owns.
        received_from_rank: For each rank, the matrices in `owned` whose momentum shard it sends to
            this rank.
        gather_sizes: Number of momentum elements that this rank receives from each rank.
        return_sizes: Number of elements of the result that this rank receives from each owner.
    """

    matrices_of_owner: Sequence[list[DTensor]]
    sent: set[DTensor]
    owned: list[DTensor]
    received_from_rank: list[list[DTensor]]
    gather_sizes: list[int]
    return_sizes: list[int]


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


def _plan_round(matrices_of_owner: Sequence[list[DTensor]], this_rank: int) -> _RoundPlan:
    """Plan what this rank sends and receives in one round of a step.

    In a round, the owner of each matrix gathers the momentum shards of the matrix, and then returns
    to every rank its shard of the result.

    Args:
        matrices_of_owner: The matrices of the round, indexed by owner.
        this_rank: Index of this rank in the flattened device mesh.
    """
    sent: set[DTensor] = set()
    for owner, matrices in enumerate(matrices_of_owner):
        sent.update(_select_sent(matrices, sender=this_rank, owner=owner))

    owned = matrices_of_owner[this_rank]
    ranks = range(len(matrices_of_owner))
    received_from_rank = [_select_sent(owned, sender=rank, owner=this_rank) for rank in ranks]

    # As an owner, gather shards from their senders. Then get back shards from all owners.
    gather_sizes = [_numel_on_rank(received_from_rank[sender], sender) for sender in ranks]
    return_sizes = [_numel_on_rank(matrices, this_rank) for matrices in matrices_of_owner]
    return _RoundPlan(
        matrices_of_owner=matrices_of_owner,
        sent=sent,
        owned=owned,
        received_from_rank=received_from_rank,
        gather_sizes=gather_sizes,
        return_sizes=return_sizes,
    )


def _iteration_flops(matrix: Tensor) -> int:
    """Return the FLOPs of one Newton-Schulz iteration for a matrix, to balance work over ranks."""
    short, long = sorted(matrix.shape)
    return 4 * short * short * long + 2 * short**3


def _numel_on_rank(matrices: Sequence[DTensor], rank: int) -> int:
    """Return the number of elements of all `matrices` that a rank holds."""
    numel = 0
    for matrix in matrices:
        numel += math.prod(part.stop - part.start for part in shard_slices(matrix, rank))
    return numel


def _select_sent(matrices: Sequence[DTensor], sender: int, owner: int) -> list[DTensor]:
    """Return the matrices whose momentum shard `sender` sends to `owner`.

    If a matrix has replicas, only the ranks in the replica of its owner send their shards. With
    HSDP on 4 ranks, for example, ranks 0 and 1 hold one replica, and ranks 2 and 3 hold another. If
    rank 3 is the owner, ranks 2 and 3 send their shards.
    """
    return [matrix for matrix in matrices if _are_in_same_replica(matrix, sender, owner)]


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

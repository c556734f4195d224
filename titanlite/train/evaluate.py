"""The loss on data that is never trained on.

Invariant: every validation scores the same rows, whatever the layout is. All ranks do the same number of forward
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from titanlite.data.batch import Microbatch
from titanlite.data.heldout import ValidationSet
from titanlite.score import Score, make_score


def evaluate(
    rows: ValidationSet,
    loss_sum: Callable[[Sequence[Microbatch]], Tensor],
    data_group: dist.ProcessGroup,
    loss_group: dist.ProcessGroup,
) -> Score:
    """Score a model on `rows`. All ranks call it together; it waits for the device.

    Args:
        loss_sum: This rank's share of the microbatches' summed cross entropy; shares add up over `loss_group`.
        data_group: The ranks that hold different rows.
    """
    loss = loss_sum(list(rows.batches())).double()
    counts = loss.new_tensor([rows.num_tokens, rows.num_bytes])
    dist.all_reduce(loss, group=loss_group)
    dist.all_reduce(counts, group=data_group)
    return make_score(loss.item(), *counts.tolist())

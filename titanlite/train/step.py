"""One optimizer step on the device: from the rows of a global batch to new weights.

Invariant: it is the same code in training and in a plan, which runs it on fake tensors. It reads nothing from the
device. A step whose loss or gradient is not finite leaves weights and optimizer as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.distributed import _functional_collectives as collectives
from torch.profiler import record_function

from titanlite.config.run import Run
from titanlite.hooks.hook import Hook, StepResult
from titanlite.observe.meter import Part
from titanlite.optim.adamw import build_optimizer, step_unless
from titanlite.optim.clip import clip_grad_norm_
from titanlite.parallel.float8 import precompute_scales
from titanlite.parallel.forward_backward import Microbatch, build_forward_backward
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parallelize import ShardedModel


class TrainStep:
    """Forward and backward passes, clipping and the optimizer, over a model that is built and sharded."""

    def __init__(self, run: Run, mesh: Mesh, sharded: ShardedModel, device: torch.device) -> None:
        self._job, self._mesh, self._device = run.job, mesh, device
        self.model = sharded.whole
        self.forward_backward = build_forward_backward(sharded, mesh, run, device)
        self.optimizer = build_optimizer(self.model, run.job.optimizer, run.compiles("optimizer"), run.job)
        self._compiles_clip = run.compiles("clip")

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        num_valid_tokens: int,
        lr: float,
        hooks: Sequence[Hook] = (),
        step: int = 0,
    ) -> StepResult:
        """Do one optimizer step at the learning rate `lr` over this rank's rows, which have `num_valid_tokens`.

        Args:
            hooks: See gradients and update. They know the step by its number.
        """
        began = time.perf_counter()
        total = torch.full((), num_valid_tokens, dtype=torch.int64, device=self._device)
        # The loss waits for this sum, which has arrived long before.
        total = collectives.all_reduce(total, "sum", self._mesh.data_group)
        loss = self.forward_backward(microbatches, total)
        computed = time.perf_counter()
        for hook in hooks:
            hook.gradients(step)
        with record_function("clipping"):
            share = loss / self._mesh.degrees.tensor  # tensor ranks have the same one
            sums = clip_grad_norm_(self.model.parameters(), self._job.training.max_norm, self._compiles_clip, share)
        skip = (~(sums.grad_norm + sums.loss).isfinite()).float()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for hook in hooks:
            hook.before_update(step, sums, skip)
        with record_function("optimizer"):
            step_unless(skip, self.optimizer)
            for hook in hooks:
                hook.updated(step)
            self.optimizer.zero_grad()
            self.precompute_scales()
        seconds: dict[Part, float] = {"forward_backward": computed - began, "optimizer": time.perf_counter() - computed}
        return StepResult(loss, sums.grad_norm, total, seconds, skip, sums.squares)

    def precompute_scales(self) -> None:
        """Compute the scales for FP8 of the weights as they are now, if the job asks for it."""
        if self._job.float8.precompute_float8_dynamic_scale_for_fsdp:
            precompute_scales(self.model)

"""One optimizer step on the device: from the microbatches of a global batch to new weights.

Invariant: `titanlite plan`, which traces a step with fake tensors, runs the same code as training.
If the loss or the gradient of a step is not finite, weights and optimizer state stay unchanged.

By default, a step causes no host sync. Exceptions are CPU offload, optimizers that cannot skip a
step on the GPU (see `step_unless`), and async saves while they copy the weights to pinned memory
(see `Checkpointer.before_update`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from titanlite.config.run import Run
from titanlite.hooks.hook import Hook
from titanlite.model.microbatch import Microbatch
from titanlite.observe.meter import Part
from titanlite.optim.build import build_optimizer, set_learning_rate, step_unless
from titanlite.optim.clip import StepSums, reduce_step_sums, scale_gradients_
from titanlite.parallel.float8 import precompute_scales
from titanlite.parallel.forward_backward import TokenCount, build_forward_backward
from titanlite.parallel.memory_savers import allocate_moments
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parallelize import ShardedModel


class StepResult(NamedTuple):
    """Results of an optimizer step, as scalar tensors on the device unless noted otherwise.

    Attributes:
        loss: This rank's part of the loss: the sum over its tokens, divided by the number of valid
            labels in the global batch.
        grad_norm: Norm of the whole gradient before clipping.
        num_valid_tokens: Number of valid labels in the global batch.
        seconds: Elapsed CPU-side time of each part of the step. The GPU may still be computing.
        skipped: 1.0 if the weights were left unchanged, because the loss or gradient was not finite
            or a hook skipped the step. 0.0 otherwise. The same on all ranks.
        num_requests: Number of ranks that requested an action, such as a save.
        squares: Sum of squares of this rank's shard of each gradient, float64, shape (number of
            gradients,).
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid_tokens: Tensor
    seconds: dict[Part, float]
    skipped: Tensor
    num_requests: Tensor
    squares: Tensor


class TrainStep:
    """Runs optimizer steps: forward and backward passes, gradient clipping, and the weight update.

    Call the object once per step. `titanlite plan` calls it with fake tensors to predict the memory
    use of a run.

    Attributes:
        model: This rank's part of the model.
        forward_backward: Computes the loss and the gradients of a list of microbatches.
        optimizer: Optimizer of the parameters of `model`.
    """

    def __init__(self, run: Run, mesh: Mesh, sharded: ShardedModel, device: torch.device) -> None:
        self._job = run.job
        self._mesh = mesh
        self._device = device
        self._compiles_optimizer = run.compiles("optimizer")
        self._compiles_clip = run.compiles("clip")
        self.model = sharded.whole
        self.forward_backward = build_forward_backward(sharded, mesh, run, device)
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Create a new optimizer for the model, in its state before the first step.

        Call this to reset the optimizer when a checkpoint is loaded without optimizer state.
        """
        optimizer = build_optimizer(
            self.model,
            self._job.optimizer,
            self._compiles_optimizer,
            self._mesh.stage_group,
            self._job,
            self.model.arch,
        )
        if self._job.parallelism.memory_savers != "none":
            allocate_moments(optimizer)
        return optimizer

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        num_valid_tokens: int,
        lr: float,
        hooks: Sequence[Hook] = (),
        step: int = 0,
        has_request: bool = False,
    ) -> StepResult:
        """Run one optimizer step: compute gradients, clip them, and update the weights.

        All ranks must call this together. If the loss or the gradient norm is not finite, weights
        and optimizer state keep their values. By default, the CPU does not wait for the GPU.

        Args:
            microbatches: This rank's sequences of the global batch.
            num_valid_tokens: Number of valid labels in `microbatches`.
            lr: Learning rate for this step.
            hooks: Hooks whose methods `gradients`, `before_update` and `updated` are called.
            step: Number of the step, which is passed to the hooks.
            has_request: Whether this rank requests an action of all ranks, such as a save. The
                result contains the number of ranks with a request.

        Returns:
            Loss, gradient norm and other results, as tensors on the device.
        """
        start_time = time.perf_counter()
        # Start the all-reduce of the token counts, which overlaps with the forward pass.
        global_tokens = TokenCount(num_valid_tokens, self._mesh.data_group, self._device)
        loss = self.forward_backward(microbatches, global_tokens)
        update_time = time.perf_counter()

        for hook in hooks:
            hook.gradients(step)
        with record_function("clipping"):
            sums = self._reduce_sums_and_clip(loss, has_request)

        # `skip` becomes 1 if the norm or the loss is not finite, or if a hook sets it in place.
        # Hooks keep this tensor, so never replace it. The sum of norm and loss is finite only if
        # both are finite, because inf - inf is NaN.
        is_finite = (sums.grad_norm + sums.loss).isfinite()
        skip = (~is_finite).float()
        set_learning_rate(self.optimizer, lr)
        for hook in hooks:
            hook.before_update(step, sums, skip)
        with record_function("optimizer"):
            step_unless(skip, self.optimizer)
            for hook in hooks:
                hook.updated(step)
            self.optimizer.zero_grad()
            self.precompute_scales()

        seconds: dict[Part, float] = {
            "forward_backward": update_time - start_time,
            "optimizer": time.perf_counter() - update_time,
        }
        return StepResult(
            loss=loss,
            grad_norm=sums.grad_norm,
            num_valid_tokens=global_tokens.wait(),
            seconds=seconds,
            skipped=skip,
            num_requests=sums.num_requests,
            squares=sums.squares,
        )

    def _reduce_sums_and_clip(self, loss: Tensor, has_request: bool) -> StepSums:
        """Sum the gradient norm, the loss and the requests over all ranks, and clip the gradients.

        A single all-reduce computes all three. The gradients are clipped to training.max_norm.

        Args:
            loss: This rank's part of the loss.
            has_request: Whether this rank requests an action of all ranks, such as a save.

        Returns:
            The gradient norm before clipping, the loss of the global batch, the number of ranks
            with a request, and the sums of squares of this rank's gradients.
        """
        parameters = self.model.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # If n tensor parallel ranks have the same loss, each contributes 1 / n of it.
        loss_part = loss / self._mesh.degrees.tensor
        sums = reduce_step_sums(gradients, loss_part, has_request, self._compiles_clip)

        max_norm = self._job.training.max_norm
        if max_norm > 0:
            scale_gradients_(gradients, max_norm, sums.grad_norm, self._compiles_clip)
        return sums

    def precompute_scales(self) -> None:
        """Compute the FP8 scales of all weights in one pass, if the job enables it.

        Call this whenever the weights have changed, because FSDP uses the scales in its next
        all-gather.
        """
        precompute_scales(self.model, self._job.float8)

"""Compute the expected results of training steps on one process, in float64 with plain formulas.

The reference shares the model class, the data loader, the learning rate schedule, the muP factors
and the loss of a plugin with the training path. It uses no parallelism, FSDP, compiler, fused loss
or optimizer class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.registry import LOSSES, resolve
from titanlite.config.run import Run
from titanlite.data.loader import Loader
from titanlite.model.llama import Head, Llama
from titanlite.model.microbatch import IGNORE_INDEX
from titanlite.optim.losses import LossRecipe
from titanlite.optim.schedule import learning_rate_at
from titanlite.prove.record import NamedTensors, amplify, stack_sequences

EPS32 = torch.finfo(torch.float32).eps


class Float64Mode(TorchDispatchMode):
    """Keeps a computation in float64 by redirecting conversions to other floating dtypes.

    Model code converts to fp32 or bfloat16 in some places, which would make the reference inexact.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def computing_in_float64() -> Iterator[None]:
    """Run the forward and backward passes in a `with` block in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Mode():
            yield
    finally:
        torch.set_default_dtype(default)


class ReferenceStep(NamedTuple):
    """A training step on the reference model, which can also be repeated with a mistake.

    For example, `step._replace(use_window=False)` is the step without a sliding window.

    Attributes:
        trainer: Computes the step.
        weights: Weights before the step in any dtype, by parameter name.
        sequences: Fields of the global batch, such as "input_ids", each of shape (sequences, T).
        indices: Sequences that contribute to the loss. The divisor is always the number of valid
            tokens in all sequences.
        use_window: Whether attention has the sliding window of the model, if there is one.
        use_z_loss: Whether the loss includes the z-loss of the job, if there is one.
    """

    trainer: ReferenceTrainer
    weights: Mapping[str, Tensor]
    sequences: NamedTensors
    indices: slice = slice(None)
    use_window: bool = True
    use_z_loss: bool = True

    def with_field(self, name: str, values: Tensor) -> ReferenceStep:
        """Return the same step with other values in a field of the sequences, such as "labels"."""
        return self._replace(sequences=self.sequences | {name: values})

    def compute_gradients(self) -> tuple[float, NamedTensors]:
        """Compute the loss, and the gradients by parameter name, in float64."""
        return self.trainer.compute_gradients(self)


class ReferenceTrainer:
    """Computes expected losses and gradients in float64 on one process.

    The model runs on the CPU, without parallelism or dropout.

    Attributes:
        initial: Amplified initial weights in the dtype of the run, by parameter name.
        trainable: Names of the parameters that need a gradient.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        """Build the model of a run, and open its training data.

        Args:
            run: The job on one rank.
            device: Device on which the initial weights are drawn, before the model moves to the
                CPU.
        """
        training = run.job.training
        arch = run.arch
        with torch.device("meta"):
            model: Llama = resolve(arch.model)(arch)
        model.to_empty(device=device)
        model.init_weights(training.seed, device=device)
        # Convert the weights to both dtypes in turn, because training also rounds them twice.
        model.to(getattr(torch, training.init_dtype)).to(getattr(torch, training.dtype))
        amplify(model)
        self.initial = {name: p.detach().cpu() for name, p in model.named_parameters()}
        self.trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self.model = model.cpu().double()
        self.model.eval()  # without dropout
        self._run = run
        self._loader = Loader.from_job(run.job)

    def read_sequences(self) -> NamedTensors:
        """Read the sequences of the next global batch.

        Returns:
            Tensors of shape (sequences, T) by field name, such as "input_ids".
        """
        return stack_sequences(self._loader.next_global_batch().microbatches)

    def close(self) -> None:
        """Stop the workers that read the training data."""
        self._loader.close()

    def compute_gradients(self, step: ReferenceStep) -> tuple[float, NamedTensors]:
        """Compute the loss of a step, and its gradients by parameter name, in float64."""
        # Start from the weights before the step.
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(step.weights[name])
        self.model.zero_grad()

        # Select the sequences that contribute to the loss.
        selected = {name: values[step.indices] for name, values in step.sequences.items()}
        input_ids = selected["input_ids"]
        positions = selected.get("positions")
        masks = self._make_masks(selected, step.use_window)

        # With a head, the model returns the result of the head, here the loss, instead of logits.
        head = self._make_loss_head(step, selected["labels"])
        with computing_in_float64():
            loss = self.model(input_ids, positions, head=head, **masks)
            loss.backward()

        gradients: NamedTensors = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()
        return loss.item(), gradients

    def _make_loss_head(self, step: ReferenceStep, labels: Tensor) -> Head:
        """Return a function that computes the loss from hidden states and the output weight.

        Args:
            step: The step, whose sequences determine the divisor of the loss.
            labels: Labels of the tokens that contribute to the loss, shape (B, T).
        """
        training = self._run.job.training
        num_valid_tokens = int((step.sequences["labels"] != IGNORE_INDEX).sum())
        z_loss = training.z_loss if step.use_z_loss else 0.0
        softcap = self._run.arch.logit_softcap

        def compute_loss(hidden: Tensor, weight: Tensor) -> Tensor:
            if training.loss in ("cross_entropy", "reference"):
                total = _sum_losses(hidden, weight, labels, z_loss, softcap)
                return total / num_valid_tokens

            # The formula of a plugin is unknown, so the plugin itself is the reference, without
            # compilation and tensor parallelism.
            recipe = LossRecipe(z_loss, compiled=False, tensor=None, softcap=softcap)
            plugin_loss = LOSSES.make(training.loss, recipe, job=self._run.job)
            return plugin_loss(hidden, weight, labels, torch.tensor(1 / num_valid_tokens))

        return compute_loss

    def _make_masks(self, sequences: NamedTensors, use_window: bool) -> dict[str, Tensor]:
        """Return the attention masks to pass to the model, by argument name.

        The result is empty if the model needs only its default causal mask.
        """
        window = self._run.arch.sliding_window
        if "document_ids" not in sequences and not window:
            return {}
        return {
            "mask": _make_mask(sequences, window if use_window else 0),
            "full_mask": _make_mask(sequences, window=0),  # for blocks without sliding window
        }


def _make_mask(sequences: NamedTensors, window: int) -> Tensor:
    """Return a boolean attention mask, shape (B, 1, T, T), that is True where a token is visible.

    A token attends to itself and to earlier tokens of the same document.

    Args:
        sequences: Token ids and, if sequences contain several documents, document ids, (B, T).
        window: Number of tokens that a token attends to, including itself. 0 means all.
    """
    length = sequences["input_ids"].shape[1]
    query_positions = torch.arange(length)[:, None]
    key_positions = torch.arange(length)
    distance = query_positions - key_positions  # (T, T)

    mask = distance >= 0
    if window:
        mask = mask & (distance < window)
    mask = mask[None, None]  # (1, 1, T, T)

    document_ids = sequences.get("document_ids")
    if document_ids is not None:
        is_same_document = document_ids[:, :, None] == document_ids[:, None, :]  # (B, T, T)
        mask = mask & is_same_document[:, None]
    return mask


def _sum_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, softcap: float
) -> Tensor:
    """Sum the losses of all tokens that have a label.

    This plain formula serves as a reference for the fused and sharded losses of a training run. The
    loss is cross entropy plus a z-loss: `z_loss` times the squared logarithm of the softmax
    denominator.

    Args:
        hidden: Hidden states after the final norm, shape (B, T, C).
        weight: Weight of the output layer, shape (V, C).
        labels: Labels of the tokens, shape (B, T).
        z_loss: Weight of the z-loss. 0 means no z-loss.
        softcap: Limit of the logits. 0 means no limit.
    """
    logits = F.linear(hidden, weight).flatten(0, 1)  # (B * T, V)
    if softcap:
        logits = softcap * (logits / softcap).tanh()

    targets = labels.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    if z_loss:
        log_sums = logits.logsumexp(-1)[targets != IGNORE_INDEX]
        total = total + z_loss * log_sums.square().sum()
    return total


class Update(NamedTuple):
    """Result of an optimizer formula for one parameter.

    Attributes:
        direction: Tensor that the optimizer multiplies by the learning rate and subtracts from the
            weights.
        moments: Moments after the step, such as "exp_avg".
        is_sure: Mask that is False where rounding errors decide the direction, such as the sign of
            a tiny number. None means True for all elements.
    """

    direction: Tensor
    moments: NamedTensors
    is_sure: Tensor | None = None


def adamw(run: Run, step: int, grad: Tensor, moments: NamedTensors) -> Update:
    """Compute the direction and the moments of one AdamW step with the published formula.

    The direction includes neither the learning rate nor weight decay.
    """
    config = run.job.optimizer
    mean = config.beta1 * moments["exp_avg"] + (1 - config.beta1) * grad
    square = config.beta2 * moments["exp_avg_sq"] + (1 - config.beta2) * grad.square()
    corrected_mean = mean / (1 - config.beta1**step)
    corrected_square = square / (1 - config.beta2**step)
    direction = corrected_mean / (corrected_square.sqrt() + config.eps)
    return Update(direction, {"exp_avg": mean, "exp_avg_sq": square})


def sgd(run: Run, step: int, grad: Tensor, moments: NamedTensors) -> Update:
    """Compute the direction and the momentum of one SGD step.

    The direction includes neither the learning rate nor weight decay.
    """
    momentum = run.job.optimizer.momentum * moments["momentum_buffer"] + grad
    return Update(momentum, {"momentum_buffer": momentum})


def lion(run: Run, step: int, grad: Tensor, moments: NamedTensors) -> Update:
    """Compute the direction and the new moment of one Lion step with the published formula.

    The direction is the sign of an average of the moment and the gradient. If an element of the
    average is close to zero, rounding can flip its sign, so `Update.is_sure` is false there. The
    direction includes neither the learning rate nor weight decay.
    """
    config = run.job.optimizer
    mean = moments["exp_avg"]
    average = config.beta1 * mean + (1 - config.beta1) * grad
    is_sure = average.abs() > 4 * EPS32 * (mean.abs() + grad.abs())
    new_mean = config.beta2 * mean + (1 - config.beta2) * grad
    return Update(average.sign(), {"exp_avg": new_mean}, is_sure)


FORMULAS = {"AdamW": adamw, "SGD": sgd, "Lion": lion}
"""Plain formulas by optimizer name. Other optimizers are compared with the same optimizer on one
rank."""


def expected_update(
    run: Run, step: int, name: str, weight: Tensor, grad: Tensor, moments: NamedTensors
) -> tuple[Tensor, Update]:
    """Compute one parameter and its moments after an optimizer step, with a plain formula.

    Args:
        run: The run. Its optimizer must be in `FORMULAS`.
        step: Number of the step, counted from 1.
        name: Name of the parameter.
        weight: Weight before the step.
        grad: Gradient after clipping.
        moments: Moments before the step, such as "exp_avg". Empty if there are none yet.

    Returns:
        The expected weight, and the update with the expected moments.
    """
    old_weight = weight.double()
    # Moments are zero until the optimizer allocates them in its first step.
    zeros = torch.zeros_like(old_weight)
    old_moments: NamedTensors = defaultdict(lambda: zeros)
    for key, moment in moments.items():
        old_moments[key] = moment.double()

    compute_update = FORMULAS[run.job.optimizer.name]
    update = compute_update(run, step, grad.double(), old_moments)
    lr, weight_decay = _get_lr_and_decay(run, step, name, weight.ndim)
    decayed_weight = old_weight * (1 - lr * weight_decay)
    new_weight = decayed_weight - lr * update.direction
    return new_weight, update


def _get_lr_and_decay(run: Run, step: int, name: str, ndim: int) -> tuple[float, float]:
    """Return the learning rate and the weight decay of a parameter in one step.

    Args:
        run: The run, whose optimizer options can differ between groups of parameters.
        step: Number of the step, counted from 1.
        name: Name of the parameter.
        ndim: Number of dimensions of the parameter.
    """
    lr = learning_rate_at(run.job, step)
    weight_decay = _get_default_decay(run, name, ndim)
    for group in run.job.optimizer.groups:
        if group.claims(name):  # true for at most one group
            lr *= group.lr_factor
            if group.weight_decay is not None:
                weight_decay = group.weight_decay

    # muP scales the learning rate, but not the fraction lr * weight_decay by which a step shrinks
    # the weights. The weight decay must therefore change by the inverse factor.
    _, mup_lr_factor = run.arch.mup_factors(name, ndim)
    return lr * mup_lr_factor, weight_decay / mup_lr_factor


def _get_default_decay(run: Run, name: str, ndim: int) -> float:
    """Return the default weight decay of a parameter, which an optimizer group can override.

    It is `optimizer.weight_decay` for matrices and 0 for other parameters. It is also 0 for
    embeddings, unless `optimizer.decay_embeddings` is set.
    """
    config = run.job.optimizer
    is_exempt = "tok_embeddings" in name and not config.decay_embeddings
    return config.weight_decay if ndim >= 2 and not is_exempt else 0.0

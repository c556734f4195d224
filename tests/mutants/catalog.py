"""A catalog of mistakes in parallel training, each as a small patch of one function.

`titanlite prove` must find every one, and its first line must point to the cause. Many are modelled
on bugs of real frameworks, whose issues or pull requests the comments name. Mutants are applied in
each rank before the command starts, so they also change the one-rank run of the proof. To add one,
write the function that replaces a function of titanlite or torch:

    @mutant(
        FSDP,
        r"gradient .* all parameters differ: 0.5 times",
        replaces="torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor",
    )
    def gradients_averaged_twice(original, self, factor): ...

tests/mutants/test_mutants.py runs the catalog, a sample without --long. A single mutant:

    python -m pytest tests/mutants --long -k gradients_averaged_twice
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Function = Callable[..., Any]


class Layout(NamedTuple):
    """A number of ranks and the options of a layout, separated by spaces."""

    ranks: int
    options: str = ""

    @property
    def words(self) -> list[str]:
        return self.options.split()

    def plus(self, *options: str) -> Layout:
        """Return this layout with further options."""
        return Layout(self.ranks, " ".join((self.options, *options)))


def parallel(*kinds: str, unsharded: bool = True) -> str:
    """Return the options for two ranks of each kind."""
    options = [f"--parallelism.{kind}_parallel_degree 2" for kind in kinds]
    if unsharded:
        options.append("--parallelism.data_parallel_shard_degree 1")
    return " ".join(options)


REPLICATED = "--parallelism.data_parallel_replicate_degree 2"
ONE = Layout(1, parallel())
FSDP = Layout(2)
DDP = Layout(2, f"{REPLICATED} {parallel()}")
HSDP = Layout(4, REPLICATED)
TP = Layout(2, parallel("tensor"))
CP = Layout(2, parallel("context"))
PP = Layout(2, parallel("pipeline"))
FSDP_TP = Layout(4, parallel("tensor", unsharded=False))
ACCUMULATED = "--training.global_batch_size 64"
DOCUMENTS = "--dataset.document_mask"
FLOAT8 = """
--float8.enable --float8.enable_fsdp_float8_all_gather
--float8.precompute_float8_dynamic_scale_for_fsdp
"""


class Mutant(NamedTuple):
    """A planted mistake.

    Attributes:
        apply: Function without arguments that plants it.
        layout: Layout in which it matters.
        expected: Regular expression that the reported first difference must match.
    """

    apply: Function
    layout: Layout
    expected: str


CATALOG: dict[str, Mutant] = {}


def mutant(layout: Layout, expected: str, *, replaces: str = "") -> Callable[[Function], Function]:
    """Add the decorated function to the catalog.

    Args:
        replaces: Function that the decorated function replaces. The original becomes its first
            argument. If empty, the decorated function has no arguments and plants the mistake.
    """

    def add(function: Function) -> Function:
        apply = partial(wrap, replaces, function) if replaces else function
        CATALOG[function.__name__] = Mutant(apply, layout, expected)
        return function

    return add


def swap(target: str, new: Any) -> None:
    """Replace an attribute, such as "titanlite.optim.clip.count_replicas", until the end."""
    patch(target, new).start()


def wrap(target: str, wrapper: Function) -> None:
    """Replace a function by `wrapper`, which receives the original as its first argument."""
    original = pkgutil.resolve_name(target)
    swap(target, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def is_parallel() -> bool:
    """Return whether this process is one of several ranks, and not the one-rank run."""
    return dist.get_world_size() > 1


# Norm and loss


# As in torchtitan#2318.
@mutant(DDP, r"gradient norm .* the square root of the .*number of replicas")
def norm_counts_replicas_twice():
    swap("titanlite.optim.clip.count_replicas", lambda tensor: 1)


# As in torchtitan#2318.
@mutant(
    TP,
    r"gradient norm of rank 0 .* the square root of the tensor-parallel degree",
)
def norm_without_shards_of_other_ranks():
    swap("titanlite.optim.clip.count_replicas", lambda tensor: 2 if is_parallel() else 1)


# As in torchtitan#2206.
@mutant(
    FSDP,
    r"loss .* 2 times the expected value = the data-parallel degree",
    replaces="titanlite.train.step.TokenCount",
)
def loss_divided_by_local_tokens(original, num_valid_tokens, *args):
    count = original(num_valid_tokens, *args)
    count.wait().fill_(num_valid_tokens)
    return count


@mutant(TP, r"loss of .* look at tensor parallelism")
def softmax_over_the_local_vocabulary():
    swap("titanlite.optim.losses._all_reduce", lambda tensor, *_: tensor)


@mutant(
    FSDP,
    r"optimizer state of .*exp_avg .* times the expected value",
    replaces="titanlite.optim.clip._scale_to_norm_",
)
def clipping_with_the_wrong_norm(original, gradients, max_norm, norm):
    original(gradients, max_norm * 0.5, norm)


@mutant(
    ONE,
    r"gradient of layers.* computes no gradient",
    replaces="titanlite.model.llama.Attention.forward",
)
def attention_is_detached(original, self, *inputs):
    return original(self, *inputs).detach()


# Accumulation and reduction


@mutant(
    FSDP.plus(ACCUMULATED),
    r"loss .* do not contribute \(microbatches 0 of",
    replaces="titanlite.parallel.forward_backward.ForwardBackward.__call__",
)
def accumulation_forgets_a_microbatch(original, self, microbatches, tokens):
    return original(self, microbatches[1:] if is_parallel() else microbatches, tokens)


@mutant(FSDP.plus(ACCUMULATED), r"replicas of gradients .* \(shard\)")
def last_microbatch_is_not_reduced():
    calls: list[int] = []

    def configure(original, model, **options):
        calls.append(0)
        if is_parallel():
            is_first = len(calls) % 2 == 1
            options = dict.fromkeys(options, is_first)
        original(model, **options)

    wrap("titanlite.parallel.forward_backward.configure_microbatch", configure)


@mutant(
    FSDP,
    r"gradient .* all parameters differ: 0.5 times .* data-parallel degree",
    replaces="torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor",
)
def gradients_averaged_twice(original, self, factor):
    original(self, 2.0 * factor if is_parallel() else factor)


GRADIENT = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor"


def is_partial(grad: Any) -> bool:
    """Return whether tensor parallelism still has to sum up a gradient."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


# As in Megatron-LM#1446.
@mutant(
    TP,
    r"replicas of gradients of .*norm.* \(tensor\)",
    replaces=GRADIENT,
)
def norm_gradients_not_reduced_over_tensor_ranks(original, self, grad):
    reduced = original(self, grad)
    return grad.to_local() if is_partial(grad) else reduced


@mutant(TP, r"gradient .* tensor-parallel degree", replaces=GRADIENT)
def norm_gradients_summed_twice_over_tensor_ranks(original, self, grad):
    reduced = original(self, grad)
    return 2 * reduced if is_partial(grad) else reduced


# As in piper#13.
@mutant(
    FSDP.plus("--model.tied_embeddings"),
    r"gradient .* only parameters of the kind tok_embeddings.weight",
    replaces="titanlite.parallel.forward_backward.LossHead.__call__",
)
def gradient_of_the_tied_output_is_lost(original, self, hidden, weight):
    return original(self, hidden, weight.detach())


# Context parallelism and masks


@mutant(
    CP,
    r"gradient .* only attention.wk.weight, .*attention.wv.weight|gradient of ",
    replaces="titanlite.parallel.context.all_gather_autograd",
)
def gradients_of_keys_not_reduced(original, x, dim, group):
    from torch.distributed import _functional_collectives as collectives

    size = dist.get_world_size(group)
    gathered = collectives.all_gather_tensor(x.detach(), dim, group)
    parts = list(gathered.chunk(size, dim))
    parts[dist.get_rank(group)] = x
    return torch.cat(parts, dim)


# As in Seq1F1B#6.
@mutant(
    CP,
    r"positions restart in each context-parallel rank",
    replaces="titanlite.parallel.forward_backward._default_positions",
)
def positions_of_context_ranks_start_at_zero(original, tokens):
    return original(tokens) % (tokens.shape[1] // 2) if is_parallel() else original(tokens)


@mutant(
    CP.plus(DOCUMENTS),
    r"look at context parallelism",
    replaces="titanlite.parallel.forward_backward.local_chunks",
)
def mask_of_context_ranks_shows_the_future(original, x, mesh, dim=1):
    result = original(x, mesh, dim)
    is_mask = dim == 2
    return result.fill_(True) if is_mask else result


@mutant(
    CP,
    r"look at context parallelism",
    replaces="titanlite.parallel.forward_backward.local_chunks",
)
def second_context_chunk_is_off_by_one(original, x, mesh, dim=1):
    parts = x.chunk(2 * mesh.size(), dim)
    rank = mesh.get_local_rank()
    second = parts[2 * mesh.size() - 2 - rank]
    return torch.cat((parts[rank], second), dim)


# As in axolotl#3796.
@mutant(
    FSDP.plus(DOCUMENTS),
    r"tokens attend to other documents",
    replaces="titanlite.parallel.forward_backward.document_mask",
)
def document_mask_leaks(original, document_ids, window=0):
    return original(document_ids * 0, window)


# As in transformers#29285.
@mutant(
    FSDP,
    r"look at the model and its precision",
    replaces="titanlite.model.llama.rope_frequencies",
)
def rope_angles_in_bfloat16(original, *args):
    return original(*args).bfloat16().float()


# Pipeline parallelism


@mutant(
    PP,
    r"the labels belong to another microbatch",
    replaces="titanlite.parallel.forward_backward.local_inputs",
)
def labels_of_pipeline_microbatches_are_swapped(original, microbatches, *args):
    result = original(microbatches, *args)
    size = len(result.labels) // len(microbatches)
    return result._replace(labels=result.labels.roll(size, 0))


# Data, weights and optimizer


@mutant(
    FSDP_TP,
    r"sequences of rank \d .* instead of",
    replaces="titanlite.train.trainer.build_mesh",
)
def data_rank_of_the_wrong_dimension(original, *args):
    mesh = original(*args)
    if mesh.tensor is None:
        return mesh
    return replace(mesh, data_rank=mesh.tensor.get_local_rank())


@mutant(FSDP, r"initial weights of ", replaces="titanlite.parallel.parallelize.keep_shard")
def every_rank_has_the_first_shard(original, parameter, full):
    if not isinstance(parameter, DTensor):  # a single rank trains without FSDP
        original(parameter, full)
        return
    local = parameter.to_local()
    local.copy_(full[tuple(slice(size) for size in local.shape)])


# As in ms-swift#7944.
@mutant(
    TP,
    r"initial weights of ",
    replaces="titanlite.parallel.parallelize.keep_shard",
)
def tensor_ranks_draw_the_same_weights(original, parameter, full):
    """Draw shards with the same seed on all ranks instead of cutting the whole matrix."""
    every_rank_has_the_first_shard(original, parameter, full)


# As in Fast-LLM#545.
@mutant(
    FSDP,
    r"weight update of .*norm.weight",
    replaces="titanlite.train.step.build_optimizer",
)
def weight_decay_on_norms(original, model, config, *args):
    optimizer = original(model, config, *args)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay
    return optimizer


# As in DeepSpeed#8437.
@mutant(
    FSDP.plus("--optimizer.name Muon"),
    r"weight update of layers\.",
    replaces="titanlite.optim.muon.orthogonalize",
)
def muon_orthogonalizes_shards(original, matrix):
    if not is_parallel():
        return original(matrix)
    return torch.cat([original(part) for part in matrix.chunk(2)])


@mutant(
    FSDP.plus("--ema.decay 0.9"),
    r"weight average of ",
    replaces="titanlite.hooks.ema.Ema.updated",
)
def average_of_the_unsharded_weights(original, self, step):
    if not is_parallel():
        original(self, step)
        return
    for name, weight in self._weights.items():
        average = self._averages[name].to_local()
        gathered = weight.full_tensor().detach()
        first_part = gathered[: len(average)].float()
        average.lerp_(first_part, 1 - self._decay)


@mutant(
    HSDP,
    r"replicas of weights of .* \(replicate\)",
    replaces="titanlite.train.trainer.Trainer.step",
)
def a_bit_changes_in_one_replica(original, self):
    entry = original(self)
    if self.steps_done == 2 and dist.get_rank() == 3:
        bits = self.model.norm.weight.to_local().detach().view(torch.int32)
        bits[0] ^= 1
    return entry


# Checkpoints


@mutant(
    FSDP,
    r"resume: loaded state of optimizer\.",
    replaces="titanlite.train.trainer.Trainer.load_checkpoint",
)
def optimizer_state_of_one_rank_on_all(original, self):
    original(self)
    for state in self.optimizer.state.values():
        for value in state.values():
            if value.ndim and is_parallel():
                dist.broadcast(value.to_local(), 0)


# As in accelerate#4071.
@mutant(
    FSDP,
    r"resume: sequences of rank 0",
    replaces="titanlite.data.loader.Loader.load_state_dict",
)
def resume_skips_a_batch(original, self, state):
    original(self, state)
    self.next_global_batch()


# FP8


@mutant(FSDP.plus(FLOAT8), r"FP8 scale of ")
def float8_scales_are_a_step_old():
    calls: list[int] = []

    def precompute(original, *args):
        calls.append(0)
        # The first two calls happen before the first step.
        if len(calls) <= 2 or not is_parallel():
            original(*args)

    wrap("titanlite.train.step.precompute_scales", precompute)


# As in Megatron-LM#442.
@mutant(
    FSDP.plus(FLOAT8),
    r"FP8 scale of ",
    replaces="titanlite.train.step.precompute_scales",
)
def float8_scales_of_the_own_shard(original, model, config):
    original(model, config)
    shards = [parameter._local_tensor for parameter in model.parameters()]
    for shard in shards:
        if is_parallel() and getattr(shard, "_precomputed_scale", None) is not None:
            largest = shard._tensor.detach().abs().max().float()
            shard._precomputed_scale = torch.finfo(torch.float8_e4m3fn).max / largest


# Plugins


def plugin(architecture: str) -> str:
    """Return the options that select an architecture of mutants/plugins.py."""
    return f"--job.plugins mutants.plugins --model.architecture {architecture}"


# As in OLMo-core#828.
@mutant(
    FSDP.plus(plugin("dropout_blocks"), "--activation_checkpoint.mode full"),
    r"activation checkpointing of .* another dropout",
    replaces="titanlite.parallel.activation_checkpoint.checkpoint",
)
def recomputation_draws_other_random_numbers(original, *args, **options):
    return original(*args, **options | {"preserve_rng_state": False})


@mutant(TP.plus(plugin("concatenated_projections")), r"the architecture concatenated_projections")
def fused_projection_cut_across_its_parts():
    """Use a plugin in which tensor-parallel ranks cut [queries, keys, values] into two halves."""


# Further mistakes in optimizers, resume and masks


@mutant(
    FSDP,
    r"optimizer state of .*exp_avg_sq|weight update of ",
    replaces="titanlite.train.step.allocate_moments",
)
def bias_correction_is_a_step_late(original, optimizer):
    original(optimizer)
    for state in optimizer.state.values():
        state["step"].add_(1)


@mutant(
    FSDP.plus("--optimizer.name Lion"),
    r"optimizer state of .*exp_avg|weight update of ",
    replaces="titanlite.train.step.build_optimizer",
)
def lion_uses_one_beta(original, *args):
    optimizer = original(*args)
    for group in optimizer.param_groups:
        group["betas"] = (group["betas"][0], group["betas"][0])
    return optimizer


@mutant(
    HSDP,
    r"replicas of gradients of .* \(replicate\)",
    replaces="torch.distributed.all_reduce",
)
def gradients_not_reduced_over_replicas(original, tensor, *args, **options):
    is_gradient = is_parallel() and tensor.dim() == 1 and tensor.numel() > 1000
    return dist.barrier() if is_gradient else original(tensor, *args, **options)


@mutant(
    FSDP.plus("--model.sliding_window 24"),
    r"the sliding window is ignored",
    replaces="titanlite.parallel.forward_backward.document_mask",
)
def window_is_ignored(original, document_ids, window=0):
    return original(document_ids, 0)


@mutant(
    FSDP.plus("--training.z_loss 0.01"),
    r"the z-loss is left out",
    replaces="titanlite.optim.losses.linear_cross_entropy_sum",
)
def z_loss_is_left_out(original, *args, **options):
    return original(*args, **options | {"z_loss": 0.0})

"""A catalog of mistakes in parallel training, each as a small patch of one function.

`titanlite prove` must find every one, and its first line must point to the cause. Many are modelled
on bugs of real frameworks (`like`). A mutant is a function without arguments. It runs in each rank
before the command starts, and replaces a function of titanlite or torch, also in the one-rank run
of the proof. To add one, write such a function with the decorator `mutant`:

    @mutant(FSDP, r"gradient .* all parameters differ: 0.5 times")
    def gradients_averaged_twice() -> None: ...

tests/mutants/test_mutants.py runs the catalog, a sample without --long. A single mutant:

    python -m pytest tests/mutants --long -k gradients_averaged_twice
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

Apply = Callable[[], None]


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
        apply: Function that plants it.
        layout: Layout in which it matters.
        expected: Regular expression that the reported first difference must match.
        like: Issue or pull request of another framework with such a bug, or "".
    """

    apply: Apply
    layout: Layout
    expected: str
    like: str = ""

    @property
    def name(self) -> str:
        return self.apply.__name__


CATALOG: dict[str, Mutant] = {}


def mutant(layout: Layout, expected: str, like: str = "") -> Callable[[Apply], Apply]:
    """Add the decorated function to the catalog."""

    def add(apply: Apply) -> Apply:
        CATALOG[apply.__name__] = Mutant(apply, layout, expected, like)
        return apply

    return add


def swap(target: str, new: Any) -> None:
    """Replace an attribute, such as "titanlite.optim.clip.count_replicas", until the end."""
    patch(target, new).start()


def wrap(target: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper`, which receives the original as its first argument."""
    import pkgutil

    original = pkgutil.resolve_name(target)
    swap(target, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def is_parallel() -> bool:
    """Return whether this process is one of several ranks, and not the one-rank run."""
    import torch.distributed as dist

    return dist.get_world_size() > 1


# Norm and loss


@mutant(DDP, r"gradient norm .* the square root of the .*number of replicas", "torchtitan#2318")
def norm_counts_replicas_twice() -> None:
    swap("titanlite.optim.clip.count_replicas", lambda tensor: 1)


@mutant(
    TP,
    r"gradient norm of rank 0 .* the square root of the tensor-parallel degree",
    "torchtitan#2318",
)
def norm_without_shards_of_other_ranks() -> None:
    swap("titanlite.optim.clip.count_replicas", lambda tensor: 2 if is_parallel() else 1)


@mutant(FSDP, r"loss .* 2 times the expected value = the data-parallel degree", "torchtitan#2206")
def loss_divided_by_local_tokens() -> None:
    local = SimpleNamespace(all_reduce=lambda tensor, *_: tensor)
    swap("titanlite.train.step.collectives", local)


@mutant(TP, r"loss of .* look at tensor parallelism")
def softmax_over_the_local_vocabulary() -> None:
    swap("titanlite.optim.losses._all_reduce", lambda tensor, *_: tensor)


@mutant(FSDP, r"optimizer state of .*exp_avg .* times the expected value")
def clipping_with_the_wrong_norm() -> None:
    def scale(original: Callable[..., None], gradients: Any, max_norm: float, norm: Any) -> None:
        original(gradients, max_norm * 0.5, norm)

    wrap("titanlite.optim.clip._scale_to_norm_", scale)


@mutant(ONE, r"gradient of layers.* computes no gradient")
def attention_is_detached() -> None:
    def forward(original: Callable[..., Any], self: Any, *inputs: Any) -> Any:
        return original(self, *inputs).detach()

    wrap("titanlite.model.llama.Attention.forward", forward)


# Accumulation and reduction


@mutant(FSDP.plus(ACCUMULATED), r"loss .* do not contribute \(microbatches 0 of")
def accumulation_forgets_a_microbatch() -> None:
    def run(original: Callable[..., Any], self: Any, microbatches: Any, tokens: Any) -> Any:
        return original(self, microbatches[1:] if is_parallel() else microbatches, tokens)

    wrap("titanlite.parallel.forward_backward.ForwardBackward.__call__", run)


@mutant(FSDP.plus(ACCUMULATED), r"replicas of gradients .* \(shard\)")
def last_microbatch_is_not_reduced() -> None:
    calls: list[int] = []

    def configure(original: Callable[..., None], model: Any, **options: bool) -> None:
        calls.append(0)
        if is_parallel():
            is_first = len(calls) % 2 == 1
            options = dict.fromkeys(options, is_first)
        original(model, **options)

    wrap("titanlite.parallel.forward_backward.configure_microbatch", configure)


@mutant(FSDP, r"gradient .* all parameters differ: 0.5 times .* data-parallel degree")
def gradients_averaged_twice() -> None:
    def set_factor(original: Callable[..., None], self: Any, factor: float) -> None:
        original(self, 2.0 * factor if is_parallel() else factor)

    wrap("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", set_factor)


def change_partial_gradients(change: Callable[[Any, Any], Any]) -> None:
    """Replace the gradients that tensor parallelism still has to sum up."""
    from torch.distributed.tensor import DTensor

    def get_gradient(original: Callable[..., Any], self: Any, grad: Any) -> Any:
        result = original(self, grad)
        is_partial = isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
        return change(grad, result) if is_partial else result

    parameter = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
    wrap(f"{parameter}._get_grad_inner_tensor", get_gradient)


@mutant(TP, r"replicas of gradients of .*norm.* \(tensor\)", "Megatron-LM#1446")
def norm_gradients_not_reduced_over_tensor_ranks() -> None:
    change_partial_gradients(lambda grad, reduced: grad.to_local())


@mutant(TP, r"gradient .* tensor-parallel degree")
def norm_gradients_summed_twice_over_tensor_ranks() -> None:
    change_partial_gradients(lambda grad, reduced: 2 * reduced)


@mutant(
    FSDP.plus("--model.tied_embeddings"),
    r"gradient .* only parameters of the kind tok_embeddings.weight",
    "piper#13",
)
def gradient_of_the_tied_output_is_lost() -> None:
    def head(original: Callable[..., Any], self: Any, hidden: Any, weight: Any) -> Any:
        return original(self, hidden, weight.detach())

    wrap("titanlite.parallel.forward_backward.LossHead.__call__", head)


# Context parallelism and masks


@mutant(CP, r"gradient .* only attention.wk.weight, .*attention.wv.weight|gradient of ")
def gradients_of_keys_not_reduced() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as collectives

    def gather(x: Any, dim: int, group: Any) -> Any:
        size = dist.get_world_size(group)
        gathered = collectives.all_gather_tensor(x.detach(), dim, group)
        parts = list(gathered.chunk(size, dim))
        parts[dist.get_rank(group)] = x
        return torch.cat(parts, dim)

    swap("titanlite.parallel.context.all_gather_autograd", gather)


@mutant(CP, r"positions restart in each context-parallel rank", "Seq1F1B#6")
def positions_of_context_ranks_start_at_zero() -> None:
    def positions(original: Callable[..., Any], tokens: Any) -> Any:
        return original(tokens) % (tokens.shape[1] // 2) if is_parallel() else original(tokens)

    wrap("titanlite.parallel.forward_backward._default_positions", positions)


@mutant(CP.plus(DOCUMENTS), r"look at context parallelism")
def mask_of_context_ranks_shows_the_future() -> None:
    def chunks(original: Callable[..., Any], x: Any, mesh: Any, dim: int = 1) -> Any:
        result = original(x, mesh, dim)
        is_mask = dim == 2
        return result.fill_(True) if is_mask else result

    wrap("titanlite.parallel.forward_backward.local_chunks", chunks)


@mutant(CP, r"look at context parallelism")
def second_context_chunk_is_off_by_one() -> None:
    import torch

    def chunks(
        original: Callable[..., Any],
        x: Any,
        mesh: Any,
        dim: int = 1,
    ) -> Any:
        parts = x.chunk(2 * mesh.size(), dim)
        rank = mesh.get_local_rank()
        second = parts[2 * mesh.size() - 2 - rank]
        return torch.cat((parts[rank], second), dim)

    wrap("titanlite.parallel.forward_backward.local_chunks", chunks)


@mutant(FSDP.plus(DOCUMENTS), r"tokens attend to other documents", "axolotl#3796")
def document_mask_leaks() -> None:
    def mask(original: Callable[..., Any], document_ids: Any, window: int = 0) -> Any:
        return original(document_ids * 0, window)

    wrap("titanlite.parallel.forward_backward.document_mask", mask)


@mutant(FSDP, r"look at the model and its precision", "transformers#29285")
def rope_angles_in_bfloat16() -> None:
    def frequencies(original: Callable[..., Any], *args: Any) -> Any:
        return original(*args).bfloat16().float()

    wrap("titanlite.model.llama.rope_frequencies", frequencies)


# Pipeline parallelism


@mutant(PP, r"the labels belong to another microbatch")
def labels_of_pipeline_microbatches_are_swapped() -> None:
    def inputs(original: Callable[..., Any], microbatches: Any, *args: Any) -> Any:
        result = original(microbatches, *args)
        size = len(result.labels) // len(microbatches)
        return result._replace(labels=result.labels.roll(size, 0))

    wrap("titanlite.parallel.forward_backward.local_inputs", inputs)


# Data, weights and optimizer


@mutant(FSDP_TP, r"sequences of rank \d .* instead of")
def data_rank_of_the_wrong_dimension() -> None:
    def build(original: Callable[..., Any], *args: Any) -> Any:
        mesh = original(*args)
        if mesh.tensor is None:
            return mesh
        return replace(mesh, data_rank=mesh.tensor.get_local_rank())

    wrap("titanlite.train.trainer.build_mesh", build)


def keep_first_shard(original: Callable[..., None], parameter: Any, full: Any) -> None:
    local = parameter.to_local()
    local.copy_(full[tuple(slice(size) for size in local.shape)])


@mutant(FSDP, r"initial weights of ")
def every_rank_has_the_first_shard() -> None:
    wrap("titanlite.parallel.init_weights.keep_shard", keep_first_shard)


@mutant(TP, r"initial weights of ", "ms-swift#7944")
def tensor_ranks_draw_the_same_weights() -> None:
    """Draw shards with the same seed on all ranks instead of cutting the whole matrix."""
    wrap("titanlite.parallel.init_weights.keep_shard", keep_first_shard)


@mutant(FSDP, r"weight update of .*norm.weight", "Fast-LLM#545")
def weight_decay_on_norms() -> None:
    def build(
        original: Callable[..., Any],
        model: Any,
        config: Any,
        *args: Any,
    ) -> Any:
        optimizer = original(model, config, *args)
        for group in optimizer.param_groups:
            group["weight_decay"] = config.weight_decay
        return optimizer

    wrap("titanlite.train.step.build_optimizer", build)


@mutant(FSDP.plus("--optimizer.name Muon"), r"weight update of layers\.", "DeepSpeed#8437")
def muon_orthogonalizes_shards() -> None:
    import torch

    def orthogonalize(original: Callable[..., Any], matrix: Any) -> Any:
        if not is_parallel():
            return original(matrix)
        return torch.cat([original(part) for part in matrix.chunk(2)])

    wrap("titanlite.optim.muon.orthogonalize", orthogonalize)


@mutant(FSDP.plus("--ema.decay 0.9"), r"weight average of ")
def average_of_the_gathered_weights() -> None:
    def updated(self: Any, step: int) -> None:
        for name, weight in self._weights.items():
            average = self._averages[name].to_local()
            gathered = weight.full_tensor().detach()
            first_part = gathered[: len(average)].float()
            average.lerp_(first_part, 1 - self._decay)

    swap("titanlite.hooks.ema.Ema.updated", updated)


@mutant(HSDP, r"replicas of weights of .* \(replicate\)")
def a_bit_changes_in_one_replica() -> None:
    import torch
    import torch.distributed as dist

    def step(original: Callable[..., Any], self: Any) -> Any:
        entry = original(self)
        if self.steps_done == 2 and dist.get_rank() == 3:
            bits = self.model.norm.weight.to_local().detach().view(torch.int32)
            bits[0] ^= 1
        return entry

    wrap("titanlite.train.trainer.Trainer.step", step)


# Checkpoints


@mutant(FSDP, r"resume: loaded state of optimizer\.")
def optimizer_state_of_one_rank_on_all() -> None:
    import torch.distributed as dist

    def load(original: Callable[..., None], self: Any) -> None:
        original(self)
        for state in self.optimizer.state.values():
            for value in state.values():
                if value.ndim and is_parallel():
                    dist.broadcast(value.to_local(), 0)

    wrap("titanlite.train.trainer.Trainer.load_checkpoint", load)


@mutant(FSDP, r"resume: sequences of rank 0", "accelerate#4071")
def resume_skips_a_batch() -> None:
    def load(original: Callable[..., None], self: Any, state: Any) -> None:
        original(self, state)
        self.next_global_batch()

    wrap("titanlite.data.loader.Loader.load_state_dict", load)


# FP8


@mutant(FSDP.plus(FLOAT8), r"FP8 scale of ")
def float8_scales_are_a_step_old() -> None:
    calls: list[int] = []

    def precompute(original: Callable[..., None], *args: Any) -> None:
        calls.append(0)
        # The first two calls happen before the first step.
        if len(calls) <= 2 or not is_parallel():
            original(*args)

    wrap("titanlite.train.step.precompute_scales", precompute)


@mutant(FSDP.plus(FLOAT8), r"FP8 scale of ", "Megatron-LM#442")
def float8_scales_of_the_own_shard() -> None:
    def precompute(original: Callable[..., None], model: Any, config: Any) -> None:
        import torch

        original(model, config)
        shards = [parameter._local_tensor for parameter in model.parameters()]
        for shard in shards:
            if is_parallel() and getattr(shard, "_precomputed_scale", None) is not None:
                largest = shard._tensor.detach().abs().max().float()
                shard._precomputed_scale = torch.finfo(torch.float8_e4m3fn).max / largest

    wrap("titanlite.train.step.precompute_scales", precompute)


# Plugins


def plugin(architecture: str) -> str:
    """Return the options that select an architecture of mutants/plugins.py."""
    return f"--job.plugins mutants.plugins --model.architecture {architecture}"


@mutant(
    FSDP.plus(plugin("dropout_blocks"), "--activation_checkpoint.mode full"),
    r"activation checkpointing of .* another dropout",
    "OLMo-core#828",
)
def recomputation_draws_other_random_numbers() -> None:
    def recompute(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options | {"preserve_rng_state": False})

    wrap("titanlite.parallel.activation_checkpoint.checkpoint", recompute)


@mutant(TP.plus(plugin("concatenated_projections")), r"the architecture concatenated_projections")
def fused_projection_cut_across_its_parts() -> None:
    """Use a plugin in which tensor-parallel ranks cut [queries, keys, values] into two halves."""


# Further mistakes in optimizers, resume and masks


@mutant(FSDP, r"optimizer state of .*exp_avg_sq|weight update of ")
def bias_correction_is_a_step_late() -> None:
    def allocate(original: Callable[..., None], optimizer: Any) -> None:
        original(optimizer)
        for state in optimizer.state.values():
            state["step"].add_(1)

    wrap("titanlite.train.step.allocate_moments", allocate)


@mutant(FSDP.plus("--optimizer.name Lion"), r"optimizer state of .*exp_avg|weight update of ")
def lion_uses_one_beta() -> None:
    def build(original: Callable[..., Any], *args: Any) -> Any:
        optimizer = original(*args)
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0], group["betas"][0])
        return optimizer

    wrap("titanlite.train.step.build_optimizer", build)


@mutant(HSDP, r"replicas of gradients of .* \(replicate\)")
def gradients_not_reduced_over_replicas() -> None:
    import torch.distributed as dist

    def reduce(
        original: Callable[..., Any],
        tensor: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        is_gradient = is_parallel() and tensor.dim() == 1 and tensor.numel() > 1000
        return dist.barrier() if is_gradient else original(tensor, *args, **options)

    wrap("torch.distributed.all_reduce", reduce)


@mutant(FSDP.plus("--model.sliding_window 24"), r"the sliding window is ignored")
def window_is_ignored() -> None:
    def mask(original: Callable[..., Any], document_ids: Any, window: int = 0) -> Any:
        return original(document_ids, 0)

    wrap("titanlite.parallel.forward_backward.document_mask", mask)


@mutant(FSDP.plus("--training.z_loss 0.01"), r"the z-loss is left out")
def z_loss_is_left_out() -> None:
    def loss(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options | {"z_loss": 0.0})

    wrap("titanlite.optim.losses.linear_cross_entropy_sum", loss)

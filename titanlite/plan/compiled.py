"""What `torch.compile` does to the memory and the traffic of a step on fake tensors. Nothing is compiled.

Invariant: what a graph saves for its backward pass is chosen by torch's own partitioner on the compiler's own
decompositions. Of its values those are in memory that a kernel reads or writes which the compiler does not generate (of
matmuls, attention, collectives), that leave the graph, or that are small. Generated kernels compute all others on the
way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node, map_arg, traceback
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
    transform_subclass,
)
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.plan.counter import MATMULS, Counter, bytes_of

FLEX, PREFER_RECOMPUTE = torch.ops.aten._scaled_dot_product_flash_attention.default, CheckpointPolicy.PREFER_RECOMPUTE
SMALL = 8  # A value of so many times fewer bytes than what it is computed from is a sum or a maximum.


@contextmanager
def compiling() -> Iterator[None]:
    """Let `torch.compile` and `nn.Module.compile` do what this module says."""
    graphs: dict[Any, Callable[..., Any]] = {}

    def compiled(function: Callable[..., Any], owner: nn.Module | None = None, **_how: Any) -> Callable[..., Any]:
        module = owner or getattr(function, "__self__", nn.Module())

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a part of another graph
                return function(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            weights = dict(module.named_parameters())
            constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]
            tensors = [*weights.values(), *(leaves[i] for i in places)]
            names = list(weights)
            del leaves, args, kwargs, weights  # the graph lives longer than they

            def flat(*tensors: Tensor) -> Any:
                filled = list(constants)
                for i, tensor in zip(places, tensors[len(names) :], strict=True):
                    filled[i] = tensor
                args, kwargs = tree_unflatten(filled, spec)
                given = dict(zip(names, tensors, strict=False))
                with patch("torch.compiler.is_compiling", lambda: True), _reparametrize_module(module, given):
                    return function(*args, **kwargs)

            # One graph serves all blocks, because code and shapes are the same.
            kinds = tuple((type(t), t.shape, t.dtype, t.requires_grad) for t in tensors)
            key = function.__code__, kinds, tuple(constants), torch.is_grad_enabled()
            if key not in graphs:
                graphs[key] = _traced(flat, tensors)
            return graphs[key](*tensors)

        return call

    def compile_module(module: nn.Module, **_how: Any) -> None:
        module.forward = compiled(module.forward, module)

    def compile_weight_cast() -> None:
        from torchao.float8 import fsdp_utils

        cast = fsdp_utils.hp_tensor_and_scale_to_float8
        own = compiled(getattr(cast, "_torchdynamo_orig_callable", cast))
        undo.enter_context(patch.object(fsdp_utils, "hp_tensor_and_scale_to_float8", own))

    # Those with a cache would keep what was compiled here for a run in this process, and the other way round.
    own = {f"titanlite.optim.{name}.compiled_once": compiled for name in ("loss", "clip")}
    own |= {"titanlite.parallel.float8._compile_weight_cast": compile_weight_cast, "torch.compile": compiled}
    own |= {"titanlite.parallel.recompute.checkpoint": _checkpoint}
    with ExitStack() as undo, patch.object(nn.Module, "compile", compile_module):
        for name, function in own.items():
            undo.enter_context(patch(name, function))
        undo.enter_context(functorch_config.patch(activation_memory_budget=1.0))  # a job may set it
        yield


def _traced(function: Callable[..., Any], tensors: Iterable[Tensor]) -> Callable[..., Any]:
    """`function` as graphs of a forward and a backward pass."""
    graph = aot_function(
        function, _kernels, _kernels, _partition, select_decomp_table(), keep_inference_input_mutations=True
    )
    mode = detect_fake_mode(list(tensors))
    assert mode is not None
    no_states = patch(
        "torch._functorch.partitioners.functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward)
    )
    # The first call makes the graphs, which keep its tensors: no counter and no recomputation around it sees them.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with no_states, unseen, _disable_current_modes(), mode:
        graph(*(_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors))
    return graph


def _partition(joint: GraphModule, inputs: Any, **how: Any) -> tuple[GraphModule, GraphModule]:
    """As the compiler does it. It saves flex attention (`trace.as_on_gpu`) where no policy says to save nothing."""
    for node in joint.graph.nodes:
        if node.target is FLEX and node.meta.get("recompute") != CheckpointPolicy.MUST_RECOMPUTE:
            for each in (node, *node.users):
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)


def _like(tensor: Any) -> Any:
    """A tensor of the same kind in other memory."""
    if is_traceable_wrapper_subclass(tensor):
        return transform_subclass(tensor, lambda _, inner: _like(inner))
    if not isinstance(tensor, Tensor):  # the mesh of a DTensor
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _checkpoint(function: Callable[..., Any], *inputs: Any, context_fn: Any = None, **how: Any) -> Any:
    """torch's own, or within a graph: tell the partitioner what not to save."""
    if not torch.compiler.is_compiling():
        return checkpoint(function, *inputs, **how, **({"context_fn": context_fn} if context_fn else {}))
    # Compiled blocks that recompute all have a policy that saves nothing.
    kind = {FLEX: CheckpointPolicy.MUST_RECOMPUTE} if getattr(context_fn, "args", None) == ([],) else {}
    policy = partial(create_selective_checkpoint_contexts, lambda _, op, *__, **___: kind.get(op, PREFER_RECOMPUTE))
    forward = (policy if kind or context_fn is None else context_fn)()[0]
    forward.ac_graph_id = 0  # since torch 2.13
    with traceback.preserve_node_meta(), forward:
        traceback.current_meta["ac_graph_id"] = 0
        return function(*inputs)


def _kernels(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """A graph as kernels. Those that the compiler generates only allocate what they write; all others run."""
    *nodes, output = gm.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    whole = dict[Node, Node]()  # whose memory it is a part of
    for node in nodes:
        whole[node] = whole[node.all_input_nodes[0]] if _is_view(node) or _writes(node) else node
    returned = {whole[node] for node in output.all_input_nodes}
    kept = returned.union(inputs)
    for node in nodes:
        if _has_own_kernel(node):
            kept |= {node, *(whole[each] for each in node.all_input_nodes)}
        elif not _is_view(node) and SMALL * _bytes(node) <= max(map(_bytes, node.all_input_nodes), default=0):
            kept.add(node)
    sources, last = dict[Node, set[Node]](), dict[Node, Node]()  # what is read for a node; which node reads it last
    steps, near = list[tuple[Node, Callable[[], Tensor] | None, int]](), set[Node]()
    for node in nodes:
        read = set[Node]().union(*(sources[each] for each in node.all_input_nodes))
        sources[node] = {whole[node]} if whole[node] in kept else read
        if node.op != "call_function" or not (node in kept or _writes(node)):
            continue
        last |= dict.fromkeys([*read, whole[node]], node)
        if _has_own_kernel(node):
            steps.append((node, None, 0))
            near = set()
            continue
        like, moved = node.meta["val"], sum(map(_bytes, {node, *read} - near))
        new = partial(torch.empty_strided, like.size(), like.stride(), dtype=like.dtype, device=like.device)
        steps.append((node, None if _writes(node) else new, moved))
        near |= {node, *read}  # between two other kernels there is about one, which reads once
    dying = {step: [each for each, end in last.items() if end is step and each not in returned] for step, *_ in steps}

    def run(args: list[Any]) -> list[Any]:
        found = dict(zip(inputs, args, strict=True))
        args.clear()

        def value(node: Node) -> Any:
            if node in found:
                return found[node]
            if node.op == "get_attr":
                return getattr(gm, str(node.target))
            return node.target(*map_arg(node.args, value), **map_arg(node.kwargs, value))  # pyright: ignore

        for node, new, moved in steps:
            found[node] = new() if new else value(node.all_input_nodes[0] if _writes(node) else node)
            for counter in _get_current_dispatch_mode_stack():
                if moved and isinstance(counter, Counter):
                    counter.generated(moved)
            for each in dying[node]:
                found.pop(each, None)
        results = list(map_arg(output.args[0], value))
        found.clear()  # `value` refers to itself, and nobody collects cycles
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and (
        node.target is operator.getitem
        or getattr(node.target, "is_view", False)
        or _name(node).endswith(("wait_tensor", "_unsafe_view"))
    )


def _writes(node: Node) -> bool:
    """Whether it writes into its first argument."""
    return _name(node) == "aten::copy_"


def _has_own_kernel(node: Node) -> bool:
    """Whether the compiler calls a kernel for it that it does not generate."""
    space, _, name = _name(node).partition("::")
    known = name in MATMULS or "scaled_dot_product" in name or space not in ("", "aten", "prims")
    return known and not _is_view(node)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if node.op == "call_function" and schema else ""


def _bytes(node: Node) -> int:
    return bytes_of(node.meta.get("val"))

"""Imitate the memory and kernels of `torch.compile` in a traced step, without compiling.

Invariant: The torch partitioner chooses the tensors that a graph saves for its backward pass, after
operators are decomposed as in Inductor. A value in a graph is stored in memory only in these cases:

- A kernel that the compiler does not generate (matmul, attention, collective) reads or writes it.
- It is a result of the graph.
- It is much smaller than its inputs, like the result of a reduction.

Generated kernels recompute all other values.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from functorch.compile import config as functorch_config
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node, map_arg, traceback
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
    transform_subclass,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.optim import clip, losses
from titanlite.parallel import activation_checkpoint, float8
from titanlite.parallel.mixed_precision import FunctionModule
from titanlite.plan.counter import (
    MATMULS,
    bytes_of,
    count_generated_kernel,
    plain_tensors,
)
from titanlite.plan.override import override
from titanlite.plan.simulate import FLEX_REPLACEMENT

Function = Callable[..., Any]

TENSOR = object()  # placeholder for a tensor among the arguments of a compiled function
REDUCTION_RATIO = 8  # a value this many times smaller than its inputs counts as a reduction


@contextmanager
def simulate_compiler() -> Iterator[None]:
    """Simulate `torch.compile` and `nn.Module.compile` within this context.

    A simulated compilation traces a function into a graph, but generates no code. Calls of the
    function then count the memory and the kernels that compiled code would need. This works on fake
    tensors and without a GPU.
    """
    graphs: dict[Any, Function] = {}

    def compile_function(
        function: Function, owner: nn.Module | None = None, **_options: Any
    ) -> Function:
        module = owner or getattr(function, "__self__", nn.Module())

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # part of another graph
                return function(*args, **kwargs)
            call, tensors, key = _flatten_call(function, module, args, kwargs)
            # Blocks share one graph, because their code and shapes are the same.
            if key not in graphs:
                graphs[key] = _trace_graph(call, tensors)
            return graphs[key](*tensors)

        return run

    def compile_module(module: nn.Module, **_options: Any) -> None:
        module.forward = compile_function(module.forward, module)

    def compile_weight_cast() -> None:
        from torchao.float8 import fsdp_utils

        # An earlier run in this process may have compiled the cast already.
        cast_to_float8 = inspect.unwrap(fsdp_utils.hp_tensor_and_scale_to_float8)
        compiled = compile_function(cast_to_float8)
        stack.enter_context(override(fsdp_utils, hp_tensor_and_scale_to_float8=compiled))

    with (
        override(torch, compile=compile_function),
        override(nn.Module, compile=compile_module),
        override(activation_checkpoint, checkpoint=_checkpoint),
        # `compile_once` caches compiled code, which must not be mixed with simulated graphs.
        override(losses, compile_once=compile_function),
        override(clip, compile_once=compile_function),
        override(float8, _compile_weight_cast=compile_weight_cast),
        functorch_config.patch(activation_memory_budget=1.0),  # overrides the value of the job
        ExitStack() as stack,
    ):
        yield


def _flatten_call(
    function: Function, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Function, list[Tensor], Any]:
    """Convert a call of a compiled function into a call whose arguments are only tensors.

    Tracing a graph requires this. For example, if the module has one parameter, the call
    `function(x, 3, mask=m)` becomes `call(parameter, x, m)`. The constant 3 becomes a part of the
    key that this function returns.

    Args:
        function: The compiled function.
        module: Module whose parameters the function reads.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        - A function of tensors. It keeps no tensor in `args` or `kwargs` alive, because graphs
          outlive the call.
        - Its arguments: the parameters of the module, and the tensors in `args` and `kwargs`.
        - A key. Calls with equal keys can share a graph.
    """
    # Replace each tensor in the nested arguments with TENSOR. In the example, this gives the
    # template ((TENSOR, 3), {"mask": TENSOR}) and the tensors [x, m].
    tensors: list[Tensor] = []
    constants: list[Any] = []

    def replace_tensor(leaf: Any) -> Any:
        constant = leaf
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            constant = TENSOR
        constants.append(constant)
        return constant

    template: Any = map_aggregate((args, kwargs), replace_tensor)
    parameters = dict(module.named_parameters())
    parameter_names = [f"module.{name}" for name in parameters]
    function_module = FunctionModule(function, module)

    def call(*inputs: Tensor) -> Any:
        """Repeat the original call of `function`, but with new parameters and tensor arguments.

        All other arguments, such as numbers, are the same as in the original call.

        Args:
            inputs: One tensor for each parameter of `module`, followed by one tensor for each
                tensor argument of the original call.
        """
        remaining = iter(inputs)
        parameters = {name: next(remaining) for name in parameter_names}
        args, kwargs = map_aggregate(
            template, lambda leaf: next(remaining) if leaf is TENSOR else leaf
        )
        with override(torch.compiler, is_compiling=lambda: True):
            return functional_call(function_module, parameters, args, kwargs)

    # Calls share a graph if the code, the types of the tensors, and the constants are equal.
    inputs = [*parameters.values(), *tensors]
    signatures = [(type(x), x.shape, x.dtype, x.requires_grad) for x in inputs]
    key = (function.__code__, *signatures, *constants, torch.is_grad_enabled())
    return call, inputs, key


def _trace_graph(function: Function, tensors: Sequence[Tensor]) -> Function:
    """Trace a function and return a function that imitates its compiled code.

    As in `torch.compile`, AOTAutograd traces a graph of the function and its gradient, splits it
    into a forward and a backward graph, and compiles both. Only the compiler is an imitation.

    Args:
        function: Function whose arguments are tensors.
        tensors: Example arguments.
    """
    run_graphs = aot_function(
        function,
        fw_compiler=_imitate_compiled_code,
        bw_compiler=_imitate_compiled_code,
        # The other options are the same as with the Inductor compiler.
        partition_fn=_split_passes,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    _call_on_fake_copies(run_graphs, tensors)  # the first call traces and splits the graph
    return run_graphs


def _call_on_fake_copies(function: Function, tensors: Sequence[Any]) -> None:
    """Call a function on fake copies of `tensors`, without counting its memory and kernels."""
    # All fake tensors of a step have the same mode.
    fake_tensor: Any = next(plain_tensors(tensors[0]))
    with _hiding_operators(), fake_tensor.fake_mode:
        copies = [_empty_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
        function(*copies)


@contextmanager
def _hiding_operators() -> Iterator[None]:
    """Run operators in a `with` block without counting them and without activation checkpointing.

    This disables all torch dispatch modes, including the mode that makes new tensors fake.
    """
    with (
        # Activation checkpointing drops tensors that autograd saves. Save them unchanged.
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        _disable_current_modes(),
    ):
        yield


def _empty_like(tensor: Any) -> Any:
    """Allocate an uninitialized tensor with the type, shape and strides of `tensor`.

    Return values that are not tensors unchanged.
    """
    if is_traceable_wrapper_subclass(tensor):
        return transform_subclass(tensor, lambda _, inner: _empty_like(inner))
    if not isinstance(tensor, Tensor):  # the mesh of a DTensor
        return tensor
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _split_passes(
    joint: GraphModule, inputs: Sequence[Any], **options: Any
) -> tuple[GraphModule, GraphModule]:
    """Split the traced graph of both passes into a forward and a backward graph, as Inductor does.

    The torch partitioner chooses the values that the forward graph saves for the backward graph.
    Values marked `MUST_SAVE`, such as results of flex attention, are always saved.

    Args:
        joint: Graph of the forward and the backward pass.
        inputs: Example inputs of the graph.
        options: Further options of the torch partitioner, such as `num_fwd_outputs`.
    """
    _mark_flex_attention_as_saved(joint.graph)
    with override(partitioners, functionalize_rng_ops=_keep_graphs):
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _keep_graphs(
    _joint: GraphModule, forward: GraphModule, backward: GraphModule, *_args: Any
) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward graph unchanged.

    This replaces `partitioners.functionalize_rng_ops`, which needs a GPU. That function lets
    recomputed operators, such as dropout, draw the same random numbers again. A trace does not need
    this.
    """
    return forward, backward


def _mark_flex_attention_as_saved(graph: Graph) -> None:
    """Mark the results of flex attention to be saved for the backward pass.

    Calls that activation checkpointing must recompute stay unmarked. The torch partitioner reads
    the marks from the metadata of the nodes.
    """
    for node in graph.nodes:
        must_recompute = node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE
        if node.target is FLEX_REPLACEMENT and not must_recompute:
            # The node returns a tuple, and each of its users only takes one tensor from it. The
            # partitioner saves tensors but not tuples, so the users need the mark as well.
            for saved in (node, *node.users):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _checkpoint(function: Function, *inputs: Any, **options: Any) -> Any:
    """Call a function with activation checkpointing, even while a graph is traced.

    This replaces `torch.utils.checkpoint.checkpoint`. While a graph is traced, it runs the function
    and only marks each node to be saved or recomputed. The torch partitioner reads these marks.
    """
    if not torch.compiler.is_compiling():
        return checkpoint(function, *inputs, **options)

    # The context gives each node a mark and the number of its checkpointed function. A graph has
    # only one such function, with the number 0.
    policy_context = _make_policy_context(options["context_fn"])
    policy_context.ac_graph_id = 0
    with traceback.preserve_node_meta(), policy_context:
        traceback.current_meta["ac_graph_id"] = 0  # needed only before torch 2.13
        return function(*inputs)


def _make_policy_context(context_fn: Callable[[], tuple[Any, Any]]) -> Any:
    """Return the context that marks the result of each operator to be saved or recomputed.

    Args:
        context_fn: The argument `context_fn` of `torch.utils.checkpoint.checkpoint`.
    """
    # A block that recomputes everything passes an empty list of operators to save. Replace it with
    # a policy that also recomputes flex attention, which `_split_passes` would otherwise save.
    saves_nothing = isinstance(context_fn, partial) and context_fn.args == ([],)
    if saves_nothing:
        context_fn = partial(create_selective_checkpoint_contexts, _recompute_all)
    forward_context, _recompute_context = context_fn()
    return forward_context


def _recompute_all(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Mark the result of an operator to be recomputed, even if the operator is flex attention."""
    if op is FLEX_REPLACEMENT:
        return CheckpointPolicy.MUST_RECOMPUTE  # otherwise, `_split_passes` would save it
    return CheckpointPolicy.PREFER_RECOMPUTE  # the compiler may save it if that is cheaper


@dataclass
class _Kernel:
    """A kernel launch of a compiled graph.

    Attributes:
        node: Graph node that the kernel computes.
        input_bases: Nodes that allocate the memory that the kernel reads. Views allocate none.
        is_generated: Whether the compiler generates the kernel. If so, the planner only allocates
            its result. Otherwise, it is a library kernel, such as a matmul, which runs as usual.
        num_bytes: Bytes that a generated kernel reads and writes. 0 for library kernels.
        freed: Nodes whose values are freed after the kernel has run.
    """

    node: Node
    input_bases: set[Node]
    is_generated: bool
    num_bytes: int = 0
    freed: list[Node] = field(default_factory=list)


def _imitate_compiled_code(gm: GraphModule, example_inputs: Any) -> Function:
    """Return a function that allocates memory like the compiled code of a graph.

    `aot_function` calls this in place of a compiler. Operators that the compiler does not fuse,
    such as matrix products, run as usual. A generated (fused) kernel only allocates its result.
    """
    run_graph = partial(_run_kernels, gm, _schedule_kernels(gm.graph))
    # `aot_function` passes all arguments of a function with this attribute as one list.
    run_graph._boxed_call = True  # pyright: ignore[reportAttributeAccessIssue]
    return run_graph


def _run_kernels(gm: GraphModule, kernels: Sequence[_Kernel], args: list[Any]) -> list[Any]:
    """Run the kernels of a graph in order, and return the results of the graph.

    The result of each kernel stays in memory until the last kernel that needs it has run.

    Args:
        gm: Module of the graph.
        kernels: Kernels in the order in which they run.
        args: Inputs of the graph. The list is cleared, so that inputs can be freed during the run.
    """
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    constants = graph.find_nodes(op="get_attr")

    # Start with the values of the inputs and constants in memory.
    values: dict[Node, Any] = dict(zip(inputs, args, strict=True))
    for constant in constants:
        values[constant] = getattr(gm, str(constant.target))
    args.clear()

    # Run the kernels, and free values that are not needed anymore.
    for kernel in kernels:
        values[kernel.node] = _run_kernel(kernel, values)
        for node in kernel.freed:
            del values[node]

    # A result that is not in `values`, such as a view, is computed from a value in memory.
    read_result = partial(_read_or_compute, values)
    results: Any = map_arg(graph.output_node().args[0], read_result)
    return list(results)


def _read_or_compute(values: Mapping[Node, Any], node: Node) -> Any:
    """Return the value of a node. If it is not in `values`, run the operator of the node."""
    if node in values:
        return values[node]
    read = partial(_read_or_compute, values)
    args: Any = map_arg(node.args, read)
    kwargs: Any = map_arg(node.kwargs, read)
    return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def _run_kernel(kernel: _Kernel, values: Mapping[Node, Any]) -> Any:
    """Run a library kernel, or imitate a kernel that the compiler would generate.

    Args:
        kernel: The kernel.
        values: Values in memory, by node.
    """
    if kernel.is_generated:
        return _imitate_kernel(kernel, values)
    return _read_or_compute(values, kernel.node)  # the counter counts the operator as it runs


def _imitate_kernel(kernel: _Kernel, values: Mapping[Node, Any]) -> Any:
    """Count a kernel that the compiler would generate, and return a result without computing it.

    A copy returns its target, and any other kernel allocates an uninitialized tensor.
    """
    if _is_copy(kernel.node):
        target, *_ = kernel.node.all_input_nodes
        result = values[target]
    else:
        result = _empty_like(kernel.node.meta["val"])
    if kernel.num_bytes > 0:  # otherwise, the kernel has nothing to do
        count_generated_kernel(kernel.num_bytes)
    return result


def _schedule_kernels(graph: Graph) -> list[_Kernel]:
    """List the kernels of a graph in the order in which they run, with the memory that they use."""
    *nodes, output = graph.nodes
    inputs = set(graph.find_nodes(op="placeholder"))

    # The base of a node is the node that allocates its memory. A view has the base of its input.
    bases = _find_bases(nodes)
    returned_bases = {bases[node] for node in output.all_input_nodes}

    # Find the values that are stored in memory, and the stored values that each node needs.
    stored = _find_stored(nodes, bases) | returned_bases | inputs
    reads = _find_reads(nodes, bases, stored)

    kernels = _list_kernels(nodes, stored, reads)
    _set_num_bytes(kernels)
    _set_freed(kernels, bases, returned_bases)
    return kernels


def _find_bases(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Map each node to its base, the node that allocates the memory of its value.

    A view, or a copy into an existing tensor, has the base of its first input.
    """
    bases: dict[Node, Node] = {}
    for node in nodes:
        shares_memory = _is_view(node) or _is_copy(node)
        bases[node] = bases[node.all_input_nodes[0]] if shares_memory else node
    return bases


def _find_stored(nodes: Sequence[Node], bases: Mapping[Node, Node]) -> set[Node]:
    """Find the values that compiled code must store in memory while a graph runs.

    These are the inputs and results of library kernels, such as matmuls, and the results of
    reductions. The compiler fuses all other operators: kernels recompute their values. For example,
    `relu(x).sum()` stores the sum, but not `relu(x)`.

    Args:
        nodes: Nodes of the graph in order, without the output node.
        bases: For each node, the node that allocates its memory. A view has the base of its input.
    """
    stored: set[Node] = set()
    for node in nodes:
        if _has_library_kernel(node):
            values = (node, *node.all_input_nodes)
            stored |= {bases[value] for value in values}
        elif _is_reduction(node):
            stored.add(node)
    return stored


def _list_kernels(
    nodes: Sequence[Node], stored: set[Node], reads: Mapping[Node, set[Node]]
) -> list[_Kernel]:
    """List the kernels that compiled code of a graph launches, in order.

    There is one kernel for each stored value that an operator computes, and one for each copy into
    an existing tensor.

    Args:
        nodes: Nodes of the graph in order, without the output node.
        stored: Nodes whose values are stored in memory.
        reads: For each node, the stored values from which its value is read or recomputed.
    """
    kernels: list[_Kernel] = []
    for node in nodes:
        if node.op != "call_function":
            continue  # an input or a constant

        # A copy writes to the memory of its target, so it is not in `stored`.
        if node in stored or _is_copy(node):
            input_bases = _merge_reads(node, reads)
            is_generated = not _has_library_kernel(node)
            kernels.append(_Kernel(node, input_bases, is_generated))
    return kernels


def _set_num_bytes(kernels: Iterable[_Kernel]) -> None:
    """Set the number of bytes that each generated kernel of a graph reads and writes.

    The compiler fuses the generated kernels between two library kernels, such as matmuls. Fused
    kernels access each value once, so only the first kernel that uses a value counts its bytes. For
    example, in `b = a + 1; c = a * b`, the kernel of `b` counts `a` and `b`, and the kernel of `c`
    counts `c`.
    """
    accessed: set[Node] = set()  # values that the current group of fused kernels has accessed
    for kernel in kernels:
        if kernel.is_generated:
            used = {kernel.node, *kernel.input_bases}
            kernel.num_bytes = sum(_bytes_of(value) for value in used - accessed)
            accessed |= used
        else:
            accessed.clear()  # a library kernel ends the group


def _find_reads(
    nodes: Sequence[Node], bases: Mapping[Node, Node], stored: set[Node]
) -> dict[Node, set[Node]]:
    """Map each node to the stored values that a kernel reads to get the value of the node.

    If the value is stored, the kernel reads it. Otherwise, the kernel recomputes it from the values
    of its inputs. For example, if `b = a + 1` is not stored, but `a` is, then a kernel that needs
    `b` reads `a`.

    Args:
        nodes: Nodes of the graph in order, without the output node.
        bases: For each node, the node that allocates its memory. A view has the base of its input.
        stored: Nodes whose values are in memory, including all inputs of the graph.
    """
    reads: dict[Node, set[Node]] = {}
    for node in nodes:
        base = bases[node]
        if base in stored:
            reads[node] = {base}
        else:
            reads[node] = _merge_reads(node, reads)
    return reads


def _merge_reads(node: Node, reads: Mapping[Node, set[Node]]) -> set[Node]:
    """Return the stored values that a kernel reads to get or recompute the inputs of `node`."""
    return set().union(*(reads[source] for source in node.all_input_nodes))


def _set_freed(
    kernels: Iterable[_Kernel], bases: Mapping[Node, Node], returned_bases: set[Node]
) -> None:
    """Set the nodes to free after each kernel: those whose memory no later kernel uses.

    Args:
        kernels: Kernels in the order in which they run. Their attribute `freed` is extended.
        bases: For each node, the node that allocates its memory: the node itself, unless it is a
            view or a copy into an existing tensor.
        returned_bases: Bases of the results of the graph, which are never freed.
    """
    # Find the last kernel that reads or writes the memory of each base.
    last_users: dict[Node, _Kernel] = {}
    for kernel in kernels:
        result_base = bases[kernel.node]
        for base in (*kernel.input_bases, result_base):
            last_users[base] = kernel

    # Free the memory after its last user, unless it holds a result of the graph.
    for base, last_user in last_users.items():
        if base not in returned_bases:
            last_user.freed.append(base)


def _is_view(node: Node) -> bool:
    """Return whether a node only returns a view or an existing tensor, without a kernel launch."""
    is_view_op = node.target is operator.getitem or getattr(node.target, "is_view", False)
    copies_nothing = _operator_name(node).endswith(("wait_tensor", "_unsafe_view"))
    return is_view_op or copies_nothing


def _is_copy(node: Node) -> bool:
    """Return whether a node copies a tensor into its first argument (`aten::copy_`)."""
    return _operator_name(node) == "aten::copy_"


def _is_reduction(node: Node) -> bool:
    """Return whether a node computes a result that takes far fewer bytes than its largest input."""
    input_sizes = [_bytes_of(source) for source in node.all_input_nodes]
    is_much_smaller = REDUCTION_RATIO * _bytes_of(node) <= max(input_sizes, default=0)
    return is_much_smaller and not _is_view(node)


def _has_library_kernel(node: Node) -> bool:
    """Return whether a node runs a kernel that the compiler does not generate, such as a matmul."""
    namespace, _, name = _operator_name(node).partition("::")
    is_matmul_or_attention = name in MATMULS or "scaled_dot_product" in name
    is_foreign = namespace not in ("", "aten", "prims")
    return (is_matmul_or_attention or is_foreign) and not _is_view(node)


def _operator_name(node: Node) -> str:
    """Return the operator that a node calls, such as "aten::mm", or "" if it calls none."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema else ""


def _bytes_of(node: Node) -> int:
    """Return the size of the value of a node in bytes."""
    return bytes_of(node.meta.get("val"))

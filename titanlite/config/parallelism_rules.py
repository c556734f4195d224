"""Rules of the parallel degrees of a run: what does not work, why, and the nearest values that work.

Invariant: no torch here, so that a job file can be checked in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from math import isqrt

from titanlite.config.degrees import sequence_divisor
from titanlite.config.pipeline_stages import ONE_STAGE_A_RANK, SPLIT_BACKWARD, V_SHAPED, bad_split_points
from titanlite.config.run import Run

Problem = tuple[str, ...]  # the key, what is wrong with its value, and what to do

DIMENSIONS = ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel")


def fills_world(run: Run) -> Iterator[Problem]:
    """The degrees must multiply to the number of ranks."""
    config, degree, world = run.job.parallelism, run.degrees, run.world_size
    here = f"The world is {world} rank{'s' if world > 1 else ''} (NGPU times NNODES)."
    fixed = degree.world // degree.shard  # the product of the other degrees
    named = {f"{name}_degree": getattr(config, f"{name}_degree") for name in DIMENSIONS}
    times = " times ".join(f"{name} = {value}" for name, value in named.items() if value > 1)
    shard = config.data_parallel_shard_degree
    if shard == -1 and world % fixed:
        worst = max(named, key=lambda name: (world % named[name] != 0, named[name]))
        others = fixed // named[worst]
        if others == 1:
            text = f"must divide the number of ranks. {here}"
        else:
            text = f"does not fit: {times} is {fixed}, which must divide the number of ranks. {here}"
        if world % others:
            yield f"parallelism.{worst}", text, f"Start {fixed} ranks, or a multiple of that."
        else:
            near = " and ".join(map(str, nearest(divisors(world // others), named[worst])))
            yield f"parallelism.{worst}", f"{text} Near ones that do: {near}."
    elif degree.world != world:
        product = f"times {times or 'data_parallel_replicate_degree = 1'} is {fixed * shard}. "
        if world % fixed == 0:
            fits = f"Set it to -1 (all that are left) or {world // fixed}, or start {fixed * shard} ranks."
        else:
            fits = f"With these ranks the other degrees must multiply to a divisor of {world}. "
            fits += f"Set it to -1 (all that are left), or start {fixed * shard} ranks."
        yield "parallelism.data_parallel_shard_degree", f"{product}{here}", fits


def tensor_parallel(run: Run) -> Iterator[Problem]:
    """Each rank needs whole heads, an equal part of the feed-forward network, and at least one row of the
    vocabulary."""
    job, arch = run.job, run.arch
    key, tensor = "parallelism.tensor_parallel_degree", run.degrees.tensor

    def works(n: int) -> bool:
        part = -(-arch.vocab_size // n)
        return arch.n_kv_heads % n == 0 and arch.ffn_dim % n == 0 and part * (n - 1) < arch.vocab_size

    if not works(tensor):
        text = f"must divide model.n_kv_heads = {arch.n_kv_heads} and model.ffn_dim = {arch.ffn_dim}: a rank takes "
        near = nearest(filter(works, range(1, arch.n_kv_heads + 1)), tensor)
        yield key, f"{text}whole heads. Nearest: {' and '.join(map(str, near))}."
    elif job.float8.enable and tensor > 1:
        sides = {"n_kv_heads": arch.n_kv_heads * arch.head_dim, "dim": arch.dim, "ffn_dim": arch.ffn_dim}
        odd = [name for name, side in sides.items() if side // tensor % 16]
        if odd:
            fits = [n for n in range(1, tensor) if works(n) and all(side // n % 16 == 0 for side in sides.values())]
            text = f"leaves the rank a side that is no multiple of 16 (from model.{odd[0]}), which an FP8 matmul needs."
            yield key, text, f"Nearest: {max(fits)}." if fits else "Set float8.enable = false."
    if job.parallelism.enable_async_tensor_parallel and (tensor == 1 or not run.compiles("model")):
        text = 'needs tensor_parallel_degree > 1, and compile.enable = true with "model" in compile.components: '
        yield "parallelism.enable_async_tensor_parallel", f"{text}the compiler makes traffic and matmuls overlap."


def sequence_divides(run: Run) -> Iterator[Problem]:
    """Tensor and context ranks divide each row."""
    degree = run.degrees
    length, divisor = run.job.training.seq_len, sequence_divisor(degree)
    if length % divisor:
        low = length // divisor * divisor
        reason = f"context_parallel_degree = {degree.context} (two chunks a rank) and tensor_parallel_degree = "
        text = f"must be a multiple of {divisor}: rows are cut by {reason}{degree.tensor}."
        near = f"{low} or {low + divisor}" if low else f"{divisor}"
        yield "training.seq_len", text, f"Nearest: {near}."


def pipeline(run: Run) -> Iterator[Problem]:
    """Each stage needs a block, the split points must be valid, and there must be enough microbatches."""
    job, arch, ranks = run.job, run.arch, run.degrees.pipeline
    config = job.parallelism
    key, schedule = "parallelism.pipeline_parallel_degree", config.pipeline_parallel_schedule
    points = config.pipeline_parallel_split_points
    if ranks == 1:
        if points:
            yield "parallelism.pipeline_parallel_split_points", "needs pipeline_parallel_degree > 1."
        return
    if arch.tied_embeddings:
        text = "does not go with model.tied_embeddings = true: the one matrix would be needed on the first and on the "
        remedy = "Use tensor or data parallelism for it, or set model.tied_embeddings = false."
        yield key, f"{text}last stage, and its gradient summed between them.", remedy
    single = schedule in ONE_STAGE_A_RANK
    if points:
        yield from _split_points(run)
    elif ranks * (1 if single else 2) > arch.n_layers:
        each = "a block" if single else f"two stages with a block each, as {schedule} has two a rank"
        limit = arch.n_layers if single else arch.n_layers // 2
        yield key, f"gives no rank {each}: the model has {arch.n_layers} blocks.", f"Nearest: {limit}."
    old = tuple(map(int, version("torch").split(".")[:2])) < (2, 13)
    if schedule in V_SHAPED and old:
        text = f"needs torch 2.13 or newer; in {version('torch')} the stages of one rank send to each other, and fail."
        yield "parallelism.pipeline_parallel_schedule", text, 'Upgrade torch. Nearest: "Interleaved1F1B".'
    elif schedule in SPLIT_BACKWARD and job.float8.enable and old:
        text = f"with float8.enable = true needs torch 2.13 or newer; {version('torch')} cannot delay the gradients"
        remedy = 'Upgrade torch. Nearest: "Interleaved1F1B", or float8.enable = false.'
        yield "parallelism.pipeline_parallel_schedule", f"{text} of FP8 weights.", remedy
    if schedule in SPLIT_BACKWARD and run.compiles("model"):
        # Measured with torch 2.13: the second backward pass over a compiled block fails, because the first one gave its
        # buffers away. With donated_buffer = False it keeps them, but then the loss is 1.4e-3 off after ten fp32 steps.
        text = "delays the gradients of weights, which a compiled block computes together with those of its input."
        yield "parallelism.pipeline_parallel_schedule", text, 'Nearest: "Interleaved1F1B", or compile.enable = false.'
    selective = job.activation_checkpoint.mode == "selective" and job.activation_checkpoint.selective_ac_option == "op"
    if schedule in SPLIT_BACKWARD and selective:
        text = "runs two backward passes over each block, and what selective checkpointing of operations saved is gone "
        remedy = 'Nearest: activation_checkpoint.mode = "full" or "none", or "Interleaved1F1B".'
        yield "parallelism.pipeline_parallel_schedule", f"{text}after the first.", remedy
    if config.fsdp_reduce == "microbatch":
        text = 'is "microbatch", but a stage of a pipeline reduces its gradients with its last microbatch.'
        yield "parallelism.fsdp_reduce", text, 'Set it to "step".'
    yield from _microbatches(run)


def _split_points(run: Run) -> Iterator[Problem]:
    config, ranks = run.job.parallelism, run.degrees.pipeline
    key, points = "parallelism.pipeline_parallel_split_points", config.pipeline_parallel_split_points
    schedule = config.pipeline_parallel_schedule
    stages, wrong = len(points) + 1, bad_split_points(points, run.arch.n_layers)
    if wrong:
        yield key, wrong
    elif schedule in ONE_STAGE_A_RANK and stages != ranks:
        yield key, f"gives {stages} stages; {schedule} on {ranks} ranks has one on each: {ranks - 1} points."
    elif schedule in V_SHAPED and stages != 2 * ranks:
        yield key, f"gives {stages} stages; {schedule} on {ranks} ranks has two on each: {2 * ranks - 1} points."
    elif stages % ranks:
        yield key, f"gives {stages} stages, which cannot be spread evenly over {ranks} pipeline ranks."


def _microbatches(run: Run) -> Iterator[Problem]:
    training, ranks = run.job.training, run.degrees.pipeline
    schedule, count = run.job.parallelism.pipeline_parallel_schedule, run.microbatches
    rows = training.local_batch_size * run.degrees.data
    in_rounds = schedule in ("Interleaved1F1B", "InterleavedZeroBubble")

    def works(n: int) -> bool:
        return n >= ranks and not (in_rounds and n % max(1, n // ranks))

    if not works(count):
        text = (
            f"gives a data-parallel rank {count} microbatch{'es' if count > 1 else ''} of {training.local_batch_size} "
        )
        reason = f"rows; a pipeline of {ranks} ranks needs at least {ranks}"
        reason += f", in equal rounds of {ranks} or a little more ({schedule})." if in_rounds else "."
        near = nearest(filter(works, range(1, 2 * max(count, ranks) + 1)), count)
        yield "training.global_batch_size", text + reason, f"Nearest: {' or '.join(str(n * rows) for n in near)}."


def batch_divides(run: Run) -> Iterator[Problem]:
    """A global batch consists of whole microbatches of each data-parallel rank."""
    size, local, data = run.global_batch_size, run.job.training.local_batch_size, run.degrees.data
    rows = local * data
    if size % rows:
        low = size // rows * rows
        near = f"{low} or {low + rows}" if low else f"{rows}"
        text = f"must be a multiple of local_batch_size = {local} times the data-parallel degree = {data}, which is "
        yield "training.global_batch_size", f"{text}{rows}.", f"Nearest: {near}."


def layout_problems(run: Run) -> Iterator[Problem]:
    """All problems of a layout whose degrees fill the world and divide the batch."""
    yield from tensor_parallel(run)
    yield from sequence_divides(run)
    yield from pipeline(run)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in ascending order."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def nearest(choices: Iterable[int], to: int) -> list[int]:
    """The two of `choices` that are closest to `to`, in ascending order."""

    def distance(choice: int) -> int:
        return abs(choice - to)

    return sorted(sorted(choices, key=distance)[:2])

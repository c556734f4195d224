"""A quick upper bound of a rank's memory, and a quick guess at its speed: what to trace, and when no trace is needed.

Invariant: no torch here, so that the launcher can ask in a millisecond. Nothing here is ever printed as a plan: the
bound only says that a run fits without a trace, and the estimates only say what is worth a trace.
"""

from __future__ import annotations

from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token, num_params, state_bytes
from titanlite.observe.gpus import Gpu

_SIZE = {"float32": 4, "bfloat16": 2}
# What is counted below is what a block keeps. Beside it are copies in fp32, the temporaries of a backward pass, and
# what an allocator has not returned yet.
_SAFETY = 2.0

# What a plan follows. Beyond it the trace would take minutes: the loss is a loop over chunks of tokens, and FSDP2 lists
# the shards of each parameter.
MOST_TOKENS = 2**22
MOST_SHARDS = 2**15


def upper_bound(run: Run) -> int:
    """More bytes than any rank of the run takes at its peak."""
    arch, degree, job = run.arch, run.degrees, run.job
    compute, parallel = _SIZE[job.training.mixed_precision_param], degree.pipeline * degree.tensor
    matrices = 2 * arch.vocab_size * arch.dim  # both lie on one rank without a pipeline
    here = num_params(run.arch) // parallel + matrices // degree.tensor  # parameters of this rank's stages, unsharded
    # Stages may be uneven, so one may have twice the mean of the state.
    state = state_bytes(run) * (2 if degree.pipeline > 1 else 1) + 16 * matrices * degree.replicate // run.world_size
    # Gathered at once at the most: all weights, and their gradients in fp32 with the copy that is reduced.
    gathered = here * (compute + 8)
    tokens = job.training.local_batch_size * job.training.seq_len // degree.context
    layers = -(-arch.n_layers // degree.pipeline) * (2 if degree.pipeline > 1 else 1)
    waiting = run.microbatches if degree.pipeline > 1 else 1
    kept = tokens * block_bytes(run) * layers * waiting
    one_block = tokens * _whole_block(run) * 3
    chunk = min(4096, tokens)
    loss = chunk * arch.vocab_size * 4 * 3 + matrices * 4 + tokens * arch.dim * 12
    mask = job.training.local_batch_size * job.training.seq_len**2 * 4 if job.dataset.document_mask else 0
    return int(state + gathered + _SAFETY * (kept + one_block + loss)) + mask * waiting


def likely_bytes(run: Run) -> float:
    """About what a rank takes: its state, what its blocks keep, a block at work and its gathered weights."""
    arch, degree, job = run.arch, run.degrees, run.job
    tokens = job.training.local_batch_size * job.training.seq_len // degree.context
    waiting = min(run.microbatches, degree.pipeline)
    kept = tokens * block_bytes(run) * arch.n_layers / degree.pipeline * waiting
    gathered = 4 * arch.vocab_size * arch.dim / degree.tensor
    if degree.pipeline > 1:  # all blocks of a stage stay gathered, and gradients are reduced with the last microbatch
        gathered += num_params(arch) / degree.pipeline / degree.tensor * 6
    elif run.microbatches > 1 and job.parallelism.fsdp_reduce == "step":
        gathered += num_params(arch) / degree.tensor * 4
    return state_bytes(run) + kept + tokens * _whole_block(run) + gathered


def block_bytes(run: Run) -> float:
    """Bytes that one token of a block keeps for the backward pass, on one rank."""
    checkpoint, arch = run.job.activation_checkpoint, run.arch
    size, whole = _SIZE[run.job.training.mixed_precision_param], _whole_block(run)
    stream = size * arch.dim / run.degrees.tensor
    if checkpoint.mode == "full":
        return stream
    if checkpoint.mode == "selective" and checkpoint.selective_ac_option == "op":
        kv = arch.n_kv_heads * arch.head_dim
        return stream + size * (3 * arch.dim + kv + arch.ffn_dim) / run.degrees.tensor + size * arch.dim
    if checkpoint.mode == "selective":
        every = int(checkpoint.selective_ac_option)
        return (stream + (every - 1) * whole) / every
    return whole


def _whole_block(run: Run) -> float:
    """Bytes that one token of a block keeps if nothing is recomputed: see model/llama.py, line by line."""
    arch, size = run.arch, _SIZE[run.job.training.mixed_precision_param]
    kv = arch.n_kv_heads * arch.head_dim
    stream = 4 * arch.dim  # the residual stream and its norms, twice
    attention = 3 * arch.dim + 2 * kv
    rotary = 4 * (arch.dim + kv)  # in fp32
    swiglu = 4 * arch.ffn_dim
    fp8 = attention + swiglu if run.job.float8.enable else 0
    return (size * (stream + attention + swiglu) + rotary + fp8) / run.degrees.tensor + size * arch.dim


def guessed_seconds(run: Run, gpu: Gpu) -> float:
    """A guess at the time of a step on one rank, to decide which candidates are traced first."""
    arch, degree, job = run.arch, run.degrees, run.job
    rows = run.global_batch_size / degree.data
    tokens = rows * job.training.seq_len / (degree.context * degree.tensor * degree.pipeline)
    again = {"full": 1 / 3, "selective": 1 / 6}.get(job.activation_checkpoint.mode, 0.0)
    rate = 0.5 * gpu.bf16 * 1e12 * (1.5 if job.float8.enable and gpu.fp8 else 1.0)
    compute = tokens * flops_per_token(arch, job.training.seq_len) * (1 + again) / rate
    stream = rows * job.training.seq_len / degree.context * arch.dim * 2
    links = {True: gpu.link * 1e9, False: gpu.network * 1e9}
    tensor = 0.0
    if degree.tensor > 1:
        tensor = 8 * arch.n_layers / degree.pipeline * stream / links[degree.tensor <= gpu.machine]
    weights = num_params(arch) / (degree.tensor * degree.pipeline) * 8
    shards = degree.shard * degree.context * degree.tensor
    fsdp = weights / links[shards <= gpu.machine] * (min(1, gpu.machine / shards) if shards > gpu.machine else 1)
    idle = 1 + (degree.pipeline - 1) / max(1, run.microbatches)
    return (max(compute, fsdp) + tensor) * idle

"""Count the parameters, the bytes of training state and the FLOPs per token of a model.

Invariant: everything is computed from an `Architecture`, without building a model. No profiler is
used, because `FlopCounterMode` does not count all attention kernels.
"""

from __future__ import annotations

from titanlite.config.flavors import Architecture
from titanlite.config.run import Run

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def num_params(arch: Architecture) -> int:
    """Return the number of trainable parameters. Tied embeddings count once."""
    vectors = arch.n_layers * arch.block_vectors + arch.dim
    embedding = 0 if arch.tied_embeddings else arch.vocab_size * arch.dim
    return _matmul_params(arch) + vectors + embedding


def state_bytes(run: Run) -> int:
    """Return the size of parameters, gradients, optimizer state and EMA weights per rank, in bytes.

    This is a lower bound for the memory of a training step, which also needs activations.
    """
    job = run.job
    moment = DTYPE_BYTES[run.state_dtype]
    moments = {"AdamW": 2 * moment, "AdamW8bit": 2}.get(job.optimizer.name, moment)
    weight_and_gradient = 2 * DTYPE_BYTES[job.training.dtype]
    ema = 4 if job.ema.decay else 0
    bytes_per_param = weight_and_gradient + moments + ema
    return num_params(run.arch) * bytes_per_param * run.degrees.replicate // run.world_size


def flops_per_token(arch: Architecture, seq_len: int, is_causal: bool = True) -> float:
    """Return the training FLOPs per token (forward and backward) for sequences of `seq_len` tokens.

    Only matmuls and attention count. Norms, RoPE, the product in SwiGLU, softmax and the loss take
    less than 1% for models of 1B parameters and more. Recomputation by activation checkpointing
    does not count, because MFU is about useful work.

    Args:
        arch: Shape of the model.
        seq_len: Sequence length in tokens.
        is_causal: Count only the attention scores that the causal mask leaves visible. If False,
            count all scores, like the PaLM paper (2204.02311, appendix B) and torchtitan.
    """
    # For each token, a weight costs 2 FLOPs in the forward pass and 4 in the backward pass.
    matmuls = 6 * _matmul_params(arch)

    # In each block, each key that a token attends to costs 2 FLOPs per channel for the score, 2 for
    # the weighted values, and 8 in the backward pass. Grouped-query attention does not reduce this.
    keys_per_query = arch.attended(seq_len, is_causal)  # on average over tokens and blocks
    attention = 12 * arch.n_layers * keys_per_query * arch.q_dim
    return float(matmuls + attention)


def _matmul_params(arch: Architecture) -> int:
    """Return the number of weights in matrices that multiply activations.

    The output projection counts, even if its weights are tied to the embedding.
    """
    return arch.n_layers * arch.block_matrices + arch.vocab_size * arch.dim

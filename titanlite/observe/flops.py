"""Parameters of a model, the bytes of their state, and FLOPs per token.

Invariant: everything is computed from an `Architecture`. No model is built and no profiler is used, because
`FlopCounterMode` does not see every attention kernel.
"""

from __future__ import annotations

from titanlite.config.flavors import Architecture
from titanlite.config.run import Run


def num_params(arch: Architecture) -> int:
    """Number of trainable parameters; tied embeddings count once."""
    embedding = arch.vocab_size * arch.dim
    vectors = arch.n_layers * arch.block_vectors + arch.dim
    return _matmul_params(arch) + vectors + (0 if arch.tied_embeddings else embedding)


def state_bytes(run: Run) -> int:
    """Bytes of weights, average, gradients and moments on one rank: the least that any step takes."""
    size = {"float32": 4, "bfloat16": 2}
    # Of matrices in blocks, of which most parameters are.
    moments = {"AdamW": 2 * size[run.state_dtype], "AdamW8bit": 2}.get(run.job.optimizer.name, size[run.state_dtype])
    of_a_parameter = 2 * size[run.job.training.dtype] + moments + 4 * bool(run.job.ema.decay)
    return num_params(run.arch) * of_a_parameter * run.degrees.replicate // run.world_size


def flops_per_token(arch: Architecture, seq_len: int) -> float:
    """Training FLOPs (forward and backward) of one token in a row of `seq_len` tokens, causal attention.

    - A matmul with a weight of n entries costs 2n FLOPs a token forward (a multiplication and an addition each), and
      twice that backward (gradients of the input and of the weight): 6n. The output projection is such a matmul,
      tied or not; the embedding look-up is none.
    - Attention in a block: a query meets T keys in D channels (all heads together), 2TD FLOPs for the scores and 2TD
      for the weighted values: 4TD forward, 8TD backward, 12TD in all. The causal mask leaves half: 6TD, and a sliding
      window less (`Architecture.attended`). Grouped key/value heads change the memory traffic, not this count.
    - Norms, rotary embedding, SwiGLU's product, softmax and the loss are left out: below 1% from 1B parameters on.
    - Recomputation by activation checkpointing does not count: MFU is about useful work.

    The PaLM paper (2204.02311, appendix B) counts the same way, but attention without the causal half.
    """
    attention = 12 * arch.n_layers * arch.attended(seq_len) * arch.q_dim
    return float(6 * _matmul_params(arch) + attention)


def _matmul_params(arch: Architecture) -> int:
    """Weights that a token is multiplied with: all blocks and the output projection."""
    return arch.n_layers * arch.block_matrices + arch.vocab_size * arch.dim

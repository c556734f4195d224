"""Llama 3 (https://arxiv.org/abs/2407.21783), with options for Mistral, Qwen, SmolLM3 and OLMo.

`Architecture` holds the sizes and options. The model does not depend on ranks, job files or
devices, so you can copy this file and attention.py and use them alone.

Shape suffixes: B batch, T sequence, C model dimension, H heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titanlite.model.attention import EagerRope, LayerCache, attention

if TYPE_CHECKING:
    from titanlite.config.flavors import Architecture
    from titanlite.model.attention import Mask

INIT_STD = 0.02


def rope_frequencies(arch: Architecture, device: torch.device, is_scaled: bool) -> Tensor:
    """Compute the RoPE frequency of each channel pair, in radians per position.

    RoPE scaling extends the context length. Low frequencies are divided by `rope_scaling_factor`,
    high frequencies stay unchanged, and frequencies in between are interpolated.

    Args:
        arch: Architecture of the model.
        device: Device of the result.
        is_scaled: Whether to apply RoPE scaling.

    Returns:
        Frequencies, shape (D / 2,), fp32.
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / arch.rope_theta ** (exponents / arch.head_dim)
    if not is_scaled:
        return frequencies

    if arch.rope_scaling == "yarn":
        kept_fraction = _yarn_kept_fraction(arch, device)
    else:
        kept_fraction = _llama3_kept_fraction(arch, frequencies)
    return frequencies * (kept_fraction + (1.0 - kept_fraction) / arch.rope_scaling_factor)


def _llama3_kept_fraction(arch: Architecture, frequencies: Tensor) -> Tensor:
    """Return the fraction of each RoPE frequency that Llama 3.1 leaves unscaled, shape (D / 2,).

    The remaining fraction is divided by `rope_scaling_factor`. The result depends on the number of
    turns that the frequency completes in the original context: it is 0 for up to
    `rope_low_freq_factor` turns, 1 for at least `rope_high_freq_factor` turns, and linear in
    between.
    """
    turns = arch.rope_original_max_seq_len * frequencies / (2 * math.pi)
    low, high = arch.rope_low_freq_factor, arch.rope_high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_kept_fraction(arch: Architecture, device: torch.device) -> Tensor:
    """Return the fraction of each RoPE frequency that YaRN leaves unscaled, shape (D / 2,).

    The remaining fraction is divided by `rope_scaling_factor`. The result falls linearly from 1 to
    0 between two channel pairs. If these are pairs 20 and 46, for example, it is 1 for pairs 0 to
    20, 0.5 for pair 33, and 0 for pair 46 and above. See https://arxiv.org/abs/2309.00071.
    """
    last_kept, first_divided = _find_yarn_ramp(arch)
    pairs = torch.arange(arch.head_dim // 2, dtype=torch.float32, device=device)
    divided_fraction = ((pairs - last_kept) / (first_divided - last_kept)).clamp(0.0, 1.0)
    return 1.0 - divided_fraction


def _find_yarn_ramp(arch: Architecture) -> tuple[float, float]:
    """Return the last channel pair that YaRN leaves unscaled, and the first that it fully scales.

    The frequencies in between are partly scaled. Over the original context length, pair `last_kept`
    completes about `rope_beta_fast` turns, and pair `first_divided` about `rope_beta_slow` turns.
    Both indices are rounded and clamped as in the YaRN reference code.
    """
    last_kept = max(math.floor(_find_rope_pair(arch, arch.rope_beta_fast)), 0)
    first_divided = min(math.ceil(_find_rope_pair(arch, arch.rope_beta_slow)), arch.head_dim - 1)
    if first_divided == last_kept:
        first_divided += 0.001  # the caller divides by the difference
    return last_kept, first_divided


def _find_rope_pair(arch: Architecture, turns: float) -> float:
    """Find the RoPE channel pair that rotates `turns` times over the original context length.

    Pair i rotates by one radian in rope_theta ** (2 * i / head_dim) positions. The returned index i
    is fractional.
    """
    positions_per_radian = arch.rope_original_max_seq_len / (2 * math.pi * turns)
    return arch.head_dim * math.log(positions_per_radian) / (2 * math.log(arch.rope_theta))


def rope_table(arch: Architecture, positions: Tensor, is_scaled: bool) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the RoPE angles.

    YaRN also multiplies both by a factor, which sharpens attention over a long context.

    Args:
        arch: Architecture of the model.
        positions: Token positions, shape (T,) or (B, T).
        is_scaled: Whether to apply RoPE scaling, which extends the context length.

    Returns:
        Cosines and sines, each of shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32.
    """
    frequencies = rope_frequencies(arch, positions.device, is_scaled)
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if not is_scaled or arch.rope_scaling != "yarn":
        return cos, sin

    default_factor = 0.1 * math.log(arch.rope_scaling_factor) + 1.0
    factor = arch.rope_attention_factor or default_factor
    return cos * factor, sin * factor


def apply_rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by rotary position embeddings (https://arxiv.org/abs/2104.09864).

    Channel i is paired with channel i + D / 2, as in the Hugging Face Llama. The two halves are
    contiguous, so the operation vectorizes.

    Args:
        x_BTHD: Queries or keys, shape (B, T, H, D).
        cos: Cosines of the angles, shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32.
        sin: Sines of the angles, same shape.

    Returns:
        Rotated queries or keys, shape and dtype of `x_BTHD`.
    """
    x1, x2 = x_BTHD.float().chunk(2, dim=-1)
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return rotated.type_as(x_BTHD)


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Build a causal mask for the last `num_queries` of `num_keys` tokens.

    During generation there are more keys than queries, because the keys of earlier tokens are in
    the cache. For example, the mask for the last 2 of 4 tokens is [[1, 1, 1, 0], [1, 1, 1, 1]].
    With a window of 2, it is [[0, 1, 1, 0], [0, 0, 1, 1]].

    Args:
        num_queries: Number of queries, one for each of the last tokens.
        num_keys: Number of keys.
        window: Number of tokens that a token attends to, including itself. 0 means all.
        device: Device of the mask.
    """
    # Query i is token number `offset + i`. It does not attend to keys after itself.
    offset = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset)
    if window:
        mask = mask.triu(offset + 1 - window)
    return mask


def default_mask(tokens: Tensor, cache: Sequence[LayerCache] | None, window: int) -> Tensor | None:
    """Build the causal mask of `tokens`, or return None if plain causal attention is enough.

    Without a cache, a mask is needed only for a window that is shorter than the sequence.

    Args:
        tokens: Token ids, shape (B, T), or hidden states, shape (B, T, C).
        cache: Keys and values of earlier tokens, or None in training.
        window: Number of tokens that a token attends to, including itself. 0 means all.
    """
    num_tokens = tokens.shape[1]
    if cache is None and not 0 < window < num_tokens:
        return None
    num_cached = 0 if cache is None else cache[0].length
    return causal_mask(num_tokens, num_cached + num_tokens, window, tokens.device)


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """Limit logits smoothly to the range from -`softcap` to `softcap`.

    The result is `softcap` * tanh(logits / `softcap`). A softcap of 0 leaves the logits unchanged.
    """
    return (logits / softcap).tanh() * softcap if softcap else logits


def truncated_normal_(x: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill `x` in place with normal samples truncated at three standard deviations.

    Do not use `nn.init.trunc_normal_` instead: its values depend on the torch version, and it
    synchronizes with the GPU in recent versions.

    Args:
        x: Tensor to fill.
        std: Standard deviation before truncation.
        generator: Generator on the device of `x`.
    """
    # For a standard normal z, erf(z / sqrt(2)) is uniform between -1 and 1. Draw from the part of
    # this range in which |z| <= 3, and invert the function. The clamp removes rounding errors.
    limit = math.erf(3 / math.sqrt(2))
    with torch.no_grad():
        x.uniform_(-limit, limit, generator=generator)
        x.erfinv_().mul_(std * math.sqrt(2)).clamp_(-3 * std, 3 * std)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary position embeddings.

    Attributes:
        attend: Function that computes the attention output from queries, keys, values and a mask.
            Context parallelism replaces it.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.wq = nn.Linear(arch.dim, arch.q_dim, bias=arch.qkv_bias)
        self.wk = nn.Linear(arch.dim, arch.kv_dim, bias=arch.qkv_bias)
        self.wv = nn.Linear(arch.dim, arch.kv_dim, bias=arch.qkv_bias)
        self.wo = nn.Linear(arch.q_dim, arch.dim, bias=False)

        self.qk_norm = arch.qk_norm
        if self.qk_norm == "head":
            self.q_norm = nn.RMSNorm(arch.head_dim, eps=arch.norm_eps)
            self.k_norm = nn.RMSNorm(arch.head_dim, eps=arch.norm_eps)
        elif self.qk_norm == "projection":
            self.q_norm = nn.RMSNorm(arch.q_dim, eps=arch.norm_eps)
            self.k_norm = nn.RMSNorm(arch.kv_dim, eps=arch.norm_eps)

        # Context parallelism replaces this function.
        self.attend: Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor] = attention

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Apply attention to hidden states (B, T, C) and return hidden states (B, T, C).

        Args:
            x: Hidden states, shape (B, T, C).
            cos: Cosines of the RoPE angles, shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32.
            sin: Sines of the RoPE angles, same shape.
            mask: Mask as in `attention`, with S keys per query. None means causal attention.
            cache: Keys and values of earlier tokens during generation. The keys and values of `x`
                are appended to them. None in training.
        """
        # Compute queries, keys and values, and split them into heads.
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)

        q = q.unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = k.unflatten(-1, (-1, self.head_dim))  # (B, T, H_kv, D)
        v = v.unflatten(-1, (-1, self.head_dim))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)

        # Rotate queries and keys. The compiler fuses the plain operations of `apply_rope`.
        if torch.compiler.is_compiling():
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        else:
            q, k = EagerRope.apply(q, k, cos, sin)  # pyright: ignore

        # Attend, with the keys and values of earlier tokens during generation.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.append(k, v)
        out = self.attend(q, k, v, mask)  # (B, H, T, D)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward network (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.w1 = nn.Linear(arch.dim, arch.ffn_dim, bias=False)
        self.w2 = nn.Linear(arch.ffn_dim, arch.dim, bias=False)
        self.w3 = nn.Linear(arch.dim, arch.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to hidden states (B, T, C) and return hidden states (B, T, C)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each with an RMSNorm and a residual connection.

    The norms precede the two sublayers. With `norm_placement = "after"` (OLMo 2), they follow them.

    Attributes:
        residual_weights: Names of the matrices whose outputs are added to the residual stream.
            Their initial values are smaller in deeper blocks. Override this in a subclass with
            other matrices.
    """

    residual_weights: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "feed_forward.w2.weight")

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.norm_after = arch.norm_placement == "after"
        self.attention_norm = nn.RMSNorm(arch.dim, eps=arch.norm_eps)
        self.attention = Attention(arch)
        self.ffn_norm = nn.RMSNorm(arch.dim, eps=arch.norm_eps)
        self.feed_forward = FeedForward(arch)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Apply the block to hidden states (B, T, C) and return hidden states (B, T, C).

        Args:
            x: Hidden states, shape (B, T, C).
            cos: Cosines of the RoPE angles, shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32.
            sin: Sines of the RoPE angles, same shape.
            mask: Mask as in `attention`, with S keys per query. None means causal attention.
            cache: Keys and values of earlier tokens during generation, or None in training.
        """
        if self.norm_after:
            x = x + self.attention_norm(self.attention(x, cos, sin, mask, cache))
            return x + self.ffn_norm(self.feed_forward(x))

        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Output(nn.Module):
    """Holds the output matrix, shape (V, C), with one row per token of the vocabulary.

    `forward` passes the matrix to a head, a function such as the loss, which multiplies hidden
    states by it. Because the matrix is in a separate module, FSDP gathers it before the head runs
    and frees it afterward.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(arch.vocab_size, arch.dim))

    def forward(self, x: Tensor, head: Head) -> Tensor:
        """Return `head(x, weight)` for hidden states `x` of shape (B, T, C)."""
        return head(x, self.weight)


Head = Callable[[Tensor, Tensor], Tensor]
"""Function of the hidden states after the final norm (B, T, C) and the output matrix (V, C)."""


class Llama(nn.Module):
    """A decoder-only transformer.

    The constructor initializes the weights with seed 0. If you build the model under
    `torch.device("meta")`, call `to_empty` to allocate the parameters, and then `init_weights`.

    A model with tied embeddings has no `output` module. Its output matrix is
    `tok_embeddings.weight`.

    To define another model in a plugin, subclass this class and override `block`, `embed`,
    `init_std` or `norm_start`.

    Attributes:
        block: Class of the transformer blocks.
        norm_start: Initial value of the weights of norms.
    """

    block: type[TransformerBlock] = TransformerBlock
    norm_start = 1.0
    draws_random_numbers = False
    """Whether the forward pass draws random numbers, as dropout does. If so, activation
    checkpointing saves and restores the random state, which costs time. A subclass that does not
    declare this attribute itself is assumed to draw random numbers."""

    def __init__(self, arch: Architecture, blocks: range | None = None) -> None:
        """Build the model, or one pipeline stage of it.

        Args:
            arch: Sizes and options of the model.
            blocks: Indices of the blocks to build, for one pipeline stage. Parameters have the same
                names as in the whole model. The stage with the first block also has the embedding.
                The stage with the last block also has the final norm and the output projection.
                None means all blocks.

        Raises:
            ValueError: If the head dimension is odd or n_kv_heads does not divide n_heads.
        """
        super().__init__()
        if arch.head_dim % 2 or arch.n_heads % arch.n_kv_heads:
            raise ValueError(
                f"{arch}: the head dimension must be even and n_kv_heads must divide n_heads."
            )
        if blocks is None:
            blocks = range(arch.n_layers)
        is_first = blocks.start == 0
        is_last = blocks.stop == arch.n_layers

        self.arch = arch
        self.tok_embeddings = nn.Embedding(arch.vocab_size, arch.dim) if is_first else None
        self.layers = nn.ModuleDict({str(i): self.block(arch) for i in blocks})
        self._is_full_attention = [arch.is_full_attention(i) for i in blocks]
        for block in self.layers.values():
            for name in self.block.residual_weights:
                block.get_parameter(name)  # raises AttributeError if the block has no such name
        self.norm = nn.RMSNorm(arch.dim, eps=arch.norm_eps) if is_last else None
        self.output = Output(arch) if is_last and not arch.tied_embeddings else None

        if not any(parameter.is_meta for parameter in self.parameters()):
            self.init_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        cache: Sequence[LayerCache] | None = None,
        head: Head | None = None,
        full_mask: Mask | None = None,
    ) -> Tensor:
        """Compute logits (B, T, V) from token ids (B, T), or apply another head such as the loss.

        A pipeline stage without the embedding receives hidden states (B, T, C), and a stage without
        the final norm returns hidden states.

        Args:
            tokens: Token ids, shape (B, T), or the hidden states of the previous pipeline stage.
            positions: Positions for RoPE, shape (T,) or (B, T). By default they count from 0, or
                from the length of the cache.
            mask: Boolean mask, broadcastable to (B, H, T, S), or another kind of mask that
                `attention` supports. S includes the tokens in the cache. If you pass a mask, it
                must already include the sliding window. By default, attention is causal, with the
                sliding window of the model.
            full_mask: Mask without the window, for the blocks that `full_attention_interval`
                selects. If the model has such blocks, pass both masks or neither.
            cache: Keys and values of earlier tokens for generation, one `LayerCache` per block.
                The keys and values of `tokens` are appended to them.
            head: Function that computes the result from the hidden states (B, T, C) and the output
                matrix (V, C). By default it computes the logits. In training it is the loss, which
                never materializes all logits.
        """
        if positions is None:
            num_cached = 0 if cache is None else cache[0].length
            num_keys = num_cached + tokens.shape[1]
            positions = torch.arange(num_cached, num_keys, device=tokens.device)
        if head is None:
            head = self.compute_logits
        if mask is None:
            mask = default_mask(tokens, cache, self.arch.sliding_window)
        if full_mask is None and self.arch.full_attention_interval:
            full_mask = default_mask(tokens, cache, window=0)
        ropes = self._rope_by_block(positions)
        masks = [full_mask if is_full else mask for is_full in self._is_full_attention]
        caches = cache or [None] * len(self.layers)

        x = tokens
        if self.tok_embeddings is not None:
            x = self.embed(self.tok_embeddings(tokens))  # (B, T, C)

        blocks = self.layers.values()
        for block, rope, block_mask, layer_cache in zip(blocks, ropes, masks, caches, strict=True):
            x = block(x, *rope, block_mask, layer_cache)

        if self.norm is None:
            return x
        x = self.norm(x)
        if self.output is not None:
            return self.output(x, head)
        assert self.tok_embeddings is not None
        return head(x, self.tok_embeddings.weight)

    def _rope_by_block(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the cosines and sines of the RoPE angles for each block; see `rope_table`.

        They are not stored in buffers, because casting the model to bfloat16 would round them.
        """
        arch = self.arch
        is_scaled = arch.rope_scaling_factor != 1.0
        cos, sin = rope_table(arch, positions, is_scaled)
        ropes = {"configured": (cos, sin), "unscaled": (cos, sin)}  # see `_choose_rope`
        if is_scaled and arch.full_attention_interval:
            ropes["unscaled"] = rope_table(arch, positions, is_scaled=False)
        if arch.no_rope_interval:
            # Angles of zero make RoPE the identity, so NoPE layers compile to the same graph.
            ropes["none"] = torch.ones_like(cos), torch.zeros_like(sin)
        return [ropes[self._choose_rope(int(layer))] for layer in self.layers]

    def _choose_rope(self, layer: int) -> Literal["configured", "unscaled", "none"]:
        """Return which RoPE a block applies: as configured, without scaling, or none.

        If only some blocks have a sliding window, these blocks do not scale RoPE, because the
        window fits into the original context.

        Args:
            layer: Index of the block in the whole model, counted from 0.
        """
        arch = self.arch
        if arch.no_rope_interval and (layer + 1) % arch.no_rope_interval == 0:
            return "none"
        if arch.full_attention_interval and not arch.is_full_attention(layer):
            return "unscaled"
        return "configured"

    def compute_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, C) for the output matrix (V, C)."""
        return soft_cap(F.linear(x, weight), self.arch.logit_softcap)

    def embed(self, x: Tensor) -> Tensor:
        """Transform the token embeddings, shape (B, T, C), before the first block.

        Llama uses them unchanged. A subclass can override this method to scale them.
        """
        return x

    def init_weights(
        self,
        seed: int = 0,
        assign: Callable[[Tensor, Tensor], object] = Tensor.copy_,
        device: torch.device | None = None,
    ) -> None:
        """Initialize each parameter with a separate generator, seeded by `seed` and its name.

        The initial values therefore do not depend on the number of ranks or on the layout.

        Args:
            seed: Seed of the run.
            assign: Function called with a parameter and its full initial value in fp32. A sharded
                model passes a function that copies only this rank's shard.
            device: Device on which the values are drawn. Defaults to the device of each parameter.
        """
        for name, parameter in self.named_parameters():
            initial_value = torch.empty(
                parameter.shape, dtype=torch.float32, device=device or parameter.device
            )
            self._fill_initial_value_(initial_value, name, seed)
            with torch.no_grad():
                assign(parameter, initial_value)

    def _fill_initial_value_(self, x: Tensor, name: str, seed: int) -> None:
        """Fill `x` in place with the initial value of the parameter `name`.

        Norm weights are set to `norm_start` and biases to 0. Matrices get truncated normal samples.
        With muP, the values are multiplied by the factor from `mup_factors`.
        """
        init_factor, _ = self.arch.mup_factors(name, x.ndim)
        is_bias_or_norm = x.ndim == 1
        if is_bias_or_norm:
            start = self.norm_start if "norm" in name else 0.0
            nn.init.constant_(x, start * init_factor)
            return

        # Hash the seed of the run and the name to a seed of less than 64 bits.
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        parameter_seed = int.from_bytes(digest[:7], "big")
        generator = torch.Generator(x.device).manual_seed(parameter_seed)
        truncated_normal_(x, self.init_std(name) * init_factor, generator)

    def init_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of a matrix, before muP scales it.

        - Embeddings have unit variance, so that the outputs of the first blocks do not dominate
          them.
        - Matrices whose outputs are added to the residual stream start smaller in deeper blocks,
          which bounds the variance of the stream.
        - All other matrices have the standard deviation `INIT_STD`. This includes tied embeddings,
          because the logits would otherwise be huge.

        Args:
            name: Name of the parameter, for example "layers.3.attention.wo.weight".
        """
        if name == "tok_embeddings.weight" and not self.arch.tied_embeddings:
            return 1.0

        block_parameter = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if block_parameter and block_parameter[2] in self.block.residual_weights:
            layer = int(block_parameter[1])
            return INIT_STD / math.sqrt(2 * (layer + 1))
        return INIT_STD

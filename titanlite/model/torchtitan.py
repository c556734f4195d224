"""The Llama of a checkpoint of torchtitan's, which has no configuration: found from shapes and from what is said.

Invariant: nothing is assumed that changes what the model computes. What neither the weights nor the user say is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.files import short
from titanlite.config.flavors import Architecture
from titanlite.config.torchtitan import TORCHTITAN_FLAVORS, Version, rotary_scaling
from titanlite.model.formats import differences, parameter_shapes


@dataclass(frozen=True)
class Said:
    """What the shapes do not tell. None: not said."""

    flavor: str | None = None
    n_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling_factor: float | None = None
    norm_eps: float | None = None
    max_seq_len: int | None = None


Shapes = dict[str, tuple[int, ...]]


def architecture_from_torchtitan(
    shapes: Shapes, said: Said, version: Version | None = None, head_dim: int | None = None
) -> Architecture:
    """The architecture of torchtitan's Llama.

    Args:
        shapes: name -> shape of each weight. torchtitan's names are ours.
        version: torchtitan's, which decides the scaling of rotary frequencies. None: not known.
        head_dim: the width of a head, if the checkpoint tells it.

    Raises:
        ValueError: something is not said, or contradicts the shapes; with what to say.
    """
    flavor = TORCHTITAN_FLAVORS.get(said.flavor or "")
    if said.flavor is not None and flavor is None:
        raise ValueError(f"--flavor {short(said.flavor)}: torchtitan's Llamas are {', '.join(TORCHTITAN_FLAVORS)}")
    (vocab_size, dim), (kv_dim, _), (ffn_dim, _) = _matrices(shapes)
    n_heads = said.n_heads or (flavor.n_heads if flavor else dim // head_dim if head_dim else None)
    theta = said.rope_theta or (flavor.rope_theta if flavor else None)
    factor = said.rope_scaling_factor or (rotary_scaling(version)["rope_scaling_factor"] if version else None)
    if n_heads is None or theta is None:
        raise ValueError(
            f"the weights (width {dim}, feed-forward {ffn_dim}) do not tell the number of heads and the base of the "
            "rotary frequencies. Say them: --flavor 8B, or --n-heads N --rope-theta X"
        )
    if factor is None:
        raise ValueError(
            "weights alone do not tell torchtitan's version. 0.2 scales the rotary frequencies of each model, 0.1 of "
            "none. Say it: --torchtitan-version 0.2 or 0.1, or --rope-scaling-factor X, where 1 is none"
        )
    n_layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    if flavor is not None:
        found = {"dim": dim, "n_layers": n_layers, "ffn_dim": ffn_dim}
        theirs = {key: getattr(flavor, key) for key in found}
        if odd := [f"{key} is {size}, not {theirs[key]}" for key, size in found.items() if size != theirs[key]]:
            raise ValueError(f"these are not the weights of torchtitan's {said.flavor}: {', '.join(odd)}")
    width = dim // n_heads
    if dim % (2 * n_heads) or kv_dim == 0 or kv_dim % width or n_heads % (kv_dim // width):
        raise ValueError(f"{n_heads} heads do not fit weights of width {dim}, whose keys are {kv_dim} wide")
    if head_dim not in (None, width):
        raise ValueError(f"{n_heads} heads have {width} channels each, but freqs_cis is for {head_dim}")
    arch = Architecture(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=kv_dim // width,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_seq_len=said.max_seq_len or (8192 if factor == 1.0 else 131072),
        norm_eps=said.norm_eps or 1e-5,  # that of each Llama of torchtitan's
        rope_theta=theta,
        rope_scaling_factor=factor,
    )
    # Before a list of all names is made:
    lines = differences(parameter_shapes(arch), shapes) if arch.n_layers <= len(shapes) else [f"{arch.n_layers} layers"]
    if lines:
        raise ValueError("\n  ".join(["this is no Llama of torchtitan's:", *lines[:8]]))
    return arch


def _matrices(shapes: Shapes) -> list[tuple[int, int]]:
    """The shapes of embedding, wk and w1. Raises ValueError: one is missing, or no matrix."""
    names = ("tok_embeddings.weight", "layers.0.attention.wk.weight", "layers.0.feed_forward.w1.weight")
    found = []
    for name in names:
        shape = shapes.get(name, ())
        if len(shape) != 2 or not all(shape):
            raise ValueError(f"there is no {name} of two dimensions, which each Llama of torchtitan's has")
        found.append((shape[0], shape[1]))
    return found

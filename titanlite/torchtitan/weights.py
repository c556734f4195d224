"""torchtitan's checkpoints, which DCP writes: the weights of a Llama, whatever else is beside them.

Invariant: nothing in the files is executed, none outside of the folder is opened, and about one tensor is held in
memory. Nothing is assumed that changes what the model computes: what neither the weights nor the user say is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.dcp import INDEX, SafeReader, load_tensors
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import MANIFEST, exists, short
from titanlite.config.flavors import Architecture
from titanlite.model.formats import differences, from_meta_rotary, parameter_shapes
from titanlite.torchtitan.tables import TORCHTITAN_FLAVORS, Version, rope_scaling_factor

# torchtitan 0.1 puts "model." before the names, unless it saves the model only.
_WEIGHT = re.compile(r"(model\.)?(tok_embeddings\.weight|norm\.weight|output\.weight|freqs_cis|layers\.\d{1,5}\..+)")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Said:
    """What a checkpoint does not tell about its model. None: not said."""

    flavor: str | None = None
    n_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling_factor: float | None = None
    norm_eps: float | None = None
    max_seq_len: int | None = None


class TorchtitanReader:
    """The weights of a folder with .metadata and *.distcp files, or of the newest step in a folder of such folders.

    Args:
        said: what the weights do not tell about the model.
        version: torchtitan's. None: found out, if the checkpoint tells it.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it is no Llama that this model computes exactly.
    """

    def __init__(self, folder: Path, said: Said, version: Version | None = None) -> None:
        self.path = _step_folder(folder)
        import torchao.float8  # noqa: F401 - it tells torch that its wrapper of weights holds data only

        self._is_full = False
        try:
            self._reader = SafeReader(self.path, self._wanted)
        except CheckpointError as error:
            raise UserError(f"{self.path}: {error}") from None
        index = self._reader.index
        self._prefix = "model." if any(name.startswith("model.") for name in index) else ""
        self._entries = {name.removeprefix(self._prefix): entry for name, entry in index.items()}
        angles = self._entries.pop("freqs_cis", None)
        self.dtypes = {name: entry.properties.dtype for name, entry in self._entries.items()}
        if odd := [name for name, dtype in self.dtypes.items() if dtype not in _DTYPES]:
            raise UserError(f"{self.path}: {odd[0]} is {self.dtypes[odd[0]]}, not one of {_DTYPES}.")
        found: Version | None = "0.1" if self._prefix or angles else "0.2" if self._is_full else None
        if version and found and version != found:
            text = f"{self.path} is written as torchtitan {found} does. Leave the option out."
            raise UserError(f"--torchtitan-version {version}: {text}")
        shapes = {name: tuple(entry.size) for name, entry in self._entries.items()}
        head_dim = 2 * angles.size[-1] if angles else None
        try:
            self.arch = _architecture(shapes, said, version or found, head_dim)
        except ValueError as error:
            raise UserError(f"{self.path}: {error}.") from None

    def _wanted(self, name: str) -> bool:
        self._is_full |= name.startswith("optimizer.")
        return _WEIGHT.fullmatch(name) is not None

    def read(self, name: str) -> Tensor:
        """A whole tensor in this model's layout. Raises UserError: its file is damaged."""
        whole = torch.empty(self._entries[name].size, dtype=self.dtypes[name])
        try:
            load_tensors(self._reader, {f"{self._prefix}{name}": whole})
        except CheckpointError as error:
            raise UserError(f"{self.path}: {name}: {error}") from None
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            whole = from_meta_rotary(whole, self.arch.head_dim)
        return whole


def _step_folder(folder: Path) -> Path:
    """`folder` itself, or its newest step. Raises UserError: it has no checkpoint of torchtitan's."""
    for home in (folder, folder / "checkpoint"):
        steps = [path for path in home.glob("step-*") if re.fullmatch(r"step-\d{1,12}", path.name)]
        for path in (home, *sorted(steps, key=lambda path: int(path.name[5:]), reverse=True)):
            if exists(path / INDEX) and not exists(path / MANIFEST):  # which a checkpoint of titanlite's has
                return path
    others = "Hugging Face's .safetensors are imported by --hf, and a run takes a checkpoint of titanlite's as it is"
    raise UserError(f"{folder} has no checkpoint of torchtitan's: no .metadata, in it or in a step-N folder. {others}.")


def _architecture(
    shapes: dict[str, tuple[int, ...]], said: Said, version: Version | None, head_dim: int | None
) -> Architecture:
    """The architecture of torchtitan's Llama with these weights. torchtitan's names are ours.

    Args:
        head_dim: the width of a head, if the checkpoint tells it.

    Raises:
        ValueError: something is not said, or contradicts the shapes; with what to say.
    """
    flavor = TORCHTITAN_FLAVORS.get(said.flavor or "")
    if said.flavor is not None and flavor is None:
        raise ValueError(f"--flavor {short(said.flavor)}: torchtitan's Llamas are {', '.join(TORCHTITAN_FLAVORS)}")
    names = ("tok_embeddings.weight", "layers.0.attention.wk.weight", "layers.0.feed_forward.w1.weight")
    for name in names:
        if len(shapes.get(name, ())) != 2 or not all(shapes[name]):
            raise ValueError(f"there is no {name} of two dimensions, which each Llama of torchtitan's has")
    (vocab_size, dim), (kv_dim, _), (ffn_dim, _) = (shapes[name] for name in names)
    n_heads = said.n_heads or (flavor.n_heads if flavor else dim // head_dim if head_dim else None)
    theta = said.rope_theta or (flavor.rope_theta if flavor else None)
    factor = said.rope_scaling_factor or (rope_scaling_factor(version) if version else None)
    if n_heads is None or theta is None or factor is None:
        raise ValueError(
            f"the weights (width {dim}, feed-forward {ffn_dim}) do not tell all of the model. Say --flavor 8B, or "
            "--n-heads N --rope-theta X (the base of the rotary frequencies); and --torchtitan-version, of which 0.2 "
            "scales them, and 0.1 does not"
        )
    n_layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    sizes = dim, n_layers, ffn_dim
    if flavor and sizes != (flavor.dim, flavor.n_layers, flavor.ffn_dim):
        raise ValueError(f"dim, n_layers and ffn_dim are {sizes}, which are not those of torchtitan's {said.flavor}")
    width = dim // n_heads
    if dim % (2 * n_heads) or kv_dim % width or n_heads % (kv_dim // width) or head_dim not in (None, width):
        raise ValueError(f"{n_heads} heads do not fit weights of width {dim}, whose keys are {kv_dim} wide")
    arch = Architecture(
        *(dim, n_layers, n_heads, kv_dim // width, ffn_dim, vocab_size),
        max_seq_len=said.max_seq_len or (8192 if factor == 1.0 else 131072),
        norm_eps=said.norm_eps or 1e-5,  # that of each Llama of torchtitan's
        rope_theta=theta,
        rope_scaling_factor=factor,
    )
    # Before a list of all names is made:
    lines = differences(parameter_shapes(arch), shapes) if n_layers <= len(shapes) else [f"{n_layers} layers"]
    if lines:
        raise ValueError("\n  ".join(["this is no Llama of torchtitan's:", *lines[:8]]))
    return arch

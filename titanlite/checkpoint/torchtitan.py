"""torchtitan's checkpoints, which DCP writes: the weights of a Llama, whatever else is beside them.

Invariant: nothing in the files is executed, none outside of the folder is opened, and about one tensor is held in
memory.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.dcp import SafeReader, load_tensors
from titanlite.checkpoint.index import INDEX
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import MANIFEST, exists
from titanlite.config.torchtitan import Version
from titanlite.model.formats import from_meta_rotary
from titanlite.model.torchtitan import Said, architecture_from_torchtitan

# torchtitan 0.1 puts "model." before the names, unless it saves the model only.
_WEIGHT = re.compile(r"(model\.)?(tok_embeddings\.weight|norm\.weight|output\.weight|freqs_cis|layers\.\d{1,5}\..+)")
_DTYPES = ("float32", "bfloat16", "float16")


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
        self._reader = SafeReader(self.path, self._wanted)
        try:
            index = self._reader.read_index()
        except CheckpointError as error:
            raise UserError(f"{self.path}: {error}") from None
        self._prefix = "model." if any(name.startswith("model.") for name in index) else ""
        if odd := sorted(name for name in index if name.startswith("model.") != bool(self._prefix)):
            raise UserError(f"{self.path} has weights of two models: {odd[0]} is of the other one.")
        self._entries = {name.removeprefix(self._prefix): entry for name, entry in index.items()}
        angles = self._entries.pop("freqs_cis", None)
        if odd := [name for name, entry in self._entries.items() if entry.dtype not in _DTYPES]:
            raise UserError(f"{self.path}: {odd[0]} is {self._entries[odd[0]].dtype}, not one of {', '.join(_DTYPES)}.")
        found: Version | None = "0.1" if self._prefix or angles else "0.2" if self._is_full else None
        if version and found and version != found:
            text = f"{self.path} is written as torchtitan {found} does. Leave the option out."
            raise UserError(f"--torchtitan-version {version}: {text}")
        shapes = {name: entry.size for name, entry in self._entries.items()}
        head_dim = 2 * angles.size[1] if angles and len(angles.size) == 2 and angles.size[1] else None
        try:
            self.arch = architecture_from_torchtitan(shapes, said, version or found, head_dim)
        except ValueError as error:
            raise UserError(f"{self.path}: {error}.") from None

    def _wanted(self, name: str) -> bool:
        self._is_full |= name.startswith("optimizer.")
        return _WEIGHT.fullmatch(name) is not None

    def read(self, name: str) -> Tensor:
        """A whole tensor in this model's layout. Raises UserError: its file is damaged."""
        entry = self._entries[name]
        whole = torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
        try:
            load_tensors(self._reader, {f"{self._prefix}{name}": whole})
        except CheckpointError as error:
            raise UserError(f"{self.path}: {error}") from None
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            whole = from_meta_rotary(whole, self.arch.head_dim)
        return whole

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return getattr(torch, self._entries[name].dtype)


def _step_folder(folder: Path) -> Path:
    """`folder` itself, or its newest step. Raises UserError: it has no checkpoint of torchtitan's."""
    for home in (folder, folder / "checkpoint"):
        steps = [path for path in home.glob("step-*") if re.fullmatch(r"step-\d{1,12}", path.name)]
        newest = sorted(steps, key=lambda path: int(path.name[5:]), reverse=True)
        for path in (home, *newest):
            if exists(path / MANIFEST):
                text = "checkpoint.initial_load_path takes it as it is."
                raise UserError(f"{path} is a checkpoint of titanlite's: {text}")
            if exists(path / INDEX):
                return path
            if any(path.glob("*.safetensors")):
                raise UserError(f"{path} has .safetensors files, in Hugging Face's format. Import it with --hf.")
    what = "has no .metadata, and no step-N folder with one" if folder.is_dir() else "is no folder"
    raise UserError(f"{folder} {what}. Expected a checkpoint of torchtitan's.")

"""The index of a checkpoint, `.metadata`: which tensors it holds, and where their bytes lie.

Invariant: an index that `parse_index` returns describes each tensor whole: its chunks cover it exactly once, and each
byte of each file belongs to exactly one chunk. No torch is imported, so that `titanlite verify` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint.index_pickle import Global, Object, Table, read_pickle
from titanlite.checkpoint.open_files import read_file, shown
from titanlite.config.errors import Damage

INDEX = ".metadata"
ITEMSIZE = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "bool"), 1),
}
"""dtypes that a checkpoint may hold, by their names in torch, with the bytes of an element."""

_MODULE = "torch.distributed.checkpoint.metadata"
_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((_MODULE, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((_MODULE, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(("torch", dtype) for dtype in ITEMSIZE if dtype != "complex64"),
    # BytesStorageMetadata is left out, because DCP unpickles such entries without restriction.
}
# What the indices of other programs name besides. Their other entries are passed over.
_FOREIGN_GLOBALS = _GLOBALS | {
    (_MODULE, "BytesStorageMetadata"),
    ("torch", "complex64"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}
# A chunk takes 146 bytes. Llama 405B has 1,137 parameters with two moments each: 8.2e9 bytes, if each of 16,384 ranks
# holds a chunk of each of them. A layout with tensor or pipeline parallelism has far fewer chunks.
_MOST_BYTES = 1 << 33
_MOST_CUTS = 16  # nested in each other; a layout makes one or two for each dimension
_MOST_ELEMENTS, _MOST_DIMENSIONS = 1 << 62, 64  # of a tensor in torch


class Chunk(NamedTuple):
    """A part of a tensor, and the bytes of one file that hold it: `length` from `start` on, as `torch.save` writes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class TensorEntry(NamedTuple):
    """A tensor: the name of its dtype in torch, its shape, and its chunks."""

    dtype: str
    size: tuple[int, ...]
    chunks: list[Chunk]


Index = dict[str, TensorEntry]
Wanted = Callable[[str], bool]


def read_index(folder: Path, wanted: Wanted | None = None) -> Index:
    """The tensors of a checkpoint by name.

    Args:
        wanted: of a checkpoint that another program wrote, the names of the tensors to read. Other entries may be
            anything.

    Raises:
        Damage: as `parse_index`, or the file is missing.
        CheckpointError: it cannot be read now.
    """
    return parse_index(read_file(folder / INDEX, _MOST_BYTES), wanted)


def parse_index(raw: bytes, wanted: Wanted | None = None) -> Index:
    """The tensors by name. `wanted` as in `read_index`.

    Raises:
        Damage: `raw` is no pickle of such an index, or one of tensors that are not whole.
    """
    try:
        index = _tensors(read_pickle(raw, _FOREIGN_GLOBALS if wanted else _GLOBALS), wanted or (lambda _: True))
        if wanted is None:
            file_sizes(index)
    except Damage as damage:
        raise Damage(f"{INDEX}: {damage}") from None
    return index


def file_sizes(index: Index) -> dict[str, int]:
    """Name -> size in bytes of every file of the index.

    Raises:
        Damage: chunks overlap in a file, or leave a gap.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for entry in index.values():
        for chunk in entry.chunks:
            places.setdefault(chunk.file, []).append((chunk.start, chunk.length))
    for name, spans in places.items():
        end = 0
        for start, length in sorted(spans):
            if start != end:
                kind = "overlap" if start < end else "leave a gap"
                raise Damage(f"the chunks in {shown(name)} {kind} at byte {min(start, end)}")
            end += length
    return {name: sum(length for _, length in spans) for name, spans in places.items()}


def _tensors(root: Any, wanted: Wanted) -> Index:
    state = _state_of(root, "Metadata")
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, value in _pairs(state.get("storage_data")):
        place = _state_of(key, "MetadataIndex")
        name = _text(place.get("fqn"))
        if not wanted(name):
            continue
        where = name, _size(place.get("offset"))
        if where in places:
            raise Damage(f"{shown(name)}: two places for the same chunk")
        places[where] = _place(value)
    index: Index = {}
    for name, value in _pairs(state.get("state_dict_metadata")):
        if not wanted(_text(name)):
            continue
        if name in index:
            raise Damage(f"{shown(name)}: listed twice")
        index[name] = _entry(name, _state_of(value, "TensorStorageMetadata"), places)
    if places:
        raise Damage(f"{shown(next(iter(places))[0])}: a place for a chunk that no tensor has")
    return index


def _entry(name: str, state: dict[str, Any], places: dict[Any, tuple[str, int, int]]) -> TensorEntry:
    dtype, size, listed = _dtype(state.get("properties")), _size(state.get("size")), state.get("chunks")
    if not isinstance(listed, list) or math.prod(size) > _MOST_ELEMENTS:
        raise Damage(f"{shown(name)}: no list of chunks, or a shape that is none")
    chunks = []
    for value in listed:
        chunk = _state_of(value, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise Damage(f"{shown(name)}: a chunk with another number of dimensions")
        place = places.pop((name, offsets), None)
        if place is None:
            raise Damage(f"{shown(name)}: no place for one of its chunks, or two chunks there")
        if place[2] < math.prod(sizes) * ITEMSIZE[dtype]:
            raise Damage(f"{shown(name)}: {place[2]} bytes for a chunk of {math.prod(sizes)} {dtype}")
        chunks.append(Chunk(offsets, sizes, *place))
    boxes = [tuple((o, o + s) for o, s in zip(c.offsets, c.sizes, strict=True)) for c in chunks if math.prod(c.sizes)]
    whole = tuple((0, length) for length in size)
    if not (_cover(boxes, whole) if math.prod(size) else not boxes):
        raise Damage(f"{shown(name)}: its chunks do not cover it exactly once")
    return TensorEntry(dtype, size, chunks)


_Box = tuple[tuple[int, int], ...]


def _cover(boxes: list[_Box], whole: _Box, cuts: int = 0) -> bool:
    """Whether `boxes` fill `whole` without a gap and without an overlap.

    Layouts make grids: such boxes can be cut along a line that no box crosses, and then each side again. Boxes without
    such a line (around a hole), or with too many nested cuts (a spiral), come from no layout.
    """
    if len(boxes) <= 1 or cuts == _MOST_CUTS:
        return boxes == [whole]
    for dim, (begin, end) in enumerate(whole):
        groups: list[list[_Box]] = []
        reached = begin
        for box in sorted(boxes, key=lambda box: box[dim]):
            if box[dim][0] >= reached:
                if box[dim][0] > reached:
                    return False
                groups.append([])
            groups[-1].append(box)
            reached = max(reached, box[dim][1])
        if reached != end:
            return False
        if len(groups) > 1:
            starts = [group[0][dim][0] for group in groups]
            spans = zip(starts, [*starts[1:], end], strict=True)
            parts = [(*whole[:dim], span, *whole[dim + 1 :]) for span in spans]
            return all(_cover(group, part, cuts + 1) for group, part in zip(groups, parts, strict=True))
    return False


def _place(value: Any) -> tuple[str, int, int]:
    state = _state_of(value, "_StorageInfo")
    name: str = _text(state.get("relative_path"))
    start: Any = state.get("offset")
    length: Any = state.get("length")
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Damage(f"{shown(name)} is no file of this folder")
    if not _is_length(start) or not _is_length(length) or not length:
        raise Damage(f"{shown(name)}: no place in it")
    if state.get("transform_descriptors"):
        raise Damage(f"{shown(name)}: bytes that were transformed")
    return name, start, length


def _dtype(properties: Any) -> str:
    """The dtype, which is the first of the properties. The others do not count, because DCP ignores them, too."""
    state = properties.state if isinstance(properties, Object) and properties.kind == "TensorProperties" else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], Global) or state[0].name not in ITEMSIZE:
        raise Damage("a tensor without a dtype")
    return state[0].name


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, Object) and value.kind == "Size" and len(value.args) == 1 and value.state is None:
        size = value.args[0]
        if isinstance(size, tuple) and len(size) <= _MOST_DIMENSIONS and all(map(_is_length, size)):
            return size
    raise Damage("a shape or an offset that is none")


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_ELEMENTS


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Damage("a name that is no text")
    return value


def _state_of(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of an object."""
    if not isinstance(value, Object) or value.kind != kind:
        raise Damage(f"no {kind} where one belongs")
    return {_text(key): attribute for key, attribute in _pairs(value.state)}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Table):
        raise Damage("no table where one belongs")
    return value.pairs

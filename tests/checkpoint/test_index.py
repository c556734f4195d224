"""The index of a checkpoint is data: reading it runs no code, and what it leaves out or says twice is damage."""

import copyreg
import io
import os
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.index import Chunk, file_sizes, parse_index
from titanlite.config.errors import Damage

WAS_HERE = "/tmp/titanlite-was-here"
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def dumped(metadata: Any) -> bytes:
    return pickle.dumps(metadata, protocol=4)


def metadata_of(size: tuple[int, ...], boxes: list[Box], **changes: Any) -> Metadata:
    """Of one fp32 tensor "w", in chunks that lie one behind the other in the file "f"."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    dtype = changes.get("dtype", torch.float32)
    lengths = changes.get("lengths", [1000] * len(boxes))
    starts = changes.get("starts", [1000 * i for i in range(len(boxes))])
    file = changes.get("file", "f")
    places = {
        MetadataIndex("w", offsets): _StorageInfo(file, start, length)
        for (offsets, _), start, length in zip(boxes, starts, lengths, strict=True)
    }
    tensor = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)
    return Metadata({"w": tensor}, storage_data=places, storage_meta=StorageMeta(save_id="id"), version="1.0.0")


GRID: list[Box] = [((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (3, 3)), ((2, 3), (3, 1))]


def test_an_index_says_where_the_bytes_of_each_chunk_lie():
    index = parse_index(dumped(metadata_of((5, 4), GRID)))
    assert index["w"].dtype == "float32"
    assert index["w"].size == (5, 4)
    assert index["w"].chunks[3] == Chunk((2, 3), (3, 1), "f", 3000, 1000)
    assert file_sizes(index) == {"f": 4000}


@pytest.mark.parametrize("protocol", [4, 5])
def test_offsets_beyond_two_gigabytes_and_scalars_are_read(protocol):
    boxes: list[Box] = [((0,), (1 << 33,)), ((1 << 33,), (5,))]
    lengths = [1 << 36, 1000]
    metadata = metadata_of(((1 << 33) + 5,), boxes, lengths=lengths, starts=[0, 1 << 36])
    assert file_sizes(parse_index(pickle.dumps(metadata, protocol))) == {"f": (1 << 36) + 1000}
    assert parse_index(dumped(metadata_of((), [((), ())])))["w"].size == ()


@pytest.mark.parametrize(
    "boxes",
    [
        pytest.param([], id="none"),
        pytest.param(GRID[:3], id="a corner is missing"),
        pytest.param(GRID[1:], id="the first is missing"),
        pytest.param([*GRID[:3], ((1, 3), (4, 1))], id="overlap, and as many elements as a whole"),
        pytest.param([*GRID[:3], ((2, 3), (2, 1))], id="too small"),
        pytest.param([*GRID[:3], ((2, 3), (4, 1))], id="too large"),
        pytest.param([*GRID, ((1, 1), (1, 1))], id="one within another"),
        pytest.param([((0, 0), (5, 2)), ((0, 1), (5, 3))], id="columns overlap"),
        pytest.param([((0,), (20,))], id="another number of dimensions"),
    ],
)
def test_chunks_that_do_not_cover_a_tensor_exactly_once_are_damage(boxes):
    with pytest.raises(Damage, match=r"^\.metadata: w: "):
        parse_index(dumped(metadata_of((5, 4), boxes)))


@pytest.mark.parametrize("turns", [5, 60])
def test_a_spiral_of_chunks_is_damage(turns):
    """Each cut parts one chunk from all others: the time would be the square of their number."""
    rows: list[Box] = [((0, i), (turns, 1)) for i in range(turns)]
    steps = [box for i in range(turns) for box in (((i, i), (1, 2 * turns - i)), ((i + 1, i), (turns - 1 - i, 1)))]
    boxes = [box for box in steps if all(box[1])]
    assert parse_index(dumped(metadata_of((turns, turns), rows)))
    metadata = metadata_of((turns, 2 * turns), boxes)
    if turns < 10:
        assert parse_index(dumped(metadata))
        return
    with pytest.raises(Damage, match="do not cover it exactly once"):
        parse_index(dumped(metadata))


def test_ranks_that_hold_no_row_of_a_small_tensor_are_no_damage():
    assert parse_index(dumped(metadata_of((1, 4), [((0, 0), (1, 4)), ((1, 0), (0, 4))])))
    assert parse_index(dumped(metadata_of((0, 4), [((0, 0), (0, 4))])))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file": "../f"}, "is no file of this folder"),
        ({"file": "/etc/passwd"}, "is no file of this folder"),
        ({"file": ".."}, "is no file of this folder"),
        ({"file": "\x1b[2J"}, None),
        ({"lengths": [79]}, "79 bytes for a chunk of 20 float32"),
        ({"lengths": [0]}, "no place in it"),
        ({"starts": [-1]}, "no place in it"),
        ({"starts": [8]}, "leave a gap at byte 0"),
        ({"lengths": [True]}, "no place in it"),
        ({"dtype": torch.complex64}, "names torch.complex64"),
    ],
)
def test_bytes_that_cannot_be_those_of_the_tensor_are_damage(changes, reason):
    raw = dumped(metadata_of((5, 4), [((0, 0), (5, 4))], **changes))
    if reason is None:
        assert parse_index(raw)
        return
    with pytest.raises(Damage, match=reason):
        parse_index(raw)


def test_chunks_that_share_bytes_are_damage():
    with pytest.raises(Damage, match="chunks in f overlap at byte 2500"):
        parse_index(dumped(metadata_of((5, 4), GRID, starts=[0, 1000, 2000, 2500])))


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {WAS_HERE}",)


class Nested:
    def __reduce__(self):
        return getattr, (torch.Size, "mro")


@pytest.mark.parametrize(
    "planted", [Malicious(), Nested(), torch.nn.Linear, {"a": Malicious()}, BytesStorageMetadata()]
)
def test_a_planted_pickle_is_refused_before_it_runs(planted):
    with pytest.raises(Damage, match="has no place in a checkpoint"):
        parse_index(dumped(Metadata(state_dict_metadata={}, planner_data=planted)))
    assert not os.path.exists(WAS_HERE)


def test_attributes_for_a_class_are_refused_and_stay_nowhere():
    """The instruction BUILD on a class that an index may name would change it for the whole process."""
    code = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}\x8c\x07planted\x88sb."
    pickle.Unpickler(io.BytesIO(code))  # as such; it is not loaded
    for raw in (code, code.replace(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", class_by_stack())):
        with pytest.raises(Damage):
            parse_index(raw)
    assert not hasattr(Metadata, "planted")


def class_by_stack() -> bytes:
    module = b"torch.distributed.checkpoint.metadata"
    return b"\x8c" + bytes([len(module)]) + module + b"\x8c\x08Metadata\x93"


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x04", id="cut short"),
        pytest.param(b"\x80\x04.", id="nothing"),
        pytest.param(b"\x80\x04r\xff\xff\xff\xff.", id="a memo of 64 GiB"),
        pytest.param(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x00.", id="bytes of 72 PB"),
        pytest.param(b"\x80\x04X\xff\xff\xff\xff.", id="text of 4 GiB"),
        pytest.param(b"\x80\x04" + b"(" * 10**6, id="a million marks"),
        pytest.param(b"\x80\x04)" + b"\x94h\x00h\x00\x86" * 60 + b".", id="a tuple of 2 to the 60 parts"),
        pytest.param(b"\x80\x04)" + b"\x85" * 10**6 + b".", id="a million deep"),
        pytest.param(b"\x80\x04\x82\x01.", id="an extension"),
        pytest.param(b"\x80\x04Pid\n.", id="a persistent id"),
        pytest.param(pickle.dumps({"model": 1}, 4), id="a dict"),
        pytest.param(pickle.dumps({"model": 1}, 0), id="protocol 0"),
    ],
)
def test_something_else_than_an_index_is_damage(raw):
    copyreg.add_extension("os", "system", 1)
    try:
        with pytest.raises(Damage):
            parse_index(raw)
    finally:
        copyreg.remove_extension("os", "system", 1)

"""An altered index, whose checksums fit, is refused as damage or in words, or the right tensors are loaded."""

import pickle
import random
from typing import Any

import pytest
import torch
from mutants import ends_well, mutant
from resumes import Resumes
from test_step_folders import reseal
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from titanlite.checkpoint.index import parse_index
from titanlite.checkpoint.verify import verify

pytestmark = pytest.mark.usefixtures("one_rank")
_VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**63,
    2**200,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\x1b[2J",
    [],
    {},
    (),
    ((),),
)


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.long)])
def test_mutants_of_the_bytes(tmp_path, count):
    runs = Resumes(tmp_path)
    good = runs.index
    taken = 0
    for number in range(count):
        taken += runs.resume(number, lambda path, number=number: reseal(path, index=mutant(good, number)))
    assert taken < count / 2


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.long)])
def test_mutants_of_what_it_says(tmp_path, count):
    runs = Resumes(tmp_path)
    taken = 0
    for number in range(count):
        raw = altered(runs.index, random.Random(number))
        taken += runs.resume(number, lambda path, raw=raw: reseal(path, index=raw))
    assert 0 < taken < count / 2


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_mutants_without_a_run(tmp_path, count):
    """The parser alone: what it takes describes whole tensors of sizes that the file has."""
    good = Resumes(tmp_path).index
    for number in range(count):
        raw = mutant(good, number) if number % 2 else altered(good, random.Random(number))

        def act(raw=raw):
            for entry in parse_index(raw).values():
                assert sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks) == torch.Size(entry.size).numel()

        ends_well(number, act)


def test_verify_says_damaged_where_a_resume_does(tmp_path):
    runs = Resumes(tmp_path)
    for number in range(20):
        raw = altered(runs.index, random.Random(number))
        taken = runs.resume(number, lambda path, raw=raw: reseal(path, index=raw))
        runs.lay_out(lambda path, raw=raw: reseal(path, index=raw))
        assert taken <= (verify(runs.folder)["checkpoints"][1]["state"] == "good")


def altered(good: bytes, rng: random.Random) -> bytes:
    """An index that says something else, in up to three places."""
    metadata: Metadata = pickle.loads(good)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _alter(metadata, rng)
    return pickle.dumps(metadata, rng.choice((4, 4, 4, 5, 2)))


def _alter(metadata: Any, rng: random.Random) -> None:
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict) or not tensors or not places:
        return
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    tensor, key = tensors[name], rng.choice(list(places))
    match rng.randrange(12):
        case 0:
            tensors[rng.choice(("x", "", "a/b", other))] = tensors.pop(name)
        case 1:
            del places[key]
        case 2:
            places[rng.choice((MetadataIndex("x"), MetadataIndex(name, [1]), 3))] = places.pop(key)
        case 3:
            places[key] = _StorageInfo(*(rng.choice((*_VALUES, "__0_0.distcp", 1000)) for _ in range(3)))  # type: ignore[arg-type]
        case 4 if isinstance(places[key], _StorageInfo):
            setattr(places[key], rng.choice(("relative_path", "offset", "length", "transform_descriptors")), _any(rng))
        case 5 if hasattr(tensor, "chunks"):
            tensor.chunks = rng.choice(([], None, tensor.chunks * 2, [_any(rng)], {}, tensor))
        case 6 if hasattr(tensor, "size"):
            tensor.size = rng.choice((torch.Size([2**31]), torch.Size([2**62] * 4), torch.Size([1] * 70), _any(rng)))
        case 7 if hasattr(tensor, "chunks"):
            sizes = torch.Size(rng.choices((0, 1, 2, 16, 32, 64, 2**40), k=rng.randrange(4)))
            tensor.chunks = [ChunkStorageMetadata(torch.Size([0] * len(sizes)), sizes)]
        case 8 if hasattr(tensor, "properties"):
            tensor.properties.dtype = rng.choice(
                (torch.bfloat16, torch.float64, torch.uint8, torch.complex64, torch.qint8)
            )
        case 9:
            tensors[name] = rng.choice((_any(rng), tensors[other], metadata))
        case 10:
            metadata.__dict__[rng.choice(("state_dict_metadata", "storage_data", "planner_data", "x"))] = _any(rng)
        case 11 if hasattr(tensor, "__dict__") and tensor.__dict__:
            del tensor.__dict__[rng.choice(list(tensor.__dict__))]


def _any(rng: random.Random) -> Any:
    return rng.choice(_VALUES)

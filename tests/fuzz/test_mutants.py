"""Damaged and hostile files are rejected with a UserError or loaded correctly, within two seconds.

The mutation depends only on its number. Weights, tokenizers and job files are mutated.
"""

import base64
import copy
import functools
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch
from tokenizers import Tokenizer

from titanlite.checkpoint.huggingface import (
    Weights,
    export_hf,
    hf_weights,
    load_hf_weights,
    meta_weights,
)
from titanlite.config.errors import UserError
from titanlite.config.flavors import Architecture
from titanlite.config.load import JOB_FILES, dump_config, load_job
from titanlite.data.tokenizer import TiktokenTokenizer, load_tokenizer
from titanlite.data.tokenizer_files import convert_tiktoken
from titanlite.load_run import load_run
from titanlite.model.formats import parameter_shapes
from titanlite.model.llama import Llama

SAMPLE = pytest.param(40, id="sample")
ALL = pytest.param(1500, marks=pytest.mark.long, id="long")

_DEEP: Any = []
for _ in range(400):
    _DEEP = [_DEEP]
_NUMBERS = (
    *(-1, 0, 1, 2, 3, 7),
    *(2**31, 2**63, 2**64, 10**40, 10**400),
    *(0.5, 1e308, 1e-320, -0.0),
)
_WORDS = "x 0 ../../etc/passwd (a+)+$ * (?<n llama3 default Split BPE \x1b[2J\u202e \ud800".split(
    " "
)
_VALUES = (
    *_NUMBERS,
    *_WORDS,
    *(float("nan"), float("inf")),
    *(None, True, False, "", "a" * 10**5),
    *([], {}, [[]], [None], {"": {}}, _DEEP),
)
_JUNK = (b"\0", b"-", b"9" * 20, b"{", b"]", b'"', b"\n", b"\xff", b"\x1b")


def mutant(good: bytes, number: int, is_json: bool = False) -> bytes:
    """Change one to three bytes of `good`, or values and keys of its JSON."""
    rng = random.Random(number)
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            value = json.loads(good) if is_json and rng.random() < 0.7 else None
        except (ValueError, RecursionError):
            continue
        if value and isinstance(value, dict):
            good = _change_value(value, rng)
        else:
            good = _change_bytes(good, rng)
    return good


def _choose_key(table: Any, rng: random.Random) -> Any:
    """Return a random key of a dict, or a random index of a list."""
    if isinstance(table, dict):
        return rng.choice(list(table))
    return rng.randrange(len(table))


def _change_value(root: dict[str, Any], rng: random.Random) -> bytes:
    """Delete, rename or replace a random value within `root`."""
    table: Any = root
    while True:
        key = _choose_key(table, rng)
        value = table[key]
        is_leaf = not isinstance(value, dict | list) or not value
        if is_leaf or rng.random() < 0.3:
            break
        table = value
    match rng.randrange(4):
        case 0:
            del table[key]
        case 1 if isinstance(table, dict):
            del table[key]
            new_key = rng.choice(("x", "", key.upper(), f"{key}s", *root))
            table[new_key] = value
        case 2:
            table[key] = copy.deepcopy(rng.choice([*root.values()]))
        case _:
            table[key] = rng.choice(_VALUES)
    return json.dumps(root).encode()


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = start + rng.choice((1, 1, 4, 64))
    repeated = data[start:end] * 2
    junk = rng.choice(_JUNK)
    random_bytes = rng.randbytes(end - start)
    middle = rng.choice((b"", repeated, random_bytes, junk))
    tail = data[end:] if rng.random() < 0.9 else b""
    return data[:start] + middle + tail


def succeeds(number: int, function: Callable[[], object]) -> bool:
    """Call a function, and return whether it succeeded.

    Any error other than a printable UserError fails the test, and so do more than two seconds of
    CPU time. CPU time does not depend on other tests.
    """
    started = time.process_time()
    message = ""
    try:
        function()
    except UserError as error:
        message = str(error)
    except BaseException as error:
        error.add_note(f"mutant {number}")
        raise
    seconds = time.process_time() - started
    assert seconds < 2.0, f"mutant {number} took {seconds:.1f} s"
    without_layout = message.replace("\n", "x").replace("\t", "x")
    assert without_layout.isprintable(), f"mutant {number}: {message!r}"
    assert len(message) < 10_000, f"mutant {number}"
    return not message


ARCH = Architecture(
    *(16, 2, 2, 1, 24, 40, 64),
    rope_scaling_factor=8.0,
    rope_original_max_seq_len=16,
)
TOKENS = torch.arange(30)[None]
TEXTS = (
    "def f(x):\n    return x  # Zürich 日本語 12345\r\n",
    "don't <|end_of_text|> \ud800 \x00",
    "",
    " " * 300,
)
PARAMS = (
    '{"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "norm_eps": 1e-5,'
    ' "rope_theta": 500000.0, "use_scaled_rope": true, "vocab_size": -1, "multiple_of": 256,'
    ' "ffn_dim_multiplier": 1.3}'
)
TOKENIZER_CONFIG = (
    '{"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>",'
    ' "model_max_length": 10}'
)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Create a valid folder of each format."""
    folder = tmp_path_factory.mktemp("good")
    model = Llama(ARCH)
    model.init_weights(1)
    weights = Weights(ARCH, {}, model.get_parameter)
    ends: dict[str, int | None] = {"bos_token_id": 1, "eos_token_id": 2}
    export_hf(weights, folder / "hf", "float32", lambda _: ends, shard_bytes=6000)

    meta = folder / "meta"
    meta.mkdir()
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    torch.save(tensors | {"rope.freqs": torch.ones(4)}, meta / "consolidated.00.pth")
    (meta / "params.json").write_text(PARAMS)

    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"re", b"tu", b"rn", b"retu", b"return", b"  ", b"    ", b"ef"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tokenizer / "tokenizer.model").write_text("".join(lines))
    converted = convert_tiktoken(TiktokenTokenizer(tokenizer / "tokenizer.model"))
    converted.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(TOKENIZER_CONFIG)
    return folder


def load_hf(folder: Path) -> torch.Tensor:
    model = Llama(hf_weights(folder).arch)
    load_hf_weights(folder, model)
    with torch.no_grad():
        return model(TOKENS % model.arch.vocab_size)


def load_meta(folder: Path) -> None:
    weights = meta_weights(folder)
    for name, shape in parameter_shapes(weights.arch).items():
        assert weights.read(name).shape == shape
        assert weights.dtypes[name].is_floating_point


def load_tiktoken(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert max(ids, default=0) < tokenizer.vocab_size - 256
        assert tokenizer.decode(ids) == text.replace("\ud800", "\ufffd")


def load_json(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text.replace("\ud800", "\ufffd"), add_special_tokens=False).ids
        assert max(ids, default=0) < tokenizer.vocab_size


def assert_transformers_agrees(folder: Path, number: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()))
        theirs = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        with torch.no_grad():
            expected = theirs(TOKENS % config.vocab_size).logits
    except Exception:  # transformers rejects the configuration
        return
    # fp32 sums have another order.
    tolerance = float(2e-5 * expected.nan_to_num(0, 0, 0).abs().max())
    logits = load_hf(folder)
    close = torch.isclose(logits, expected, rtol=1e-4, atol=tolerance, equal_nan=True)
    assert close.all() or not expected.isfinite().all(), f"mutant {number}"


# Folder, files to damage in turn, and function that loads the folder.
FILES = [
    ("hf", ["config.json", INDEX, "model-00001-of-*.safetensors"], load_hf),
    ("meta", ["params.json", "consolidated.00.pth"], load_meta),
    ("tokenizer", ["tokenizer.model"], load_tiktoken),
    ("tokenizer", ["tokenizer.json", "tokenizer_config.json"], load_json),
]


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize(
    ("kind", "names", "load"), FILES, ids=[load.__name__ for _, _, load in FILES]
)
def test_a_damaged_file_is_rejected_or_loaded_correctly(kind, names, load, count, good, tmp_path):
    files = [next((good / kind).glob(name)) for name in names]
    folder = shutil.copytree(good / kind, tmp_path / kind)
    num_loaded = 0
    for number in range(count):
        original = files[number % len(files)]
        content = mutant(original.read_bytes(), number, original.suffix == ".json")
        (folder / original.name).write_bytes(content)
        if succeeds(number, functools.partial(load, folder)):
            num_loaded += 1
            if kind == "hf":
                assert_transformers_agrees(folder, number)
        shutil.copy(original, folder)

    assert 0 < num_loaded < count


@pytest.mark.parametrize(
    "name",
    ["../secret", "{secret}", "", ".", "..", "a/../../secret", "\0", "a" * 10**5],
    ids=lambda name: repr(name)[:20],
)
def test_names_in_an_index_never_lead_out_of_the_folder(tmp_path, good, name):
    secret = shutil.copy(next((good / "hf").glob("*.safetensors")), tmp_path / "secret")
    folder = shutil.copytree(good / "hf", tmp_path / "hf")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name.format(secret=secret)
    (folder / INDEX).write_text(json.dumps(index))

    assert not succeeds(0, lambda: hf_weights(folder))


TRAPS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to("../moved"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize(("kind", "load"), [("hf", hf_weights), ("meta", meta_weights)])
def test_a_file_that_is_not_regular_is_rejected_without_waiting(tmp_path, good, kind, load):
    files = {path.name for path in (good / kind).iterdir()} - {"generation_config.json"}
    for file, (trap, set_trap) in itertools.product(files, TRAPS.items()):
        folder = shutil.copytree(good / kind, tmp_path / f"{file}-{trap}")
        (folder / file).rename(tmp_path / "moved")
        set_trap(folder / file)
        assert not succeeds(0, functools.partial(load, folder)), folder


def toml_mutant(file: Path, number: int) -> bytes:
    """Change bytes of the file, or keys and values of the whole job."""
    if number % 2:
        return mutant(file.read_bytes(), number)
    job = load_job(["--job.config_file", str(file)]).model_dump(mode="json", exclude_none=True)
    changed = mutant(json.dumps(job).encode(), number, is_json=True)
    try:
        return tomlkit.dumps(json.loads(changed)).encode("utf-8", "surrogatepass")
    # The mutated text may be invalid JSON or TOML.
    except (ValueError, RecursionError, AttributeError):
        return changed


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_a_damaged_job_file_is_rejected_or_a_valid_job(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def check() -> None:
        job = load_run(["--job.config_file", "mutant.toml"], 8).job
        Path("copy.toml").write_text(dump_config(job), encoding="utf-8")
        assert load_job(["--job.config_file", "copy.toml"]) == job

    files = sorted(JOB_FILES.glob("*.toml"))
    num_valid = 0
    for number in range(count):
        Path("mutant.toml").write_bytes(toml_mutant(files[number % len(files)], number))
        num_valid += succeeds(number, check)

    assert 0 < num_valid < count  # the mutants reach different checks

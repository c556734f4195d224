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
_VALUES = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**40, 10**400, 0.5, 1e308, 1e-320, -0.0),
    *(float("nan"), float("inf"), "", "x", "0", "\x1b[2J\u202e", "\ud800", "a" * 10**5, "../../etc/passwd"),
    *("(a+)+$", "*", "(?<n", "llama3", "default", "Split", "BPE", [], {}, [[]], [None], {"": {}}, _DEEP),
)  # fmt: skip


def mutant(good: bytes, number: int, is_json: bool = False) -> bytes:
    """Change one to three bytes of `good`, or values and keys of its JSON."""
    rng = random.Random(number)
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            value = json.loads(good) if is_json and rng.random() < 0.7 else None
        except (ValueError, RecursionError):
            continue
        good = (
            _change_value(value, rng)
            if value and isinstance(value, dict)
            else _change_bytes(good, rng)
        )
    return good


def _change_value(root: dict[str, Any], rng: random.Random) -> bytes:
    """Delete, rename or replace a random value within `root`."""
    table: Any = root
    while True:
        key: Any = rng.choice(list(table)) if isinstance(table, dict) else rng.randrange(len(table))
        if not isinstance(table[key], dict | list) or not table[key] or rng.random() < 0.3:
            break
        table = table[key]
    match rng.randrange(4):
        case 0:
            del table[key]
        case 1 if isinstance(table, dict):
            table[rng.choice(("x", "", key.upper(), f"{key}s", *root))] = table.pop(key)
        case 2:
            table[key] = copy.deepcopy(rng.choice([*root.values()]))
        case _:
            table[key] = rng.choice(_VALUES)
    return json.dumps(root).encode()


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = start + rng.choice((1, 1, 4, 64))
    junk = rng.choice((b"\0", b"-", b"9" * 20, b"{", b"]", b'"', b"\n", b"\xff", b"\x1b"))
    middle = rng.choice((b"", data[start:end] * 2, rng.randbytes(end - start), junk))
    return data[:start] + middle + data[end if rng.random() < 0.9 else len(data) :]


def ends_well(number: int, act: Callable[[], object]) -> bool:
    """Return whether `act` succeeded.

    Any error other than a printable UserError fails the test, and so do more than two seconds of
    CPU time. CPU time does not depend on other tests.
    """
    before, refusal = time.process_time(), ""
    try:
        act()
    except UserError as error:
        refusal = str(error)
    except BaseException as error:
        error.add_note(f"mutant {number}")
        raise
    assert time.process_time() - before < 2.0, (
        f"mutant {number} took {time.process_time() - before:.1f} s"
    )
    assert refusal.replace("\n", "x").isprintable(), f"mutant {number}: {refusal!r}"
    assert len(refusal) < 10_000, f"mutant {number}: a message of {len(refusal)} characters"
    return not refusal


ARCH = Architecture(16, 2, 2, 1, 24, 40, 64, rope_scaling_factor=8.0, rope_original_max_seq_len=16)
TOKENS = torch.arange(30)[None]
TEXTS = (
    "def f(x):\n    return x  # Zürich 日本語 12345\r\n",
    "don't <|end_of_text|> \ud800 \x00",
    "",
    " " * 300,
)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Create a valid folder of each format."""
    folder = tmp_path_factory.mktemp("good")
    model = Llama(ARCH)
    model.init_weights(1)
    ends: dict[str, int | None] = {"bos_token_id": 1, "eos_token_id": 2}
    export_hf(
        Weights(ARCH, {}, model.get_parameter),
        folder / "hf",
        "float32",
        lambda _: ends,
        shard_bytes=6000,
    )
    (folder / "meta").mkdir()
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    torch.save(tensors | {"rope.freqs": torch.ones(4)}, folder / "meta" / "consolidated.00.pth")
    params = {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    params |= {
        "use_scaled_rope": True,
        "vocab_size": -1,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.3,
    }
    (folder / "meta" / "params.json").write_text(json.dumps(params))
    (folder / "tokenizer").mkdir()
    tokens = [bytes([byte]) for byte in range(256)] + [
        b"re",
        b"tu",
        b"rn",
        b"retu",
        b"return",
        b"  ",
        b"    ",
        b"ef",
    ]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tokenizer/tokenizer.model").write_text("".join(lines))
    converted = convert_tiktoken(TiktokenTokenizer(folder / "tokenizer/tokenizer.model"))
    converted.save(str(folder / "tokenizer/tokenizer.json"))
    config = {
        "bos_token": {"content": "<|begin_of_text|>"},
        "eos_token": "<|eot_id|>",
        "model_max_length": 10,
    }
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
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
    except Exception:  # a description that it does not take, and that changes nothing
        return
    scale = expected.nan_to_num(0, 0, 0).abs().max()
    close = torch.isclose(
        load_hf(folder), expected, rtol=1e-4, atol=float(2e-5 * scale), equal_nan=True
    )
    assert close.all() or not expected.isfinite().all(), (
        f"mutant {number}"
    )  # fp32 sums in another order


FILES = [  # the folder, the files of it that are damaged in turn, and what is done with it
    ("hf", ["config.json", INDEX, "model-00001-of-*.safetensors"], load_hf),
    ("meta", ["params.json", "consolidated.00.pth"], load_meta),
    ("tokenizer", ["tokenizer.model"], load_tiktoken),
    ("tokenizer", ["tokenizer.json", "tokenizer_config.json"], load_json),
]


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize(
    ("kind", "names", "load"), FILES, ids=[load.__name__ for _, _, load in FILES]
)
def test_a_mutant_is_refused_or_what_its_origin_is(kind, names, load, count, good, tmp_path):
    files = [next((good / kind).glob(name)) for name in names]
    folder, taken = tmp_path / kind, 0
    shutil.copytree(good / kind, folder)
    for number in range(count):
        original = files[number % len(files)]
        (folder / original.name).write_bytes(
            mutant(original.read_bytes(), number, original.suffix == ".json")
        )
        if ends_well(number, functools.partial(load, folder)):
            taken += 1
            if kind == "hf":
                assert_transformers_agrees(folder, number)
        shutil.copy(original, folder)
    assert 0 < taken < count


def test_names_never_lead_out_of_the_folder_and_pipes_do_not_wait(tmp_path, good):
    secret = tmp_path / "secret.safetensors"
    shutil.copy(next((good / "hf").glob("*.safetensors")), secret)
    names = (
        "../secret.safetensors",
        str(secret),
        "",
        ".",
        "..",
        "a/../../secret.safetensors",
        "\0",
        "a" * 10**5,
    )
    shutil.copytree(good / "hf", tmp_path / "hf")
    for number, name in enumerate(names):
        index = json.loads((good / "hf" / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = name
        (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
        assert not ends_well(number, lambda: hf_weights(tmp_path / "hf"))
    traps = {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "link": lambda path: path.symlink_to("../moved"),
    }
    traps["loop"] = lambda path: path.symlink_to(path.name)
    for kind, load in (("hf", hf_weights), ("meta", meta_weights)):
        files = sorted(
            path.name for path in (good / kind).iterdir() if path.name != "generation_config.json"
        )
        for file, (trap, set_trap) in itertools.product(files, traps.items()):
            folder = tmp_path / f"{kind}-{file}-{trap}"
            shutil.copytree(good / kind, folder)
            (folder / file).rename(tmp_path / "moved")
            set_trap(folder / file)
            assert not ends_well(0, functools.partial(load, folder)), folder


def toml_mutant(file: Path, number: int) -> bytes:
    """Change bytes of the file, or keys and values of the whole job."""
    if number % 2:
        return mutant(file.read_bytes(), number)
    job = load_job(["--job.config_file", str(file)]).model_dump(mode="json", exclude_none=True)
    changed = mutant(json.dumps(job).encode(), number, is_json=True)
    try:
        return tomlkit.dumps(json.loads(changed)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, AttributeError):  # no JSON any more, or no TOML
        return changed


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_a_mutant_is_a_job_or_a_users_error(count: int, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def check() -> None:
        job = load_run(["--job.config_file", "mutant.toml"], 8).job
        Path("copy.toml").write_text(dump_config(job), encoding="utf-8")
        assert load_job(["--job.config_file", "copy.toml"]) == job

    files, valid = sorted(JOB_FILES.glob("*.toml")), 0
    for number in range(count):
        Path("mutant.toml").write_bytes(
            toml_mutant(files[number % len(files)], number)
        )  # stays if it fails
        valid += ends_well(number, check)
    assert 0 < valid < count  # mutants that all fail at the same place would prove little

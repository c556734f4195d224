"""A damaged folder of Hugging Face's or Meta's is refused in words, or computes what its origin computes."""

import dataclasses
import functools
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import ALL, SAMPLE, ends_well, mutant

from titanlite.checkpoint.published import HuggingFaceReader, MetaReader, export_hf, load_hf_weights
from titanlite.config.flavors import Architecture
from titanlite.model.formats import parameter_shapes
from titanlite.model.llama import Llama

ARCH = Architecture(16, 2, 2, 1, 24, vocab_size=40, max_seq_len=64, rope_scaling_factor=8.0)
TOKENS = torch.arange(30)[None]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    model: Any = Llama(dataclasses.replace(ARCH, rope_original_max_seq_len=16))
    model.init_weights(1)
    folder = tmp_path_factory.mktemp("good")
    model.read = model.get_parameter  # as a checkpoint has them
    export_hf(model, folder / "hf", "float32", lambda _: {"bos_token_id": 1, "eos_token_id": 2}, shard_bytes=6000)
    (folder / "meta").mkdir()
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    torch.save(tensors | {"rope.freqs": torch.ones(4)}, folder / "meta" / "consolidated.00.pth")
    params = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "norm_eps": 1e-5, "rope_theta": 500000.0}
    params |= {"use_scaled_rope": True, "vocab_size": -1, "multiple_of": 256, "ffn_dim_multiplier": 1.3}
    (folder / "meta" / "params.json").write_text(json.dumps(params))
    return folder


def damaged(original: Path, folder: Path, number: int, name: str) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    (folder / name).write_bytes(mutant((original / name).read_bytes(), number, name.endswith(".json")))
    return folder


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_mutants_of_a_hugging_face_folder(tmp_path, good, count):
    weights = sorted(path.name for path in (good / "hf").glob("*.safetensors"))
    names = ["config.json", "config.json", "model.safetensors.index.json", weights[0]]
    taken = 0
    for number in range(count):
        folder = damaged(good / "hf", tmp_path / "hf", number, names[number % 4])
        result = []

        def act(folder=folder, result=result):
            reader = HuggingFaceReader(folder)
            ours = Llama(reader.arch)
            load_hf_weights(folder, ours)
            with torch.no_grad():
                result.append(ours(TOKENS % reader.arch.vocab_size))

        if ends_well(number, act):
            taken += 1
            assert_transformers_agrees(folder, result[0], number)
    assert 0 < taken < count


def assert_transformers_agrees(folder: Path, found: torch.Tensor, number: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()))
        theirs = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        with torch.no_grad():
            expected = theirs(TOKENS % config.vocab_size).logits
    except Exception:  # a description that it does not take, and that changes nothing
        return
    scale = expected.nan_to_num(0, 0, 0).abs().max()
    close = torch.isclose(found, expected, rtol=1e-4, atol=float(2e-5 * scale), equal_nan=True)
    assert close.all() or not expected.isfinite().all(), f"mutant {number}"  # fp32 sums in another order


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_mutants_of_metas_folder(tmp_path, good, count):
    taken = 0
    for number in range(count):
        folder = damaged(good / "meta", tmp_path / "meta", number, ("params.json", "consolidated.00.pth")[number % 2])

        def act(folder=folder):
            reader = MetaReader(folder)
            for name, shape in parameter_shapes(reader.arch).items():
                assert reader.read(name).shape == shape
                assert reader.dtypes[name].is_floating_point
            Llama(reader.arch)

        taken += ends_well(number, act)
    assert 0 < taken < count


def test_names_never_lead_out_of_the_folder_and_pipes_do_not_wait(tmp_path, good):
    secret = tmp_path / "secret.safetensors"
    shutil.copy(next((good / "hf").glob("*.safetensors")), secret)
    names = ("../secret.safetensors", str(secret), "", ".", "..", "a/../../secret.safetensors", "\0", "a" * 10**5)
    for number, name in enumerate(names):
        folder = tmp_path / f"name{number}"
        shutil.copytree(good / "hf", folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.norm.weight"] = name
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert not ends_well(number, lambda folder=folder: HuggingFaceReader(folder))
    traps = {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to("../moved")}
    traps["loop"] = lambda path: path.symlink_to(path.name)
    for kind, reader in (("hf", HuggingFaceReader), ("meta", MetaReader)):
        files = sorted(path.name for path in (good / kind).iterdir() if path.name != "generation_config.json")
        for file, (trap, set_trap) in itertools.product(files, traps.items()):
            folder = tmp_path / f"{kind}-{file}-{trap}"
            shutil.copytree(good / kind, folder)
            (folder / file).rename(tmp_path / "moved")
            set_trap(folder / file)
            assert not ends_well(0, functools.partial(reader, folder)), folder

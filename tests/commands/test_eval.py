"""`titanlite eval`: the loss of a text is that of transformers, in every layout, with each token scored once."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import World, titanlite
from torch.nn import functional as F

from titanlite import cli
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.save import Saver
from titanlite.config.load import PACKAGE, dump_config
from titanlite.config.run import architecture
from titanlite.config.schema import JobConfig, Parallelism
from titanlite.data.tokenizer import load_tokenizer
from titanlite.model.llama import Llama
from titanlite.runtime.process import STORE
from titanlite.score import TextScore, evaluate_text

TOKENIZER = load_tokenizer(PACKAGE / "assets" / "tokenizer" / "tokenizer.model")
MODEL = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
JOB = JobConfig.model_validate(
    {"job": {"dump_folder": "unused"}, "model": {**MODEL, "vocab_size": 4096}, "training": {"seq_len": 48}}
)
TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "import os  # <|end_of_text|><|begin_of_text|>",
    "",
    "größer 数 = 3\n" * 15,
    "a = [1, 2]\n" * 40,
]


def random_model(seed: int) -> Llama:
    """Weights large enough that its logits are far from equal, and the likeliest token far from a tie."""
    model, generator = Llama(architecture(JOB.model)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    return model


def save_run(folder: Path, *steps: int) -> Path:
    """What a run leaves: config.toml, and checkpoints with the weights of `random_model(step)`."""
    (folder / "config.toml").write_text(dump_config(JOB))
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    for step in steps:
        live = LiveState(random_model(step))
        checkpoints = CheckpointFolder(JOB.checkpoint, folder / "checkpoint", live, lambda line: None)
        data = {"version": 1, "tokenizer": TOKENIZER.fingerprint}
        Saver(checkpoints).save(step, {"step": step, "tokens": 0, "data": data})
    dist.destroy_process_group()
    return folder


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """One that has failed does not end itself, because it would wait for other ranks."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("run"), 5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All of TEXTS: the first in a text file, the others as JSON lines."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    return [folder / "a.txt", folder / "b.jsonl"]


def score_by_transformers(folder: Path, length: int, stride: int) -> tuple[float, int]:
    """Nats and tokens of TEXTS, by the loop of transformers' guide on perplexity."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]])
        reached = 1  # the token that begins a document is not scored
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + length, ids.shape[1])
            with torch.no_grad():
                logits = model(ids[:, begin:end]).logits[0, reached - 1 - begin : -1].double()
            total += F.cross_entropy(logits, ids[0, reached:end], reduction="sum").item()
            count, reached = count + end - reached, end
            if end == ids.shape[1]:
                break
    return total, count


@pytest.mark.slow
def test_the_loss_is_that_of_transformers_on_the_exported_model(
    trained: Path, files: list[Path], tmp_path: Path
) -> None:
    titanlite("export", "--checkpoint", trained, "--out", tmp_path / "hf", "--dtype", "float32")
    for length, stride in ((48, 24), (33, 5)):  # the first is what there is without options
        settings: dict[str, Any] = {} if length == 48 else {"window": length, "stride": stride}
        ours = asdict(evaluate_text(trained, files, **settings))
        total, tokens = score_by_transformers(tmp_path / "hf", length, stride)
        assert ours["tokens"] == tokens
        # fp32 sums in another order
        assert ours["loss"] == pytest.approx(total / tokens, rel=1e-5)
        assert ours["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
        num_bytes = sum(len(text.encode()) for text in TEXTS)
        assert ours["bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, rel=1e-5)
        assert (ours["documents"], ours["bytes"]) == (5, num_bytes)


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {},
        {"data_parallel_replicate_degree": 2},
        {"tensor_parallel_degree": 2},
        {"context_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    ],
    4: [{"tensor_parallel_degree": 2}],
}


def scores_of_layouts(trained: Path, files: list[Path], layouts: list[dict], store: Path) -> list[TextScore]:
    """Each evaluation has a world of its own."""
    os.environ[STORE] = f"{store}-of-scores"
    settings: dict[str, Any] = {"window": 37, "stride": 10, "batch_size": 3}
    parallelisms = map(Parallelism.model_validate, layouts)
    return [evaluate_text(trained, files, parallelism=parallelism, **settings) for parallelism in parallelisms]


@pytest.mark.slow
@pytest.mark.parametrize("count", LAYOUTS)
def test_every_layout_gives_the_score_of_one_process(trained: Path, files: list[Path], count: int) -> None:
    alone = evaluate_text(trained, files, window=37, stride=10)
    world = World(count, scores_of_layouts, trained, files, LAYOUTS[count])
    world.ends_with(0)
    for of_rank in world.results():
        for score in of_rank:
            assert score.loss == pytest.approx(alone.loss, rel=1e-6)  # fp32 sums in another order
            assert (score.tokens, score.bytes, score.documents) == (alone.tokens, alone.bytes, alone.documents)
            assert score.checkpoint == str(trained / "checkpoint" / "step-00000005")


@pytest.mark.slow
def test_ngpu_starts_the_ranks_and_json_stands_alone_on_standard_output(trained: Path, files: list[Path]) -> None:
    command = [sys.executable, "-m", "titanlite", "eval", "--checkpoint", str(trained), "--data", *map(str, files)]
    words = ["--json", "--parallelism.tensor_parallel_degree", "2"]
    environment = {**os.environ, "NGPU": "2"}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=True)
    assert "float32 on 2 x cpu" in done.stderr
    alone = evaluate_text(trained, files)
    assert json.loads(done.stdout)["loss"] == pytest.approx(alone.loss, rel=1e-6)  # fp32 sums in another order


@pytest.mark.parametrize(
    ("name", "content", "words", "said"),
    [
        ("none.txt", None, [], "none.txt"),
        ("text.pdf", b"%PDF", [], "must end in .txt, .jsonl"),
        ("other.jsonl", b'{"body": "x"}\n', [], "no field 'text' (text_column); there are: 'body'"),
        ("latin.txt", b"gr\xf6\xdfer", [], "latin.txt, line 1: 'utf-8' codec can't decode"),
        ("blank.jsonl", b'{"text": ""}\n', [], "there is no text to score"),
        ("good.txt", b"x", ["--window", "65"], "--window 65: the model has 64 positions"),
        ("good.txt", b"x", ["--stride", "48"], "--stride 48: must be less than the window of 48 tokens"),
        ("good.txt", b"x", ["--stride", "0", "--batch-size", "0"], "stride = 0"),
        ("good.txt", b"x", ["--training.steps", "5"], "--training.steps: unknown option of `titanlite eval`"),
        ("good.txt", b"x", ["--parallelism.tensor_parallel_degree", "2"], "parallelism.tensor_parallel_degree = 2"),
        ("good.txt", b"x", ["--parallelism.tensor", "2"], "--parallelism.tensor unknown"),
    ],
)
def test_what_cannot_be_scored(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None,
    words: list[str], said: str,
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["eval", "--checkpoint", str(trained), "--data", str(tmp_path / name), *words]) == 2
    errors = capsys.readouterr().err
    assert said in " ".join(errors.split())
    assert "Traceback" not in errors

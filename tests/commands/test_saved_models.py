"""`titanlite eval`: the loss of a text is that of transformers, in every layout, with each token scored once.
`titanlite generate`: a completion is what forward passes over the whole text give."""

import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import World, titanlite
from torch.nn import functional as F

from titanlite import cli, completion, generate, generate_many, load_checkpoint
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.published import checkpoint_weights
from titanlite.checkpoint.save import Saver
from titanlite.completion import LoadedCheckpoint, choose
from titanlite.config.errors import CheckpointError
from titanlite.config.load import PACKAGE, dump_config
from titanlite.config.run import architecture
from titanlite.config.schema import JobConfig, Parallelism
from titanlite.data.tokenizer import load_tokenizer
from titanlite.model.llama import Llama
from titanlite.runtime.process import STORE
from titanlite.score import TextScore, evaluate_text

Output = pytest.CaptureFixture[str]
MODEL_FILE = PACKAGE / "assets" / "tokenizer" / "tokenizer.model"
TOKENIZER = load_tokenizer(MODEL_FILE)
PROMPTS = ["def f", "import os, sys", "", "class A:", "x"]
MODEL = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}
JOB = JobConfig.model_validate(
    {"job": {"dump_folder": "unused"}, "model": {**MODEL, "vocab_size": 4096}, "training": {"seq_len": 48}}
)
TEXTS = ["def f(x):\n    return x + 1\n" * 20, "import os  # <|end_of_text|><|begin_of_text|>", ""]
TEXTS += ["größer 数 = 3\n" * 15, "a = [1, 2]\n" * 40]


def random_model(seed: int, job: JobConfig = JOB) -> Llama:
    """Weights large enough that its logits are far from equal, and the likeliest token far from a tie."""
    model, generator = Llama(architecture(job.model)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            elif job is not JOB:
                parameter.add_(noise / 4)
    return model


def save_run(folder: Path, *steps: int, job: JobConfig = JOB) -> Path:
    """What a run leaves: config.toml, and checkpoints with the weights of `random_model(step)`."""
    (folder / "config.toml").write_text(dump_config(job))
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    for step in steps:
        live = LiveState(random_model(step, job))
        checkpoints = CheckpointFolder(job.checkpoint, folder / "checkpoint", live, lambda line: None)
        data = {"version": 1, "tokenizer": TOKENIZER.fingerprint}
        Saver(checkpoints).save(step, {"step": step, "tokens": 0, "data": data})
    dist.destroy_process_group()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("run"), 10, 20)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All of TEXTS: the first in a text file, the others as JSON lines."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    return [folder / "a.txt", folder / "b.jsonl"]


def test_the_mean_of_checkpoints_is_a_checkpoint_of_weights(trained: Path, files: list[Path], tmp_path: Path):
    out, first = tmp_path / "mean", trained / "checkpoint" / "step-00000010"
    words = "average", first, trained, "--weights", 1, 3, "--out"
    titanlite(*words, out)
    mean = load_checkpoint(out)
    for name, each in mean.model.named_parameters():
        parts = [random_model(step).get_parameter(name).double() for step in (10, 20)]
        assert torch.equal(each, ((parts[0] + 3 * parts[1]) / 4).float())
    assert mean.folder == out / "step-00000020"
    assert min(evaluate_text(trained, files).loss, evaluate_text(out, files).loss) > 0
    titanlite(*words, out, code=2)  # it is there
    titanlite(*words[:4], 1, "--out", tmp_path / "other", code=2)
    narrow = JOB.model_copy(update={"model": JOB.model.model_copy(update={"ffn_dim": 64})})
    (tmp_path / "narrow").mkdir()
    save_run(tmp_path / "narrow", 10, job=narrow)
    said = titanlite("average", trained, tmp_path / "narrow", "--out", tmp_path / "other", code=2)
    assert "ffn" in said or "feed_forward" in said
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").iterdir())


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
def test_the_loss_is_that_of_transformers_on_the_exported_model(trained: Path, files: list[Path], tmp_path: Path):
    titanlite("export", "--checkpoint", trained, "--out", tmp_path / "hf", "--dtype", "float32")
    for length, stride in ((48, 24), (33, 5)):  # the first is what there is without options
        settings: dict[str, Any] = {} if length == 48 else {"window": length, "stride": stride}
        ours = asdict(evaluate_text(trained, files, **settings))
        total, tokens = score_by_transformers(tmp_path / "hf", length, stride)
        num_bytes = sum(len(text.encode()) for text in TEXTS)
        assert (ours["documents"], ours["bytes"], ours["tokens"]) == (5, num_bytes, tokens)
        theirs = [total / tokens, math.exp(total / tokens), total / math.log(2) / num_bytes]
        found = [ours[name] for name in ("loss", "perplexity", "bits_per_byte")]
        assert found == pytest.approx(theirs, rel=1e-5)  # fp32 sums in another order


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"data_parallel_replicate_degree": 2},
    {"tensor_parallel_degree": 2},
    {"context_parallel_degree": 2},
    {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
]


def scores_of_layouts(trained: Path, files: list[Path], store: Path) -> list[TextScore]:
    """Each evaluation has a world of its own."""
    os.environ[STORE] = f"{store}-of-scores"
    settings: dict[str, Any] = {"window": 37, "stride": 10, "batch_size": 3}
    parallelisms = map(Parallelism.model_validate, LAYOUTS)
    return [evaluate_text(trained, files, parallelism=parallelism, **settings) for parallelism in parallelisms]


@pytest.mark.slow
def test_every_layout_gives_the_score_of_one_process(trained: Path, files: list[Path]) -> None:
    alone = evaluate_text(trained, files, window=37, stride=10)
    world = World(4, scores_of_layouts, trained, files)
    world.ends_with(0)
    for score in (score for of_rank in world.results() for score in of_rank):
        assert asdict(score) == pytest.approx(asdict(alone), rel=1e-6)  # fp32 sums in another order


@pytest.mark.slow
def test_ngpu_starts_the_ranks_and_json_stands_alone_on_standard_output(trained: Path, files: list[Path]) -> None:
    command = [sys.executable, "-m", "titanlite", "eval", "--checkpoint", str(trained), "--data", *map(str, files)]
    words = ["--json", "--parallelism.tensor_parallel_degree", "2"]
    environment = {**os.environ, "NGPU": "2"}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=True)
    assert "float32 on 2 x cpu" in done.stderr
    alone = evaluate_text(trained, files)
    assert json.loads(done.stdout)["loss"] == pytest.approx(alone.loss, rel=1e-6)  # fp32 sums in another order


@pytest.fixture(scope="module")
def loaded(trained: Path) -> LoadedCheckpoint:
    return load_checkpoint(trained)


def complete(capsys: Output, folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of the command, which ends with `code`."""
    assert cli.main(["generate", "--checkpoint", str(folder), "--max-new-tokens", "12", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out, " ".join(err.split())


def test_greedy_text_is_the_same_whatever_is_beside_it(loaded: LoadedCheckpoint, monkeypatch: pytest.MonkeyPatch):
    """What it is says the next test."""
    expected = ["".join(generate(loaded, prompt, 30, temperature=0)) for prompt in PROMPTS]
    assert len({*expected}) == len(PROMPTS)
    for chunk, size in itertools.product((1, 512), (1, 2, 5)):
        monkeypatch.setattr(completion, "PREFILL_CHUNK", chunk)
        done = list(generate_many(loaded, PROMPTS, 30, temperature=0, batch_size=size))
        assert [(text.prompt, text.completion) for text in done] == list(zip(PROMPTS, expected, strict=True))


FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"head_dim": 16},
    "Qwen3ForCausalLM": {"head_dim": 16, "qk_norm": "head"},
    "Olmo2ForCausalLM": {"qk_norm": "projection", "norm_placement": "after"},
    "MistralForCausalLM": {"sliding_window": 6},
    "SmolLM3ForCausalLM": {"no_rope_interval": 2, "tied_embeddings": True},
    "Qwen2ForCausalLM": {"qkv_bias": True, "tied_embeddings": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers_and_the_weights_come_back(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    job = JOB.model_copy(update={"model": JOB.model.model_copy(update=FAMILIES[family])})
    run, out = save_run(tmp_path, 1, job=job), tmp_path / "hf"
    assert cli.main(["export", "--checkpoint", str(run), "--out", str(out), "--dtype", "float32"]) == 0
    theirs: Any = AutoModelForCausalLM.from_pretrained(out)
    ours = load_checkpoint(run)
    assert type(theirs).__name__ == family
    for prompt in PROMPTS:
        ids = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]])
        found = theirs.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
        assert "".join(generate(ours, prompt, 30, temperature=0)) == TOKENIZER.decode(found.tolist())
    assert cli.main(["import", "--hf", str(out), "--out", str(tmp_path / "back")]) == 0
    back = checkpoint_weights(tmp_path / "back" / "step-00000000")
    assert back.arch == architecture(job.model)
    assert all(torch.equal(back.read(name), weight) for name, weight in random_model(1, job).named_parameters())


def test_sampled_text_depends_on_its_seed_and_on_no_other_prompt(loaded: LoadedCheckpoint) -> None:
    texts = [list(generate_many(loaded, PROMPTS, 10, seed=5, batch_size=size)) for size in (1, 2, 5)]
    assert texts[0] == texts[1] == texts[2] != list(generate_many(loaded, PROMPTS, 10, seed=6))


@pytest.mark.parametrize(
    ("temperature", "top_k", "allowed"),
    [(0, 0, [1]), (1.0, 1, [1]), (1e-310, 0, [1]), (1.0, 2, [1, 3]), (0.5, 0, range(5)), (2.0, 99, range(5))],
)
def test_tokens_are_drawn_from_the_softmax_of_the_allowed(temperature: float, top_k: int, allowed: list[int]) -> None:
    """0.04: five standard errors of 4,000 draws."""
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    chosen = torch.tensor([choose(logits, temperature, top_k, generator) for _ in range(4000)])
    expected = torch.zeros(5)
    expected[list(allowed)] = torch.softmax(logits[list(allowed)] / max(temperature, 1e-3), dim=-1)
    torch.testing.assert_close(torch.bincount(chosen, minlength=5) / 4000.0, expected, atol=0.04, rtol=0.0)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 漢字かな 🦜🦜 \ufffd?"])
def test_pieces_are_whole_characters_and_add_up_to_the_text(loaded, monkeypatch, name: str, text: str) -> None:
    """A model that says `text`."""
    tokenizer = load_tokenizer(MODEL_FILE.with_name(name))
    ids = iter([*tokenizer.encode(text), tokenizer.eos_id])
    monkeypatch.setattr(completion, "choose", lambda *args: next(ids))
    pieces = list(generate(replace(loaded, tokenizer=tokenizer), "a"))
    assert "".join(pieces) == text
    assert ["\ufffd" in piece for piece in pieces].count(True) == text.count("\ufffd")


def test_the_completion_alone_is_on_standard_output(capsys: Output, trained: Path, loaded, monkeypatch) -> None:
    out, err = complete(capsys, trained, "--prompt", "import os", "--temperature", "0")
    assert out == "import os" + "".join(generate(loaded, "import os", 12, temperature=0)) + "\n"
    assert ("step-00000020" in err, "12 tokens" in err) == (True, True)
    older = trained / "checkpoint" / "step-00000010"
    assert complete(capsys, older, "--prompt", "import os", "--temperature", "0")[0] != out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert complete(capsys, trained, "--prompt", "a\x1b[2J")[0].startswith(r"a\x1b[2J")


def test_prompts_of_a_file_and_of_standard_input(capsys: Output, trained: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("def f\n\nimport os\r\n")
    (tmp_path / "a.jsonl").write_text('"def f"\n{"prompt": "import os"}\n{"prompt": "two\\nlines"}')
    expected = [complete(capsys, trained, "--prompt", prompt)[0] for prompt in ("def f", "import os")]
    assert complete(capsys, trained, "--prompts", str(tmp_path / "a.txt"))[0] == "".join(expected)
    found = complete(capsys, trained, "--prompts", str(tmp_path / "a.jsonl"), "--json")[0].splitlines()
    done = [json.loads(line) for line in found]
    assert [f"{one['prompt']}{one['completion']}\n" for one in done[:2]] == expected
    assert (done[2]["prompt"], done[0]["tokens"], done[0]["end"]) == ("two\nlines", 12, "length")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def f\nimport os\n")))
    assert complete(capsys, trained, "--prompts", "-")[0] == "".join(expected)


def test_a_checkpoint_of_another_model_or_tokenizer(capsys: Output, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "config.toml").write_text(dump_config(JOB).replace("dim = 32", "dim = 64"))
    assert "does not fit" in complete(capsys, run, code=2)[1]
    (tmp_path / "other.model").write_bytes(b"".join(MODEL_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    tokenizer = JOB.tokenizer.model_copy(update={"path": str(tmp_path / "other.model")})
    (run / "config.toml").write_text(dump_config(JOB.model_copy(update={"tokenizer": tokenizer})))
    assert "another tokenizer" in complete(capsys, run, code=4)[1]


def test_logits_that_are_no_numbers_are_said_so() -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        choose(torch.tensor([0.0, math.nan]), 0, 0, None)

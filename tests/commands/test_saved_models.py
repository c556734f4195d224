"""average, eval, export, import, generate and verify read the checkpoints of a run."""

import io
import itertools
import json
import math
import os
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
import torch.distributed as dist
from data_helpers import TOKENIZER, TOKENIZER_PATH, load_smaller_tokenizer
from ranks import World, titanlite
from small_runs import job_tables, run_program
from torch.nn import functional as F

from titanlite import cli, completion, generate, generate_many, load_checkpoint
from titanlite.checkpoint.find import verify
from titanlite.checkpoint.huggingface import checkpoint_weights, hf_weights, import_weights
from titanlite.checkpoint.live_state import LiveState
from titanlite.checkpoint.manifest import (
    MANIFEST,
    CheckpointContext,
    encode_manifest,
    read_manifest,
)
from titanlite.checkpoint.save import Saver
from titanlite.commands.export import export
from titanlite.completion import LoadedCheckpoint, sample_token
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.load import dump_config
from titanlite.config.run import build_architecture
from titanlite.config.schema import JobConfig, Parallelism, TokenizerOptions
from titanlite.data.tokenizer import load_tokenizer
from titanlite.model.llama import Llama
from titanlite.runtime.process import STORE
from titanlite.runtime.rank_group import RankGroup
from titanlite.score import TextScore, evaluate_text

Output = pytest.CaptureFixture[str]
PROMPTS = ["def f", "import os, sys", "", "class A:", "x"]
GREEDY = "--prompt 'import os' --temperature 0"
JOB = JobConfig.model_validate(
    job_tables(
        "job.dump_folder = 'unused' ; model.dim = 32 ; model.n_layers = 4 ; model.n_heads = 4 ; "
        "model.n_kv_heads = 2 ; model.ffn_dim = 48 ; model.max_seq_len = 64 ; "
        "model.vocab_size = 4096 ; training.seq_len = 48"
    )
)
TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "import os  # <|end_of_text|><|begin_of_text|>",
    "",
    "größer 数 = 3\n" * 15,
    "a = [1, 2]\n" * 40,
]


def change_model(**keys: Any) -> JobConfig:
    return JOB.model_copy(update={"model": JOB.model.model_copy(update=keys)})


def random_model(seed: int, job: JobConfig = JOB) -> Llama:
    """Create a model with weights so large that no two logits are nearly equal."""
    model = Llama(build_architecture(job.model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            elif job is not JOB:
                parameter.add_(noise / 4)
    return model


def save_run(folder: Path, *steps: int, job: JobConfig = JOB) -> Path:
    """Write the output folder of a run, with the weights of `random_model(step)` at each step."""
    (folder / "config.toml").write_text(dump_config(job))
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    for step in steps:
        live = LiveState(random_model(step, job))
        context = CheckpointContext(
            job.checkpoint, folder / "checkpoint", live, RankGroup(60), lambda line: None
        )
        context.prepare_folder()
        data = {"version": 1, "tokenizer": TOKENIZER.fingerprint}
        state = {"step": step, "tokens": 0, "data": data}
        Saver(context).save(step, lambda state=state: state)
    dist.destroy_process_group()
    return folder


def run(command: str, code: int = 0) -> None:
    """Run a command in this process."""
    assert cli.main(shlex.split(command)) == code


def run_generate(
    capsys: Output,
    folder: Path,
    options: str = "",
    code: int = 0,
) -> tuple[str, str]:
    """Run `titanlite generate`, and return standard output and standard error."""
    run(f"generate --checkpoint {folder} --max-new-tokens 12 {options}", code)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out, " ".join(err.split())


def complete(loaded: LoadedCheckpoint, prompt: str, max_new_tokens: int = 30) -> str:
    return "".join(generate(loaded, prompt, max_new_tokens, temperature=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return save_run(tmp_path_factory.mktemp("run"), 10, 20)


@pytest.fixture(scope="module")
def loaded(trained) -> LoadedCheckpoint:
    return load_checkpoint(trained)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """Write the first of TEXTS to a text file, and the others to JSON lines."""
    folder = tmp_path_factory.mktemp("data")
    text_file = folder / "a.txt"
    text_file.write_text(TEXTS[0])
    json_file = folder / "b.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[1:]]
    json_file.write_text("".join(lines))
    return [text_file, json_file]


def test_average_writes_the_weighted_mean_as_a_checkpoint(trained, files, tmp_path):
    out = tmp_path / "mean"
    first = trained / "checkpoint" / "step-00000010"

    run(f"average {first} {trained} --weights 1 3 --out {out}")

    mean = load_checkpoint(out)

    assert mean.folder == out / "step-00000020"

    for name, weight in mean.model.named_parameters():
        a, b = (random_model(step).get_parameter(name).double() for step in (10, 20))
        assert torch.equal(weight, ((a + 3 * b) / 4).float())
    assert evaluate_text(out, files).loss > 0


def test_average_of_different_models_is_an_error(trained, tmp_path, capsys):
    other = save_run(tmp_path, 10, job=change_model(ffn_dim=64))
    out = tmp_path / "out"

    run(f"average {trained} {other} --out {out}", code=2)

    message = capsys.readouterr().err

    assert "ffn" in message or "feed_forward" in message
    assert not [*out.glob("*")]


def score_by_transformers(folder: Path, window: int, stride: int) -> tuple[float, int]:
    """Return nats and tokens of TEXTS, computed as in the transformers guide on perplexity."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats = 0.0
    num_tokens = 0
    for text in TEXTS:
        encoded = tokenizer(text, add_special_tokens=False).input_ids
        ids = torch.tensor([[tokenizer.bos_token_id, *encoded]])
        # The first token of a document is not scored.
        previous_end = 1
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + window, ids.shape[1])
            with torch.no_grad():
                logits = model(ids[:, begin:end]).logits[0].double()
            scored = logits[previous_end - 1 - begin : -1]
            labels = ids[0, previous_end:end]
            nats += F.cross_entropy(scored, labels, reduction="sum").item()
            num_tokens += end - previous_end
            previous_end = end
            if end == ids.shape[1]:
                break
    return nats, num_tokens


@pytest.mark.slow
def test_eval_computes_the_loss_of_transformers_on_the_exported_model(trained, files, tmp_path):
    run(f"export --checkpoint {trained} --out {tmp_path}/hf --dtype float32")
    num_bytes = sum(len(text.encode()) for text in TEXTS)

    for score, window, stride in (
        (evaluate_text(trained, files), 48, 24),
        (evaluate_text(trained, files, window=33, stride=5), 33, 5),
    ):
        nats, num_tokens = score_by_transformers(tmp_path / "hf", window, stride)

        assert (score.documents, score.bytes, score.tokens) == (5, num_bytes, num_tokens)
        loss = nats / num_tokens
        expected = [loss, math.exp(loss), nats / math.log(2) / num_bytes]
        # Other batches add fp32 values in another order.
        scores = [score.loss, score.perplexity, score.bits_per_byte]
        assert scores == pytest.approx(expected, rel=1e-5)


LAYOUTS = [
    "",
    "data_parallel_replicate_degree = 2",
    "tensor_parallel_degree = 2",
    "context_parallel_degree = 2",
    "pipeline_parallel_degree = 2 ; pipeline_parallel_schedule = 'Interleaved1F1B'",
]


def score_in_layouts(
    trained: Path,
    files: list[Path],
    store: Path,
) -> list[TextScore]:
    os.environ[STORE] = f"{store}-of-scores"
    scores = []
    for layout in LAYOUTS:
        parallelism = Parallelism.model_validate(job_tables(layout))
        score = evaluate_text(
            trained,
            files,
            window=37,
            stride=10,
            batch_size=3,
            parallelism=parallelism,
        )
        scores.append(score)
    return scores


@pytest.mark.slow
def test_eval_computes_the_same_score_in_each_layout(trained, files):
    alone = asdict(evaluate_text(trained, files, window=37, stride=10))

    world = World(4, score_in_layouts, trained, files)
    world.wait_for_exit(0)

    for score in itertools.chain(*world.results()):
        assert asdict(score) == pytest.approx(alone, rel=1e-6)  # fp32 sums in another order


@pytest.mark.slow
def test_eval_starts_ngpu_ranks_and_prints_only_json(trained, files):
    options = f"eval --checkpoint {trained} --json --parallelism.tensor_parallel_degree 2 --data"
    command = (sys.executable, "-m", "titanlite", *options.split(), *files)

    done = run_program(*command, variables={"NGPU": "2"})

    assert "float32 on 2 x cpu" in done.stderr

    loss = json.loads(done.stdout)["loss"]
    expected = evaluate_text(trained, files).loss
    assert loss == pytest.approx(expected, rel=1e-6)  # fp32 sums in another order


def test_greedy_text_does_not_depend_on_the_other_prompts_of_a_batch(loaded, monkeypatch):
    expected = [(prompt, complete(loaded, prompt)) for prompt in PROMPTS]
    assert len({text for _, text in expected}) == len(PROMPTS)

    for chunk, size in itertools.product((1, 512), (1, 2, 5)):
        monkeypatch.setattr(completion, "PREFILL_CHUNK", chunk)
        results = generate_many(loaded, PROMPTS, 30, temperature=0, batch_size=size)
        assert [(result.prompt, result.completion) for result in results] == expected


FAMILIES = tomli.loads("""
[LlamaForCausalLM]
head_dim = 16
mup_base_dim = 8
mup_base_head_dim = 4
[Qwen3ForCausalLM]
head_dim = 16
qk_norm = "head"
[Olmo2ForCausalLM]
qk_norm = "projection"
norm_placement = "after"
[Olmo3ForCausalLM]
qk_norm = "projection"
norm_placement = "after"
sliding_window = 6
full_attention_interval = 2
rope_scaling = "yarn"
rope_scaling_factor = 4.0
rope_original_max_seq_len = 16
[MistralForCausalLM]
sliding_window = 6
[SmolLM3ForCausalLM]
no_rope_interval = 2
tied_embeddings = true
[Qwen2ForCausalLM]
qkv_bias = true
tied_embeddings = true
""")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_computes_the_same_in_transformers_and_after_an_import(tmp_path, family):
    from transformers import AutoModelForCausalLM

    job = change_model(**FAMILIES[family])
    trained = save_run(tmp_path, 1, job=job)
    hf = tmp_path / "hf"

    run(f"export --checkpoint {trained} --out {hf} --dtype float32")
    theirs: Any = AutoModelForCausalLM.from_pretrained(hf)
    run(f"import --hf {hf} --out {tmp_path}/back")
    # The imported checkpoint contains its tokenizer.
    shutil.rmtree(hf)
    imported = load_checkpoint(tmp_path / "back")

    assert type(theirs).__name__ == family

    for prompt in PROMPTS:
        ids = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]])
        output = theirs.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
        new_ids = output[0, ids.shape[1] :].tolist()
        assert complete(imported, prompt) == TOKENIZER.decode(new_ids)
    weights = checkpoint_weights(imported.folder)
    arch = build_architecture(job.model)

    assert weights.arch == replace(arch, mup_base_dim=0, mup_base_head_dim=0)

    for name, weight in random_model(1, job).named_parameters():
        assert torch.equal(weights.read(name), weight)


def test_python_functions_accept_paths_as_text_and_reject_an_unknown_dtype(trained, tmp_path):
    hf = f"{tmp_path}/hf"
    with pytest.raises(UserError):
        export(str(trained), hf, dtype="int8")

    export(str(trained), hf)
    step_folder = import_weights(f"{tmp_path}/again", hf_weights(hf), hf)

    assert verify(str(step_folder))["checkpoints"][0]["state"] == "good"


@pytest.fixture
def imported(tmp_path) -> Path:
    """Import a Llama of transformers, and return its checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        vocab_size=4224,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    shutil.copy(TOKENIZER_PATH, tmp_path / "llama")
    run(f"import --hf {tmp_path}/llama --out {tmp_path}/imported")
    return (tmp_path / "imported").rename(tmp_path / "moved")


@pytest.mark.slow
def test_every_command_accepts_an_imported_checkpoint(imported, files, tmp_path, capsys):
    text = run_generate(capsys, imported, "--prompt 'def f'")[0]
    score = evaluate_text(imported, files)

    assert (score.documents, score.window) == (5, 128)

    # Each command writes a copy of the weights. The learning rate is too small to change them.
    train = (
        f"train --from {imported} --job.dump_folder {tmp_path}/run "
        "--training.steps 1 --training.seq_len 64 --training.global_batch_size 1 "
        "--training.local_batch_size 1 --optimizer.lr 1e-30 "
        "--training.mixed_precision_param float32"
    )
    run(f"average {imported} {imported} --out {tmp_path}/mean")
    run(f"export --checkpoint {imported} --out {tmp_path}/hf --dtype float32")
    run(f"import --hf {tmp_path}/hf --out {tmp_path}/again")
    titanlite(*train.split())
    capsys.readouterr()

    for copy in ("mean", "again", "run"):
        assert run_generate(capsys, tmp_path / copy, "--prompt 'def f'")[0] == text
        assert evaluate_text(tmp_path / copy, files, window=128).loss == score.loss

    assert "steps to replay" in titanlite("replay", imported, "--step", 1, code=2)


@pytest.mark.slow
def test_a_damaged_tokenizer_of_a_checkpoint_is_reported(imported, capsys):
    run(f"verify {imported}")

    tokenizer = imported / "step-00000000/tokenizer.model"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1])

    run(f"verify {imported}", code=4)
    run_generate(capsys, imported, code=4)


def test_export_names_a_key_of_the_saved_job_that_it_cannot_read(tmp_path, capsys):
    checkpoint = save_run(tmp_path, 1) / "checkpoint/step-00000001"
    manifest = read_manifest(checkpoint)
    manifest["info"]["job"] = {"training": {"stepz": 1}}
    (checkpoint / MANIFEST).write_bytes(encode_manifest(manifest))

    run(f"export --checkpoint {checkpoint} --out {tmp_path}/hf", code=2)

    assert "training.stepz. Or pass --tokenizer FILE to export." in capsys.readouterr().err


def test_weights_are_imported_without_a_tokenizer_that_does_not_fit(trained, tmp_path, capsys):
    hf = tmp_path / "hf"
    bare = tmp_path / "bare"
    whole = tmp_path / "whole"
    run(f"export --checkpoint {trained} --out {hf}")
    (hf / "tokenizer.json").unlink()

    run(f"import --hf {hf} --out {bare}")

    assert "--tokenizer FILE" in run_generate(capsys, bare, code=4)[1]

    run(f"import --hf {hf} --out {whole} --tokenizer {hf}/config.json", code=2)
    run(f"import --hf {hf} --out {whole} --tokenizer {TOKENIZER_PATH}")
    capsys.readouterr()
    text, _ = run_generate(capsys, whole, GREEDY)

    with_tokenizer = f"--tokenizer.path {TOKENIZER_PATH}"
    assert run_generate(capsys, bare, f"{GREEDY} {with_tokenizer}")[0] == text

    run(f"check --from {bare}", code=2)
    run(f"check --from {bare} {with_tokenizer}")


def test_sampled_text_depends_only_on_its_prompt_and_the_seed(loaded):
    def sample(seed: int, batch_size: int = 8) -> list[str]:
        results = generate_many(loaded, PROMPTS, 10, seed=seed, batch_size=batch_size)
        return [result.completion for result in results]

    assert sample(5, 1) == sample(5, 2) == sample(5, 5)
    assert sample(5) != sample(6)


@pytest.mark.parametrize(
    ("temperature", "top_k", "allowed"),
    [
        (0, 0, [1]),
        (1.0, 1, [1]),
        (1e-310, 0, [1]),
        (1.0, 2, [1, 3]),
        (0.5, 0, range(5)),
        (2.0, 99, range(5)),
    ],
)
def test_tokens_are_sampled_from_the_softmax_of_the_top_k(temperature, top_k, allowed):
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    tokens = [sample_token(logits, temperature, top_k, generator) for _ in range(4000)]

    allowed = list(allowed)
    scaled = logits[allowed] / max(temperature, 1e-3)
    expected = torch.zeros(5)
    expected[allowed] = torch.softmax(scaled, dim=-1)
    frequencies = torch.bincount(torch.tensor(tokens), minlength=5) / 4000.0

    # 0.04 is five standard errors of 4,000 samples.
    torch.testing.assert_close(frequencies, expected, atol=0.04, rtol=0.0)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 漢字かな 🦜🦜 \ufffd?"])
def test_pieces_are_whole_characters_and_add_up_to_the_text(loaded, monkeypatch, name, text):
    tokenizer = load_tokenizer(TOKENIZER_PATH.with_name(name))
    ids = iter([*tokenizer.encode(text), tokenizer.eos_id])
    monkeypatch.setattr(completion, "sample_token", lambda *args: next(ids))

    pieces = list(generate(replace(loaded, tokenizer=tokenizer), "a"))

    assert "".join(pieces) == text
    assert sum("\ufffd" in piece for piece in pieces) == text.count("\ufffd")


def test_generate_prints_only_the_completion_to_standard_output(capsys, trained, loaded):
    out, err = run_generate(capsys, trained, GREEDY)

    assert out == "import os" + complete(loaded, "import os", 12) + "\n"
    assert "step-00000020" in err
    assert "12 tokens" in err

    older = trained / "checkpoint" / "step-00000010"
    assert run_generate(capsys, older, GREEDY)[0] != out


def test_generate_escapes_control_characters_on_a_terminal(capsys, trained, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    assert run_generate(capsys, trained, "--prompt a\x1b[2J")[0].startswith(r"a\x1b[2J")


def test_generate_reads_prompts_from_files_and_standard_input(
    capsys, trained, tmp_path, monkeypatch
):
    text = tmp_path / "a.txt"
    lines = tmp_path / "a.jsonl"
    text.write_text("def f\n\nimport os\r\n")
    lines.write_text('"def f"\n{"prompt": "import os"}\n{"prompt": "two\\nlines"}')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def f\nimport os\n")))
    expected = ""
    for prompt in ("def f", "import os"):
        expected += run_generate(capsys, trained, f"--prompt '{prompt}'")[0]

    assert run_generate(capsys, trained, f"--prompts {text}")[0] == expected
    assert run_generate(capsys, trained, "--prompts -")[0] == expected

    out = run_generate(capsys, trained, f"--prompts {lines} --json")[0]
    results = [json.loads(line) for line in out.splitlines()]
    completed = [f"{result['prompt']}{result['completion']}\n" for result in results[:2]]

    assert "".join(completed) == expected
    assert results[2]["prompt"] == "two\nlines"
    assert (results[0]["tokens"], results[0]["end"]) == (12, "length")


def test_a_checkpoint_of_another_model_or_tokenizer_is_an_error(capsys, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "config.toml").write_text(dump_config(change_model(dim=64)))

    assert "does not fit" in run_generate(capsys, folder, code=2)[1]

    smaller = load_smaller_tokenizer(tmp_path)
    job = JOB.model_copy(update={"tokenizer": TokenizerOptions(path=str(smaller.path))})
    (folder / "config.toml").write_text(dump_config(job))

    assert "another tokenizer" in run_generate(capsys, folder, code=4)[1]


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(CheckpointError, match="not finite"):
        sample_token(torch.tensor([0.0, math.nan]), 0, 0, None)

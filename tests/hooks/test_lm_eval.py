"""The evaluation hook in examples/lm_eval scores tasks alike in each layout and changes no loss."""

import json
import math
from pathlib import Path

import pytest
import torch
from ranks import run_small, titanlite
from small_runs import ROOT, read_losses, read_metrics, read_printed_json

from titanlite import LoadedCheckpoint, load_checkpoint

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval")
EXAMPLE = ROOT / "examples" / "lm_eval"
OPTIONS = (
    "--model.n_kv_heads 2 --training.steps 6 --metrics.log_freq 2 --training.local_batch_size 1"
)
TASK = """\
dataset_path: json
test_split: test
target_delimiter: ""
dataset_kwargs: {data_files: {test: lines.jsonl}}
"""
TASKS = {
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list: [metric: bits_per_byte]\n",
    "pairs": 'output_type: loglikelihood\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "written": 'output_type: generate_until\ndoc_to_text: "{{text}}"\n'
    'doc_to_target: "{{answer}}"\n',
}


def score_pairs(checkpoint: LoadedCheckpoint, pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """Return the perplexity and the accuracy of the pairs of context and answer."""
    total = 0.0
    num_correct = 0
    encode = checkpoint.tokenizer.encode
    for context, answer in pairs:
        ids = encode(context + answer)
        count = len(ids) - len(encode(context.rstrip()))
        # A sequence has training.seq_len inputs and one more target.
        ids = [checkpoint.tokenizer.bos_id or 0, *ids][-65:]
        scores = score_tokens(checkpoint, ids[:-1])[-count:]
        targets = torch.tensor(ids[-count:])
        total += scores.gather(1, targets[:, None]).sum().item()
        num_correct += torch.equal(scores.argmax(-1), targets)
    return math.exp(-total / len(pairs)), num_correct / len(pairs)


def score_tokens(checkpoint: LoadedCheckpoint, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of all next tokens, shape (T, V)."""
    with torch.no_grad():
        return checkpoint.model(torch.tensor([ids]))[0].log_softmax(-1)


def write_tasks(pairs: list[tuple[str, str]]) -> None:
    """Write the files of TASKS, and their data, to the current folder."""
    lines = [json.dumps({"text": context, "answer": answer}) for context, answer in pairs]
    Path("lines.jsonl").write_text("\n".join(lines) + "\n")
    for name, text in TASKS.items():
        Path(f"{name}.yaml").write_text(f"task: {name}\n{TASK}{text}")


def test_every_layout_scores_tasks_like_its_checkpoint_and_with_the_same_losses(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run_small(tmp_path / "none", OPTIONS, ranks=2)
    checkpoint = load_checkpoint(tmp_path / "none")
    tokenizer = checkpoint.tokenizer
    prompt = [tokenizer.bos_id or 0, *tokenizer.encode("import os")]
    scores = score_tokens(checkpoint, prompt)[-1]
    likeliest = tokenizer.decode([int(scores.argmax())])
    long_context = "def f(x):\n    return x\n" * 9
    pairs = [(long_context, ")"), ("for i in ", "range(10):"), ("import os", likeliest)]
    write_tasks(pairs)
    monkeypatch.syspath_prepend(EXAMPLE)
    evaluation = "--job.plugins titanlite_lm_eval --job.hooks evaluation --evaluation.freq 4"
    evaluation += " --evaluation.include_path . --evaluation.tasks"
    perplexity, accuracy = score_pairs(checkpoint, pairs)

    for degree in (
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    ):
        out = tmp_path / degree
        options = f"{evaluation} rolling pairs --parallelism.{degree}_degree 2"
        run_small(out, OPTIONS, options, ranks=2)

        metrics = read_metrics(out)
        benchmarks = {}
        for step, line in metrics.items():
            if "benchmarks" in line:
                benchmarks[step] = line["benchmarks"]
        assert [*benchmarks] == [4, 6]
        # Other layouts round fp32 sums differently.
        assert benchmarks[6]["pairs/perplexity"] == pytest.approx(perplexity, rel=1e-5)
        assert benchmarks[6]["pairs/acc"] == accuracy > 0

        evaluate = ["--data", "lines.jsonl", "--json", "--job.plugins", "titanlite_lm_eval"]
        score = read_printed_json(titanlite("eval", "--checkpoint", out, *evaluate))
        bits = pytest.approx(score["bits_per_byte"], rel=1e-5)
        assert benchmarks[6]["rolling/bits_per_byte"] == bits

    assert read_losses(tmp_path / "none") == read_losses(tmp_path / "data_parallel_shard")

    # Unsupported and unknown tasks are errors before training.
    for name in ("written", "unknown"):
        assert name in run_small(tmp_path / name, OPTIONS, evaluation, name, code=2)

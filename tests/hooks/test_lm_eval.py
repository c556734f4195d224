"""examples/lm_eval: what lm-evaluation-harness asks the sharded model, any layout answers as the checkpoint does."""

import json
import math
from pathlib import Path

import pytest
import torch
from ranks import start_small, titanlite
from small_runs import logged, losses

from titanlite import load_checkpoint

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval")
EXAMPLE = Path(__file__).parents[2] / "examples" / "lm_eval"
WORDS = (
    "--model.n_kv_heads=2",
    "--training.steps=6",
    "--metrics.log_freq=2",
    "--training.local_batch_size=1",
)
TASK = 'dataset_path: json\ntest_split: test\ntarget_delimiter: ""\ndataset_kwargs: {data_files: {test: lines.jsonl}}\n'
TASKS = {
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list: [metric: bits_per_byte]\n",
    "pairs": 'output_type: loglikelihood\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "written": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n',
}


def test_every_layout_scores_tasks_as_its_checkpoint_does_and_training_does_not_notice(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    start_small(tmp_path / "none", *WORDS, ranks=2).ends_with(0)
    checkpoint, total, right = load_checkpoint(tmp_path / "none"), 0.0, 0
    encode, begin = checkpoint.tokenizer.encode, checkpoint.tokenizer.bos_id or 0

    def scores_of(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return checkpoint.model(torch.tensor([ids]))[0].log_softmax(-1)

    likeliest = checkpoint.tokenizer.decode(
        [int(scores_of([begin, *encode("import os")])[-1].argmax())]
    )
    pairs = [
        ("def f(x):\n    return x\n" * 9, ")"),
        ("for i in ", "range(10):"),
        ("import os", likeliest),
    ]
    for context, answer in pairs:
        whole = encode(context + answer)
        count, ids = (
            len(whole) - len(encode(context.rstrip())),
            [begin, *whole][-65:],
        )  # training.seq_len and one
        scores, wanted = scores_of(ids[:-1])[-count:], torch.tensor(ids[-count:])
        total += scores.gather(1, wanted[:, None]).sum().item()
        right += torch.equal(scores.argmax(-1), wanted)
    Path("lines.jsonl").write_text(
        "".join(json.dumps({"text": a, "answer": b}) + "\n" for a, b in pairs)
    )
    for name, text in TASKS.items():
        Path(f"{name}.yaml").write_text(f"task: {name}\n{TASK}{text}")
    monkeypatch.syspath_prepend(EXAMPLE)
    evaluation = "--job.plugins titanlite_lm_eval --job.hooks evaluation --evaluation.freq 4"
    evaluation += " --evaluation.include_path . --evaluation.tasks"
    for degree in (
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    ):
        out, words = (
            tmp_path / degree,
            f"{evaluation} rolling pairs --parallelism.{degree}_degree 2",
        )
        start_small(out, *WORDS, *words.split(), ranks=2).ends_with(0)
        found = {
            step: line["benchmarks"] for step, line in logged(out).items() if "benchmarks" in line
        }
        assert [*found] == [4, 6]
        # The sums of other layouts are rounded otherwise, in fp32.
        assert found[6]["pairs/perplexity"] == pytest.approx(
            math.exp(-total / len(pairs)), rel=1e-5
        )
        assert found[6]["pairs/acc"] == right / len(pairs) > 0
        words = ["--data", "lines.jsonl", "--json", "--job.plugins", "titanlite_lm_eval"]
        said = titanlite("eval", "--checkpoint", out, *words).splitlines()
        score = next(json.loads(line) for line in said if line.startswith("{"))
        assert found[6]["rolling/bits_per_byte"] == pytest.approx(score["bits_per_byte"], rel=1e-5)

    assert losses(tmp_path / "none") == losses(tmp_path / "data_parallel_shard")

    for name in ("written", "unknown"):  # before the start
        assert name in start_small(tmp_path / name, *WORDS, *evaluation.split(), name).ends_with(2)

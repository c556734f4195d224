"""[samples]: the model completes prompts while it trains, in any layout, and training does not notice."""

import json
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import SMALL, losses

pytestmark = pytest.mark.slow

SAMPLES = """
[samples]
freq = 4
prompts = ["def f", "import os, sys", ""]
max_new_tokens = 6
temperature = 0
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(SMALL.replace("n_kv_heads = 1", "n_kv_heads = 2") + SAMPLES)
    return path


def trained(job: Path, folder: Path, *words: object, ranks: int = 1) -> list[dict]:
    """The lines of samples.jsonl."""
    titanlite("train", "--job.config_file", job, "--job.dump_folder", folder, *words, ranks=ranks)
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(job: Path, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run on one process, and what it wrote."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, trained(job, folder)


def test_each_prompt_is_completed_every_few_steps_with_the_text_of_generate(
    alone: tuple[Path, list[dict]],
):
    folder, samples = alone
    prompts = ["def f", "import os, sys", ""]

    assert [(line["step"], line["prompt"]) for line in samples] == [
        (step, p) for step in (4, 8, 12) for p in prompts
    ]
    assert all(line["tokens"] == 6 or line["end"] == "document" for line in samples)
    assert "sample after step 8: def f" in (folder / "train.log").read_text()

    words = ("--checkpoint", folder, "--temperature", 0, "--max-new-tokens", 6, "--json")
    said = titanlite("generate", *words, "--prompt", samples[-2]["prompt"])
    found = next(json.loads(text) for text in said.splitlines() if text.startswith("{"))

    assert found == {name: samples[-2][name] for name in found}


def test_training_does_not_notice_and_neither_does_a_resume(
    job: Path, alone: tuple[Path, list[dict]], tmp_path
):
    """What is trained again is sampled again, and the old text is kept."""
    folder, samples = alone
    titanlite(
        "train",
        "--job.config_file",
        job,
        "--job.dump_folder",
        tmp_path / "none",
        "--samples.freq",
        0,
    )

    assert losses(tmp_path / "none") == losses(folder)  # bitwise
    assert not (tmp_path / "none" / "samples.jsonl").exists()
    assert trained(job, folder, "--checkpoint.load_step", 5) == samples
    assert losses(folder) == losses(tmp_path / "none")

    aside = (folder / "archived-1" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [8] * 3 + [12] * 3


@pytest.mark.parametrize(
    ("ranks", "degree"),
    [(2, "context"), (2, "pipeline"), pytest.param(4, "tensor", marks=pytest.mark.long)],
)
def test_every_layout_writes_the_same_text(
    job: Path, alone: tuple[Path, list[dict]], tmp_path, ranks: int, degree: str
):
    words = [f"--parallelism.{degree}_parallel_degree", 2]
    batch = ["--training.local_batch_size", 1, "--training.global_batch_size", 4]

    assert trained(job, tmp_path, *words, *batch, ranks=ranks) == alone[1]

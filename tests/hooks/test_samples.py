"""Samples complete prompts during training in any layout, and do not change training."""

from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import SMALL_WITHOUT_WORKERS, read_jsonl, read_log, read_losses, read_printed_json

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
    path.write_text(SMALL_WITHOUT_WORKERS.replace("n_kv_heads = 1", "n_kv_heads = 2") + SAMPLES)
    return path


def train(
    job: Path,
    folder: Path,
    *options: object,
    ranks: int = 1,
) -> list[dict]:
    """Train, and return the lines of samples.jsonl."""
    titanlite("train", "--job.config_file", job, "--job.dump_folder", folder, *options, ranks=ranks)
    return read_jsonl(folder / "samples.jsonl")


@pytest.fixture(scope="module")
def alone(job: Path, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Train on one rank, and return the output folder and the samples."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, train(job, folder)


def test_each_prompt_is_completed_every_few_steps_as_by_generate(alone):
    folder, samples = alone
    prompts = ("def f", "import os, sys", "")
    expected = [(step, prompt) for step in (4, 8, 12) for prompt in prompts]

    assert [(line["step"], line["prompt"]) for line in samples] == expected
    assert all(line["tokens"] == 6 or line["end"] == "document" for line in samples)
    assert "Sample after step 8: def f" in read_log(folder)

    options = ("--checkpoint", folder, "--temperature", 0, "--max-new-tokens", 6, "--json")
    output = titanlite("generate", *options, "--prompt", samples[-2]["prompt"])
    generated = read_printed_json(output)
    assert generated == {name: samples[-2][name] for name in generated}


def test_samples_change_no_loss_and_are_repeated_when_a_run_goes_back(job, alone, tmp_path):
    """The earlier samples are archived."""
    folder, samples = alone
    without = tmp_path / "none"
    files = ("--job.config_file", job, "--job.dump_folder", without)

    titanlite("train", *files, "--samples.freq", 0)

    assert read_losses(without) == read_losses(folder)
    assert not (without / "samples.jsonl").exists()
    assert train(job, folder, "--checkpoint.load_step", 5) == samples
    assert read_losses(folder) == read_losses(without)

    archived = read_jsonl(folder / "archived-1" / "samples.jsonl")
    assert [sample["step"] for sample in archived] == [8, 8, 8, 12, 12, 12]


def test_a_finished_run_repeats_samples_whose_line_was_cut_off(job, tmp_path):
    options = ("--samples.prompts", "def f", "--samples.freq", 2, "--training.steps", 4)
    train(job, tmp_path, *options)
    path = tmp_path / "samples.jsonl"
    first_line, last_line = path.read_text().splitlines()
    cut_line = last_line[:-9]
    path.write_text(f"{first_line}\n{cut_line}")

    titanlite("train", "--job.config_file", job, "--job.dump_folder", tmp_path, *options)

    assert path.read_text().splitlines() == [first_line, cut_line, last_line]


@pytest.mark.parametrize(
    ("ranks", "degree"),
    [
        (2, "pipeline"),
        pytest.param(2, "context", marks=pytest.mark.long),
        pytest.param(4, "tensor", marks=pytest.mark.long),
    ],
)
def test_every_layout_writes_the_same_text(job, alone, tmp_path, ranks, degree):
    options = f"--parallelism.{degree}_parallel_degree 2 --training.local_batch_size 1"

    _, samples = alone
    assert train(job, tmp_path, *options.split(), ranks=ranks) == samples

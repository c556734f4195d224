"""[samples]: the model completes prompts while it trains, in any layout, and training does not notice."""

import json
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import SMALL, losses

from titanlite.config.errors import UserError
from titanlite.load_run import load_run

pytestmark = pytest.mark.slow

SAMPLES = """
[samples]
freq = 4
prompts = ["def f", "import os, sys", ""]
max_new_tokens = 6
temperature = 0
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    heads = SMALL.replace("n_kv_heads = 1", "n_kv_heads = 2")
    path.write_text(heads + SAMPLES)
    return path


def trained(job: Path, folder: Path, *words: object, ranks: int = 1) -> list[dict]:
    """The lines of samples.jsonl."""
    titanlite("train", "--job.config_file", job, "--job.dump_folder", folder, *words, ranks=ranks)
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(job: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run on one process, and what it wrote."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, trained(job, folder)


def test_each_prompt_is_completed_every_few_steps_into_the_file_and_the_log(alone: tuple[Path, list[dict]]) -> None:
    folder, samples = alone
    prompts = ["def f", "import os, sys", ""]
    assert [(line["step"], line["prompt"]) for line in samples] == [(step, p) for step in (4, 8, 12) for p in prompts]
    assert all(line["tokens"] == 6 or line["end"] == "document" for line in samples)
    log = (folder / "train.log").read_text()
    assert "sample after step 8: def f" in log


def test_the_text_is_that_of_generate(alone: tuple[Path, list[dict]]) -> None:
    folder, samples = alone
    words = ("--checkpoint", folder, "--temperature", 0, "--max-new-tokens", 6, "--json")
    for line in samples[-3:]:
        said = titanlite("generate", *words, "--prompt", line["prompt"])
        found = next(json.loads(text) for text in said.splitlines() if text.startswith("{"))
        assert found == {name: line[name] for name in found}


def test_training_does_not_notice_and_neither_does_a_resume(
    job: Path, alone: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    folder, samples = alone
    titanlite("train", "--job.config_file", job, "--job.dump_folder", tmp_path / "none", "--samples.freq", 0)
    assert losses(tmp_path / "none") == losses(folder)  # bitwise
    assert not (tmp_path / "none" / "samples.jsonl").exists()
    for steps in (6, 12):  # the second start resumes after step 6
        resumed = trained(job, tmp_path / "two", "--training.steps", steps, "--lr_scheduler.decay_ratio", 0.0)
    titanlite(
        *("train", "--job.config_file", job, "--job.dump_folder", tmp_path / "one"),
        *("--samples.freq", 0, "--lr_scheduler.decay_ratio", 0.0),
    )
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert [line["step"] for line in resumed] == [line["step"] for line in samples]


def test_what_is_trained_again_is_sampled_again_and_the_old_text_is_kept(job: Path, tmp_path: Path) -> None:
    first = trained(job, tmp_path, "--training.steps", 12, "--checkpoint.interval", 5)
    second = trained(job, tmp_path, "--training.steps", 12, "--checkpoint.interval", 5, "--checkpoint.load_step", 5)
    assert second == first
    aside = (tmp_path / "samples.jsonl.superseded").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [8] * 3 + [12] * 3


LAYOUTS = {
    "sharded": (2, {}),
    "tensor": (2, {"tensor_parallel_degree": 2}),
    "context": (2, {"context_parallel_degree": 2}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "sharded tensor": (4, {"tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_the_same_text(
    job: Path, alone: tuple[Path, list[dict]], tmp_path: Path, layout: str
) -> None:
    ranks, degrees = LAYOUTS[layout]
    words = [word for key, value in degrees.items() for word in (f"--parallelism.{key}", value)]
    batch = ["--training.local_batch_size", 1, "--training.global_batch_size", 4]
    assert trained(job, tmp_path, *words, *batch, ranks=ranks) == alone[1]


def test_float8_and_activation_checkpointing_sample_too(job: Path, tmp_path: Path) -> None:
    words = ["--float8.enable", "--float8.emulate", "--float8.min_features", 0, "--activation_checkpoint.mode", "full"]
    assert len(trained(job, tmp_path, *words, "--training.steps", 4)) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples.freq", "5"], "samples.prompts is empty"),
        (["--samples.prompts", "x"], "samples.freq is left out"),
    ],
)
def test_half_of_a_section_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_run([*words, "--job.dump_folder", str(tmp_path / "out")], 1)
    assert said in " ".join(str(caught.value).split())


def test_a_prompt_that_does_not_fit_is_refused_before_training(job: Path, tmp_path: Path) -> None:
    words = ["--job.config_file", job, "--job.dump_folder", tmp_path, "--samples.prompts", "a b c d " * 60]
    assert "samples.prompts" in titanlite("train", *words, code=2)

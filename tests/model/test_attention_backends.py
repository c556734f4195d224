"""All values of model.attention_backend compute the same, and unusable backends are rejected."""

from pathlib import Path

import pytest
import tomli
from ranks import titanlite
from small_runs import read_metrics

from titanlite.config.errors import UserError
from titanlite.load_run import load_run
from titanlite.observe.gpus import find_gpu
from titanlite.plan.trace import trace_run
from titanlite.train.trainer import Trainer

DOCUMENTS = "--dataset.document_mask --dataset.packing best_fit"
WINDOW = "--model.sliding_window 12"
PATTERN = f"{WINDOW} --model.full_attention_interval 2"
ONE_SEQUENCE = "--training.local_batch_size 1"
VALIDATION = "--validation.freq 2 --validation.holdout 0.1"


def make_options(job_file: Path, backend: str, options: str) -> list[str]:
    """Return the options of four steps with an attention backend."""
    folder = job_file.with_name(backend)
    files = f"--job.config_file {job_file} --job.dump_folder {folder}"
    return f"{files} --training.steps 4 --model.attention_backend {backend} {options}".split()


def train(
    job_file: Path,
    backend: str,
    options: str,
) -> dict[int, tuple[float, float]]:
    """Train in this process; return loss and gradient norm of each step."""
    run = load_run(make_options(job_file, backend, options), world_size=1)
    with Trainer(run) as trainer:
        trainer.train()
    return results(job_file, backend)


def results(
    job_file: Path,
    backend: str,
) -> dict[int, tuple[float, float]]:
    entries = read_metrics(job_file.with_name(backend))
    return {step: (entry["loss"], entry["grad_norm"]) for step, entry in entries.items()}


BITWISE_EQUAL = {
    "documents": DOCUMENTS,
    "window": WINDOW,
    "documents and windows": f"{DOCUMENTS} {PATTERN}",
    "accumulation": f"{DOCUMENTS} {ONE_SEQUENCE}",
    "AC full": f"{DOCUMENTS} --activation_checkpoint.mode full",
    "AC op": f"{DOCUMENTS} --activation_checkpoint.mode selective",
    "validation": f"{DOCUMENTS} {VALIDATION}",
}


@pytest.mark.parametrize("options", BITWISE_EQUAL.values(), ids=BITWISE_EQUAL)
def test_training_with_document_bounds_is_bitwise_equal_to_a_mask(job_file, options):
    assert train(job_file, "varlen", options) == train(job_file, "auto", options)


@pytest.mark.slow
@pytest.mark.long
def test_compiled_document_bounds_train_like_a_mask(job_file):
    """The number of documents changes with each batch."""
    options = f"{DOCUMENTS} {PATTERN} --compile.enable"
    expected = train(job_file, "auto", options)
    for step, values in train(job_file, "varlen", options).items():
        assert values == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.slow
def test_a_pipeline_splits_the_bounds_of_its_microbatches(job_file):
    """Microbatches have different numbers of documents."""
    options = f"{DOCUMENTS} {PATTERN} {ONE_SEQUENCE} --parallelism.pipeline_parallel_degree 2"
    for backend in ("varlen", "auto"):
        titanlite("train", *make_options(job_file, backend, options), ranks=2)

    assert results(job_file, "varlen") == results(job_file, "auto")


def test_the_choice_of_auto_is_logged_and_saved(job_file):
    train(job_file, "auto", DOCUMENTS)
    folder = job_file.with_name("auto")
    config = tomli.loads((folder / "config.toml").read_text())

    assert config["model"]["attention_backend"] == "sdpa"
    assert "Attention backend: sdpa" in (folder / "train.log").read_text()


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("flex", "", "has no effect"),
        ("varlen", "", "has no effect"),
        ("varlen", f"{DOCUMENTS} --model.head_dim 12", "a multiple of 8"),
        ("varlen", f"{DOCUMENTS} --parallelism.context_parallel_degree 2", "context parallelism"),
        ("fa3", DOCUMENTS, "bfloat16"),
        ("cudnn", DOCUMENTS, "fa4"),
    ],
)
def test_a_job_with_an_unusable_backend_is_rejected(job_file, backend, options, reason):
    with pytest.raises(UserError, match=reason) as caught:
        load_run(make_options(job_file, backend, options), world_size=2)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("backend", ["flex", "fa3", "fa4"])
def test_a_cpu_rejects_kernels_that_it_lacks(job_file, backend):
    bfloat16 = "--training.mixed_precision_param bfloat16"
    with pytest.raises(UserError, match="needs a GPU") as caught:
        train(job_file, backend, f"{DOCUMENTS} {bfloat16}")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        ("selective", "--compile.enable"),
        pytest.param("none", "--compile.enable", marks=pytest.mark.long),
        pytest.param("selective", "", marks=pytest.mark.long),
    ],
)
def test_a_plan_counts_the_same_work_for_document_bounds(job_file, mode, compiled):
    bfloat16 = "--training.mixed_precision_param bfloat16 --model.n_heads 2 --model.n_kv_heads 2"
    options = f"{DOCUMENTS} {PATTERN} {bfloat16} --activation_checkpoint.mode {mode} {compiled}"
    flops = []
    peaks = []
    for backend in ("flex", "varlen"):
        run = load_run(make_options(job_file, backend, options), world_size=1)
        (trace,) = trace_run(run, find_gpu("H100"))
        attention = [work for work in trace.work if len(work.shape) == 5]
        flops.append(sum(work.flops for work in attention if work.phase == "forward"))
        peaks.append(trace.peak)

    assert flops[0] == flops[1] > 0
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)

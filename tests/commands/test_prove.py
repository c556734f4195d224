"""`titanlite prove` accepts correct jobs, and writes certificates that a start can require."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import titanlite
from small_runs import SMALL_WITHOUT_WORKERS, read_printed_json

from titanlite.prove.shrink import parse_original, shrink

pytestmark = pytest.mark.slow
HSDP = "--parallelism.data_parallel_replicate_degree 2"
FSDP_TP = "--parallelism.tensor_parallel_degree 2 --model.n_kv_heads 2"
CP_DOCUMENTS = "--parallelism.context_parallel_degree 2 --dataset.document_mask"
PP = "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 1"
PASSED = {
    "initial weights",
    "sequences",
    "loss",
    "gradient",
    "gradient norm",
    "weight update",
    "optimizer state",
    "resume: state",
}


def job_words(out: Path) -> tuple[object, ...]:
    """Return options that name the small job and the output folder `out`."""
    job = out.with_suffix(".toml")
    job.write_text(SMALL_WITHOUT_WORKERS)
    return ("--job.config_file", job, "--job.dump_folder", out)


def prove(out: Path, *options: object, ranks: int = 2) -> dict[str, Any]:
    """Prove the small job, and return the certificate that is printed."""
    printed = titanlite("prove", "--json", *job_words(out), *options, ranks=ranks)
    return read_printed_json(printed)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(4, HSDP, id="hsdp", marks=pytest.mark.long),
        pytest.param(4, FSDP_TP, id="fsdp x tp", marks=pytest.mark.long),
        pytest.param(4, CP_DOCUMENTS, id="cp, documents", marks=pytest.mark.long),
        pytest.param(2, PP, id="pp", marks=pytest.mark.long),
    ],
)
def test_a_correct_layout_is_proven(ranks, options, tmp_path):
    certificate = prove(tmp_path / "out", *options.split(), ranks=ranks)

    assert certificate["proven"]
    assert {row["check"] for row in certificate["rows"] if row["passed"]} >= PASSED


def test_a_folder_that_cannot_be_used_is_named_by_its_option(tmp_path):
    (tmp_path / "file").touch()
    options = job_words(tmp_path / "out")
    assert "--out" in titanlite("prove", *options, "--out", tmp_path / "file", code=2)


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (1, signal.SIGTERM),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_stopped_proof_deletes_its_temporary_files(ranks, number, tmp_path):
    options = ("prove", *job_words(tmp_path / "out"), "--world-size", ranks, "--steps", 1000)
    with subprocess.Popen([sys.executable, "-m", "titanlite", *map(str, options)]) as process:
        while not list(tmp_path.glob("out/proof/run-*/*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) != 0

    assert not list(tmp_path.glob("out/proof/run-*"))


def require_certificate(out: Path) -> tuple[object, ...]:
    return ("train", *job_words(out), "--job.require_certificate", "--training.steps", 2)


def test_a_start_can_require_a_certificate(tmp_path):
    out = tmp_path / "out"
    certificate = prove(out)
    assert {row["check"] for row in certificate["rows"] if row["passed"]} >= PASSED

    rejected = titanlite(*require_certificate(out), "--optimizer.lr", 3e-3, code=2)
    assert "job.require_certificate" in rejected
    assert "titanlite prove" in rejected
    assert "certificate" in titanlite(*require_certificate(out))


def test_a_certificate_of_fewer_ranks_or_with_a_failed_comparison_is_rejected(tmp_path):
    out = tmp_path / "out"
    certificate = prove(out, ranks=1)

    assert certificate["proven"]
    assert "require_certificate" in titanlite(*require_certificate(out), ranks=2, code=2)

    certificate["rows"][0]["passed"] = False
    (path,) = out.glob("proof/certificate-*.json")
    path.write_text(json.dumps(certificate))

    assert "require_certificate" in titanlite(*require_certificate(out), code=2)


def test_a_certificate_is_compared_with_a_job_whose_plugin_has_no_source_file(tmp_path):
    folder = tmp_path / "out"
    (folder / "proof").mkdir(parents=True)
    (folder / "proof" / "certificate-20260131-120000.json").write_text("{}")

    options = (*require_certificate(folder), "--job.plugins", "time")
    assert "require_certificate" in titanlite(*options, code=2)


def test_more_ranks_than_a_node_can_start_are_rejected(tmp_path):
    command = f"{sys.executable} -m titanlite prove --world-size 500 --job.dump_folder {tmp_path}"
    ended = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--world-size 500" in ended.stderr


def test_an_impossible_number_of_ranks_is_an_invalid_job(tmp_path):
    options = ("--job.dump_folder", tmp_path, "--parallelism.tensor_parallel_degree", 2)
    assert "--world-size 3" in titanlite("prove", *options, ranks=3, code=2)


def test_degrees_that_do_not_fit_the_original_model_are_rejected(tmp_path):
    options = job_words(tmp_path / "out")
    printed = titanlite("prove", *options, "--parallelism.tensor_parallel_degree", 3, code=2)
    assert "parallelism.tensor_parallel_degree" in printed
    assert not (tmp_path / "out").exists()


def test_short_sequences_are_shrunk_to_a_length_that_the_small_degrees_divide(tmp_path):
    # 3 ranks divide 33 tokens, but the small job has 2 ranks.
    options = "--training.seq_len 33 --parallelism.tensor_parallel_degree 3"
    model = "--model.dim 192 --model.ffn_dim 576 --model.n_heads 6 --model.n_kv_heads 6"
    dtype = "--training.mixed_precision_param float32"
    original = parse_original([*options.split(), *model.split(), *dtype.split()])

    small = shrink(original, world_size=None, steps=1, out=tmp_path)

    assert small.run.job.training.seq_len == 34

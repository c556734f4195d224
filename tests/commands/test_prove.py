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


def run(
    out: Path,
    command: str,
    ranks: int = 1,
    code: int = 0,
) -> str:
    """Run a command with the small job and the output folder `out`, and return the output."""
    job = out.with_suffix(".toml")
    job.write_text(SMALL_WITHOUT_WORKERS)
    command += f" --job.config_file {job} --job.dump_folder {out}"
    return titanlite(*command.split(), ranks=ranks, code=code)


def prove(
    out: Path,
    options: str = "",
    ranks: int = 2,
) -> dict[str, Any]:
    """Prove the small job, and return the certificate that is printed."""
    return read_printed_json(run(out, f"prove --json {options}", ranks))


def passed_checks(certificate: dict[str, Any]) -> set[str]:
    return {row["check"] for row in certificate["rows"] if row["passed"]}


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
    certificate = prove(tmp_path / "out", options, ranks)

    assert certificate["proven"]
    assert passed_checks(certificate) >= PASSED


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(1, signal.SIGTERM), pytest.param(2, signal.SIGINT, marks=pytest.mark.long)],
)
def test_a_stopped_proof_deletes_its_temporary_files(ranks, number, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(SMALL_WITHOUT_WORKERS)
    options = f"--job.config_file {job} --job.dump_folder {tmp_path}/out --world-size {ranks}"
    command = f"{sys.executable} -m titanlite prove {options} --steps 1000"
    with subprocess.Popen(command.split()) as process:
        while not list(tmp_path.glob("out/proof/run-*/*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) != 0

    assert not list(tmp_path.glob("out/proof/run-*"))


TRAIN_WITH_CERTIFICATE = "train --job.require_certificate --training.steps 2"


def test_a_start_can_require_a_certificate(tmp_path):
    out = tmp_path / "out"
    assert passed_checks(prove(out)) >= PASSED

    rejected = run(out, f"{TRAIN_WITH_CERTIFICATE} --optimizer.lr 3e-3", code=2)
    assert "job.require_certificate" in rejected
    assert "titanlite prove" in rejected
    assert "certificate" in run(out, TRAIN_WITH_CERTIFICATE)


def test_a_certificate_of_fewer_ranks_or_with_a_failed_comparison_is_rejected(tmp_path):
    out = tmp_path / "out"
    certificate = prove(out, ranks=1)

    assert certificate["proven"]
    assert "require_certificate" in run(out, TRAIN_WITH_CERTIFICATE, ranks=2, code=2)

    certificate["rows"][0]["passed"] = False
    (path,) = out.glob("proof/certificate-*.json")
    path.write_text(json.dumps(certificate))

    assert "require_certificate" in run(out, TRAIN_WITH_CERTIFICATE, code=2)


def test_a_certificate_is_compared_with_a_job_whose_plugin_has_no_source_file(tmp_path):
    folder = tmp_path / "out"
    (folder / "proof").mkdir(parents=True)
    (folder / "proof" / "certificate-20260131-120000.json").write_text("{}")

    command = f"{TRAIN_WITH_CERTIFICATE} --job.plugins time"
    assert "require_certificate" in run(folder, command, code=2)


def test_short_sequences_are_shrunk_to_a_length_that_the_small_degrees_divide(tmp_path):
    # 3 ranks divide 33 tokens, but the small job has 2 ranks.
    options = (
        "--training.seq_len 33 --parallelism.tensor_parallel_degree 3 "
        "--model.dim 192 --model.ffn_dim 576 --model.n_heads 6 --model.n_kv_heads 6 "
        "--training.mixed_precision_param float32"
    )
    original = parse_original(options.split())

    small = shrink(original, world_size=None, steps=1, out=tmp_path)

    assert small.run.job.training.seq_len == 34

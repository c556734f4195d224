"""`titanlite prove` accepts correct jobs, and writes certificates that a start can require."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run_small
from small_runs import read_printed_json

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


def prove(
    out: Path,
    options: str = "",
    ranks: int = 2,
) -> dict[str, Any]:
    """Prove the small job, and return the certificate that is printed."""
    return read_printed_json(run_small(out, "--json", options, command="prove", ranks=ranks))


def passed_checks(certificate: dict[str, Any]) -> set[str]:
    return {row["check"] for row in certificate["rows"] if row["passed"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(4, HSDP), (4, FSDP_TP), (4, CP_DOCUMENTS), (2, PP)],
    ids=["hsdp", "fsdp x tp", "cp, documents", "pp"],
)
def test_a_correct_layout_is_proven(ranks, options, tmp_path):
    certificate = prove(tmp_path / "out", options, ranks)

    assert certificate["proven"]
    assert passed_checks(certificate) >= PASSED


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(1, signal.SIGTERM), pytest.param(2, signal.SIGINT, marks=pytest.mark.long)],
)
def test_a_stopped_proof_deletes_its_temporary_files(ranks, number, job_file, tmp_path):
    options = f"--job.config_file {job_file} --job.dump_folder {tmp_path}/out --world-size {ranks}"
    command = f"{sys.executable} -m titanlite prove {options} --steps 1000"
    with subprocess.Popen(command.split()) as process:
        while not list(tmp_path.glob("out/proof/run-*/*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) != 0

    assert not list(tmp_path.glob("out/proof/run-*"))


WITH_CERTIFICATE = "--job.require_certificate --training.steps 2"


def test_a_start_can_require_a_certificate(tmp_path):
    out = tmp_path / "out"
    assert passed_checks(prove(out)) >= PASSED

    rejected = run_small(out, WITH_CERTIFICATE, "--optimizer.lr 3e-3", code=2)
    assert "job.require_certificate" in rejected
    assert "titanlite prove" in rejected
    assert "certificate" in run_small(out, WITH_CERTIFICATE)


def test_a_certificate_of_fewer_ranks_or_with_a_failed_comparison_is_rejected(tmp_path):
    out = tmp_path / "out"
    certificate = prove(out, ranks=1)

    assert certificate["proven"]
    assert "require_certificate" in run_small(out, WITH_CERTIFICATE, ranks=2, code=2)

    certificate["rows"][0]["passed"] = False
    (path,) = out.glob("proof/certificate-*.json")
    path.write_text(json.dumps(certificate))

    assert "require_certificate" in run_small(out, WITH_CERTIFICATE, code=2)


def test_a_certificate_is_compared_with_a_job_whose_plugin_has_no_source_file(tmp_path):
    folder = tmp_path / "out"
    (folder / "proof").mkdir(parents=True)
    (folder / "proof" / "certificate-20260131-120000.json").write_text("{}")

    output = run_small(folder, WITH_CERTIFICATE, "--job.plugins time", code=2)
    assert "require_certificate" in output


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

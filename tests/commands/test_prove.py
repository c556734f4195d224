"""`titanlite prove` accepts correct jobs, and writes certificates that a start can require."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import titanlite
from small_runs import SMALL

pytestmark = pytest.mark.slow
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "hsdp": (4, ("--parallelism.data_parallel_replicate_degree", 2)),
    "fsdp x tp": (4, ("--parallelism.tensor_parallel_degree", 2, "--model.n_kv_heads", 2)),
    "cp, documents": (
        4,
        ("--parallelism.context_parallel_degree", 2, "--dataset.document_mask"),
    ),
    "pp": (
        2,
        (
            "--parallelism.pipeline_parallel_degree",
            2,
            "--parallelism.data_parallel_shard_degree",
            1,
        ),
    ),
}


def prove(out: Path, *words: object, ranks: int = 2, code: int = 0) -> dict[str, Any]:
    """Prove the small job, and return the certificate that is printed."""
    job = out.with_suffix(".toml")
    job.write_text(SMALL)
    command = ("prove", "--json", "--job.config_file", job, "--job.dump_folder", out, *words)
    printed = titanlite(*command, ranks=ranks, code=code)
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def marked(name: str) -> object:
    marks = () if name in ("hsdp", "pp") else (pytest.mark.long,)
    return pytest.param(*LAYOUTS[name], id=name, marks=marks)


@pytest.mark.parametrize(("ranks", "words"), map(marked, LAYOUTS))
def test_a_correct_layout_is_proven(ranks: int, words: tuple[object, ...], tmp_path):
    certificate = prove(tmp_path / "out", *words, ranks=ranks)
    assert certificate["proven"]
    assert {row["check"] for row in certificate["rows"] if row["passed"]} >= {
        "initial weights",
        "sequences",
        "loss",
        "gradient",
        "gradient norm",
        "weight update",
        "optimizer state",
        "resume: state",
    }


def test_a_start_can_require_a_certificate(tmp_path):
    out = tmp_path / "out"
    assert prove(out)["proven"]
    train = ("train", "--job.config_file", out.with_suffix(".toml"), "--job.dump_folder", out)
    required = (*train, "--job.require_certificate", "--training.steps", 2)

    rejected = titanlite(*required, "--optimizer.lr", 3e-3, code=2)
    assert "job.require_certificate" in rejected
    assert "titanlite prove" in rejected

    assert "certificate" in titanlite(*required)


def test_a_certificate_of_one_rank_does_not_fit_a_parallel_run(tmp_path):
    out = tmp_path / "out"
    assert prove(out, ranks=1)["proven"]
    train = ("train", "--job.config_file", out.with_suffix(".toml"), "--job.dump_folder", out)
    assert "require_certificate" in titanlite(*train, "--job.require_certificate", ranks=2, code=2)


def test_a_certificate_with_a_failed_comparison_is_rejected(tmp_path):
    out = tmp_path / "out"
    certificate = prove(out, ranks=1)
    certificate["rows"][0]["passed"] = False
    (path,) = out.glob("proof/certificate-*.json")
    path.write_text(json.dumps(certificate))
    train = ("train", "--job.config_file", out.with_suffix(".toml"), "--job.dump_folder", out)
    assert "require_certificate" in titanlite(*train, "--job.require_certificate", code=2)


def test_more_ranks_than_a_node_can_start_are_rejected(tmp_path):
    command = [sys.executable, "-m", "titanlite", "prove", "--world-size", "500"]
    command += ["--job.dump_folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--world-size 500" in ended.stderr


def test_an_impossible_number_of_ranks_is_an_invalid_job(tmp_path):
    words = ("--job.dump_folder", tmp_path, "--parallelism.tensor_parallel_degree", 2)
    assert "--world-size 3" in titanlite("prove", *words, ranks=3, code=2)


def test_degrees_that_do_not_fit_the_original_model_are_rejected(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(SMALL)
    command = ("prove", "--job.config_file", job, "--job.dump_folder", tmp_path / "out")
    printed = titanlite(*command, "--parallelism.tensor_parallel_degree", 3, code=2)
    assert "parallelism.tensor_parallel_degree" in printed
    assert not (tmp_path / "out").exists()

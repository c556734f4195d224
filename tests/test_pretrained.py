"""`titanlite train --from` starts from a model folder, a Hub model or another run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from hub import Hub
from ranks import start_small, titanlite
from small_runs import losses

from titanlite.config.errors import UserError
from titanlite.load_run import load_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pretrained")]
ROWS = (
    "--training.seq_len 64 --training.local_batch_size 1 --training.global_batch_size 2 "
    "--training.steps 2 --metrics.log_freq 1 --training.mixed_precision_param float32"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Train a small run, and return its Hugging Face model."""
    out = tmp_path_factory.mktemp("model") / "out"
    start_small(out, "--training.steps", 3, "--checkpoint.last_save_in_hf").ends_with(0)
    return out / "final_hf"


def test_a_model_or_a_run_says_all_that_a_job_needs(model, tmp_path):
    for name, start in (("folder", model), ("run", model.parent)):
        titanlite("train", "--from", start, *ROWS, "--job.dump_folder", tmp_path / name)
    job = tomli.loads((tmp_path / "folder" / "config.toml").read_text())
    assert (job["model"]["dim"], job["model"]["n_kv_heads"]) == (64, 1)
    assert job["optimizer"]["lr"] == 1e-4
    assert job["tokenizer"]["path"] == str(model / "tokenizer.json")
    assert load_run(["--from", str(model)], 1).job.training.seq_len == 4096

    config = tmp_path / "folder/config.toml"
    titanlite("train", "--job.config_file", config, "--job.dump_folder", tmp_path / "again")

    # Bitwise. The loss of an untrained model is ln 4096 = 8.3 or more.
    assert losses(tmp_path / "folder") == losses(tmp_path / "again") == losses(tmp_path / "run")
    assert losses(tmp_path / "folder")[1] < 8.2


def test_a_model_of_a_hub_is_brought_once_and_trained_by_all_ranks(model, tmp_path):
    def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "titanlite", command, "--from", "someone/small", *ROWS]
        keys = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "NGPU": "2"}
        return subprocess.run(
            words, cwd=folder, env={**os.environ, **keys}, capture_output=True, text=True
        )

    files = {file.name: file.read_bytes() for file in model.iterdir()}
    with Hub({"models/someone/small": files}) as hub:
        assert run("launch", tmp_path).returncode == 0
        assert list(losses(tmp_path / "outputs/someone-small")) == [1, 2]
        assert [name for name, _ in hub.asked].count("model.safetensors") == 1
        hub.gated.add("models/someone/small")
        assert "license" in run("check", model.parent).stderr
    assert run("check", tmp_path).returncode == 0  # the hub is gone


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("", "neither a config.json"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ('{"model_type": "llama", "is_causal": false}', "is_causal"),
    ],
)
def test_a_folder_without_a_supported_model_is_rejected(config, problem, tmp_path):
    (tmp_path / ("config.json" if config else "readme")).write_text(config)
    with pytest.raises(UserError, match=problem):
        load_run(["--from", str(tmp_path)], 1)


def test_two_models_to_start_from_are_rejected(tmp_path):
    with pytest.raises(UserError, match="takes one folder"):
        load_run(["--from", str(tmp_path)] * 2, 1)

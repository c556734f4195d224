"""`titanlite train --from` starts from a model folder, a Hub model or another run."""

import shutil
import sys
from pathlib import Path

import pytest
import tomli
import torch
from hub import Hub
from ranks import run_small, titanlite
from small_runs import read_losses, read_metrics, run_program
from torch.nn import functional as F

from titanlite.data.loader import Loader
from titanlite.load_run import load_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pretrained")]
ROWS = (
    "--training.seq_len 64 --training.local_batch_size 1 --training.global_batch_size 2 "
    "--training.steps 2 --metrics.log_freq 1 --training.mixed_precision_param float32 "
    "--dataset.num_workers 0"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Train a small run, and return its Hugging Face model."""
    out = tmp_path_factory.mktemp("model") / "out"
    run_small(out, "--training.steps 3 --checkpoint.last_save_in_hf")
    return out / "final_hf"


def test_a_run_that_starts_from_a_model_or_a_run_needs_no_model_options(model, tmp_path):
    for name, start in (("folder", model), ("run", model.parent)):
        titanlite("train", "--from", start, *ROWS, "--job.dump_folder", tmp_path / name)
    job = tomli.loads((tmp_path / "folder" / "config.toml").read_text())

    assert (job["model"]["dim"], job["model"]["n_kv_heads"]) == (64, 1)
    assert job["optimizer"]["lr"] == 1e-4
    assert job["tokenizer"]["path"] == str(model / "tokenizer.json")
    assert load_run(["--from", str(model)], 1).job.training.seq_len == 4096

    config = tmp_path / "folder/config.toml"
    titanlite("train", "--job.config_file", config, "--job.dump_folder", tmp_path / "again")

    # The loss of an untrained model would be at least ln 4096 = 8.3.
    assert (
        read_losses(tmp_path / "folder")
        == read_losses(tmp_path / "again")
        == read_losses(tmp_path / "run")
    )
    assert read_losses(tmp_path / "folder")[1] < 8.2


def test_training_steps_of_olmo3_equal_those_of_transformers_and_adamw(model, tmp_path):
    from transformers import Olmo3Config, Olmo3ForCausalLM

    unscaled = {"rope_type": "default", "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = Olmo3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        sliding_window=16,
        pad_token_id=None,
        rope_parameters={"sliding_attention": unscaled, "full_attention": unscaled | yarn},
    )
    torch.manual_seed(0)
    reference = Olmo3ForCausalLM(config)
    reference.save_pretrained(tmp_path / "olmo3")
    shutil.copy(model / "tokenizer.json", tmp_path / "olmo3")
    changed = (
        f"--from {tmp_path}/olmo3 --training.local_batch_size 2 --training.steps 4 "
        "--training.max_norm 1000 --optimizer.lr 1e-3 --optimizer.weight_decay 0 "
        "--lr_scheduler.warmup_steps 0 --lr_scheduler.decay_ratio 0"
    )
    arguments = [*ROWS, *changed.split()]

    titanlite("train", *arguments, "--job.dump_folder", tmp_path / "out")

    job = load_run(arguments, 1).job
    loader = Loader.from_job(job)
    betas = job.optimizer.beta1, job.optimizer.beta2
    options = {"lr": 1e-3, "betas": betas, "eps": job.optimizer.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(reference.parameters(), **options)
    for entry in read_metrics(tmp_path / "out").values():
        (batch,) = loader.next_global_batch().microbatches
        logits = reference(batch.input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1000.0)
        optimizer.step()
        # fp32 sums in another order
        logged = entry["loss"], entry["grad_norm"]
        assert logged == pytest.approx((loss.item(), norm.item()), rel=1e-5)
    loader.close()


def test_a_model_on_a_hub_is_downloaded_once_and_trained_by_all_ranks(model, tmp_path):
    def run(command: str, folder: Path, code: int = 0) -> str:
        """Run a command, and return its errors."""
        options = [sys.executable, "-m", "titanlite", command, "--from", "someone/small", *ROWS]
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        variables["NGPU"] = "2"
        return run_program(*options, folder=folder, variables=variables, code=code).stderr

    files = {file.name: file.read_bytes() for file in model.iterdir()}
    with Hub({"models/someone/small": files}) as hub:
        run("launch", tmp_path)
        assert list(read_losses(tmp_path / "outputs/someone-small")) == [1, 2]
        assert [name for name, _ in hub.requests].count("model.safetensors") == 1
        hub.gated.add("models/someone/small")
        assert "license" in run("check", model.parent, code=2)

    run("check", tmp_path)  # the hub is gone


def test_the_path_of_a_missing_file_is_not_a_model_on_the_hub(run_command):
    error = run_command("check --from models/missing.json", code=2)
    assert error.startswith("models/missing.json is not ")
    assert "Known names are" not in error

"""Checkpoints of earlier versions; versions/README.md describes how they were created."""

import shutil
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import read_losses

VERSIONS = Path(__file__).with_name("versions")
ARCHIVES = sorted(VERSIONS.glob("*.tar.xz"))


@pytest.mark.slow
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_of_a_run_of_an_earlier_version_repeats_its_losses(
    archive: Path, ranks: int, tmp_path, monkeypatch
):
    shutil.unpack_archive(archive, tmp_path, filter="data")
    monkeypatch.chdir(VERSIONS)
    expected = read_losses(tmp_path)
    train = ["train", "--job.config_file", "job.toml", "--job.dump_folder", tmp_path]

    log = titanlite(*train, ranks=ranks)

    assert "Resumed after step 4 " in log
    # Versions of torch add fp32 values in different orders.
    assert read_losses(tmp_path) == pytest.approx(expected, rel=1e-6)

    if ranks == 2:
        return

    # The job is read from the checkpoint.
    step_folder = tmp_path / "checkpoint/step-00000004"
    text = titanlite(
        "generate", "--checkpoint", step_folder, "--max-new-tokens", 3, "--prompt", "the old"
    )

    assert "the old" in text

    has_old_schedule = archive.name.startswith("0.")
    changes = "--lr_scheduler.decay_ratio 1.0 --model.logit_softcap 30.0 --checkpoint.load_step 4"
    log = titanlite(*train, *changes.split())

    assert ("lr_scheduler: titanlite 0.2" in log) == has_old_schedule
    # These versions did not have this option.
    assert "model.logit_softcap: 0.0 -> 30.0" in log

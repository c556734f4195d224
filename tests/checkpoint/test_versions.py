"""A checkpoint of each format that ever was: versions/README.md says how they were made."""

import shutil
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import losses

VERSIONS = Path(__file__).with_name("versions")


@pytest.mark.slow
@pytest.mark.parametrize("archive", sorted(VERSIONS.glob("*.tar.xz")), ids=lambda path: path.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_each_version_goes_on_as_that_version_did(
    archive: Path, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.unpack_archive(archive, tmp_path, filter="data")
    monkeypatch.chdir(VERSIONS)
    before = losses(tmp_path)
    train = ["train", "--job.config_file", "job.toml", "--job.dump_folder", tmp_path]
    assert "Resumed after step 4 " in titanlite(*train, ranks=ranks)
    assert losses(tmp_path) == pytest.approx(before, rel=1e-6)  # fp32; versions of torch add in another order
    if ranks == 1:  # the job is read from the checkpoint
        words = ["--max-new-tokens", 3, "--prompt", "the old"]
        assert "the old" in titanlite("generate", "--checkpoint", tmp_path / "checkpoint/step-00000004", *words)
        said = titanlite(*train, "--lr_scheduler.decay_ratio", 1.0, "--checkpoint.load_step", 4)
        assert ("now the rate is torchtitan's" in said) == archive.name.startswith("0.")

"""Mutants of the job files: each is a valid job or a UserError, within two seconds, whatever was done to the file."""

import json
from pathlib import Path

import pytest
import tomlkit
from mutants import ALL, SAMPLE, ends_well, mutant

from titanlite.config.load import JOB_FILES, dump_config, load_job
from titanlite.load_run import load_run

FILES = sorted(JOB_FILES.glob("*.toml"))
MUTANT = ["--job.config_file", "mutant.toml"]


def toml_mutant(file: Path, number: int) -> bytes:
    """The file with other bytes, or the whole job with other keys and values."""
    if number % 2:
        return mutant(file.read_bytes(), number)
    job = load_job(["--job.config_file", str(file)]).model_dump(mode="json", exclude_none=True)
    changed = mutant(json.dumps(job).encode(), number, is_json=True)
    try:
        return tomlkit.dumps(json.loads(changed)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, AttributeError):  # no JSON any more, or no TOML
        return changed


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_a_mutant_is_a_job_or_a_users_error(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def check() -> None:
        job = load_run(MUTANT, 8).job
        Path("copy.toml").write_text(dump_config(job), encoding="utf-8")
        assert load_job(["--job.config_file", "copy.toml"]) == job

    valid = 0
    for number in range(count):
        Path("mutant.toml").write_bytes(toml_mutant(FILES[number % len(FILES)], number))  # stays if it fails
        valid += ends_well(number, check)
    assert 0 < valid < count  # mutants that all fail at the same place would prove little

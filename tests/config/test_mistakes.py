"""A wrong value is answered in the same words wherever it comes from."""

from pathlib import Path

import pytest
import tomli

from titanlite.config.errors import UserError
from titanlite.config.load import load_job
from titanlite.config.mistakes import WrongJob
from titanlite.config.schema import JobConfig
from titanlite.load_run import check_run


@pytest.mark.parametrize(
    "text",
    [
        "[training]\nsteps = 0",
        '[training]\nsteps = "5"',
        "[training]\nstep = 5",
        "[training]\nlr = 1.0",
        "[trainig]\nsteps = 5",
        "steps = 5",
        "training = 5",
        "[[training]]\nsteps = 5",
        '[compile]\ncomponents = ["modle"]',
        "[[dataset.sources]]\nsorce = 1",
        "[[dataset.stages]]\nstart_step = 1",
        "[validation]\nprefetch = 5",
        "[optimizer]\nlr = nan",
        '[job]\ndump_folder = "a\\u0000b"',
        "steps = 5\nmodel = 7\n[training]\nsteps = 0\nseq_len = 0.5\n[modell]\n[optimizer]\nlr = 0.0",
    ],
)
def test_a_job_made_in_python_is_refused_in_the_words_of_a_job_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(text)
    with pytest.raises(UserError) as of_file:
        load_job(["--job.config_file", "job.toml"])
    with pytest.raises(UserError) as of_python:
        JobConfig.model_validate(tomli.loads(text))
    assert str(of_python.value) == str(of_file.value).replace("  job.toml: ", "  JobConfig: ")
    assert of_python.value.exit_code == 2


@pytest.mark.parametrize("value", [5, None, "training", [], {5: {}}, {("a", "b"): 1}])
def test_what_is_no_table_of_sections_is_said(value: object):
    with pytest.raises(WrongJob, match="1 mistake in the job"):
        JobConfig.model_validate(value)


def test_what_model_copy_let_in_is_found_by_the_check():
    job = JobConfig()
    training = job.training.model_copy(update={"steps": "many", "stepz": 3})
    with pytest.raises(WrongJob) as caught:
        check_run(job.model_copy(update={"training": training}), 1)
    assert [mistake.found for mistake in caught.value.mistakes] == ['training.steps = "many"', "training.stepz = 3"]


def test_a_program_may_give_numbers_on_the_command_line_but_not_one_text():
    assert load_job(["--training.steps", 5]).training.steps == 5  # type: ignore[list-item]
    with pytest.raises(UserError, match=r'a list of words is needed, such as \["--training.steps", "5"\]'):
        load_job("--training.steps 5")


def test_a_job_made_in_python_without_a_folder_gets_one():
    assert check_run(JobConfig(), 1).job.job.dump_folder == "outputs/python"

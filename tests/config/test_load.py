"""A job file and the command line become one job, or one report of every mistake in them."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from titanlite.config.errors import UserError
from titanlite.config.load import JOB_FILES, PACKAGE, dump_config, load_job, resolve_path
from titanlite.config.mistakes import WrongJob
from titanlite.config.schema import SECTIONS, JobConfig
from titanlite.load_run import check_run


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, *argv: str) -> JobConfig:
    Path("job.toml").write_text(text, encoding="utf-8")
    return load_job(["--job.config_file", "job.toml", *argv])


def mistakes(text: str, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *argv)
    assert caught.value.exit_code == 2
    return re.sub(r"\s+", " ", str(caught.value))  # the report is wrapped


def value_of(job: JobConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(job, section), name)


@pytest.mark.parametrize(
    ("text", "argv", "key", "value"),
    [
        ("training.steps = 5", "--training.steps 7", "training.steps", 7),
        ("training.steps = 5", "--training.steps 10000", "training.steps", 10000),  # even if it is the default
        ("training.steps = 5", "--training.steps 8 --training.steps 7", "training.steps", 7),
        ("training.steps = 'abc'", "--training.steps 7", "training.steps", 7),
        ("training.seq_len = 64", "--training.steps 7", "training.seq_len", 64),
        ("", "--training.local-batch-size 3", "training.local_batch_size", 3),
        ("", "--training.local_batch_size=3", "training.local_batch_size", 3),
        ("", "--training.global_batch_size -1", "training.global_batch_size", -1),
        ("", "--optimizer.lr 1e-3", "optimizer.lr", 1e-3),
        ("optimizer.eps = 1", "", "optimizer.eps", 1.0),
        ("", "--compile.enable", "compile.enable", True),
        ("", "--checkpoint.no-enable", "checkpoint.enable", False),
        ("", "--model.tied-embeddings", "model.tied_embeddings", True),
        ("", "--model.no_tied_embeddings", "model.tied_embeddings", False),
        ("model.flavor = '8b'", "", "model.tied_embeddings", None),
        ("model.dim = 8", "--model.dim None", "model.dim", None),
        ("", "--float8.filter_fqns output -a", "float8.filter_fqns", ("output", "-a")),
        ("compile.components = ['clip']", "--compile.components", "compile.components", ()),
        ("", "--job.description=--x", "job.description", "--x"),
        ("", "--dataset.path -x", "dataset.path", "-x"),
        ("job.dump_folder = '~/x'", "", "job.dump_folder", str(Path("~/x").expanduser())),
        ("", "", "job.dump_folder", "outputs/job"),
        ("\ufefftraining.steps = 5", "", "training.steps", 5),
    ],
)
def test_the_command_line_wins_over_the_file_and_that_over_the_defaults(text: str, argv: str, key: str, value: object):
    assert value_of(load(text, *argv.split()), key) == value


@pytest.mark.parametrize("name", ["sub/mine.toml", "sub/mine", "llama_8b.toml", "llama_8b", "debug_model"])
def test_a_bare_name_is_found_in_the_folders_of_job_files(name: str):
    Path("sub").mkdir()
    Path("sub/mine.toml").write_text("")
    assert load_job([f"--job.config-file={name}"]).job.dump_folder == f"outputs/{Path(name).stem}"
    assert load_job([]).job.dump_folder == "outputs/debug_model"


def test_the_current_folder_comes_before_train_configs_and_that_before_titanlites_own():
    Path("train_configs").mkdir()
    for place in (JOB_FILES / "llama_8b.toml", Path("train_configs/llama_8b.toml"), Path("llama_8b.toml")):
        if not place.is_absolute():
            place.write_text("")
        assert load_job(["--job.config_file", "llama_8b"]).job.config_file == str(place)


@pytest.mark.parametrize("file", sorted(JOB_FILES.glob("*.toml")), ids=lambda file: file.stem)
def test_each_job_file_starts_with_its_command_and_holds_only_what_differs(file: Path):
    first, second, *_ = file.read_text().splitlines()
    assert "./run_train.sh" in first
    assert (file.name in first) == (file.stem != "debug_model")  # which needs no name
    assert second.startswith("# ")
    load_job(["--job.config_file", str(file)])
    for section, table in tomli.loads(file.read_text()).items():
        for key, value in table.items():
            assert value_of(JobConfig(), f"{section}.{key}") != value, f"{section}.{key} is the default"


def test_all_mistakes_of_file_and_command_line_are_reported_together_with_their_places():
    text = '[training]\nsteps = "abc"\nseq_len = 0\n[modle]\ndim = 1\n[optimizer]\nlrr = 1\nbeta1 = 7\n'
    report = mistakes(text, "--metrics.log_freq", "x", "--checkpoint.interval", "0", "--checkpoint.kep", "1")
    assert report.startswith("8 mistakes")
    for name in ("training.steps", "training.seq_len", "[modle]", "optimizer.lrr", "optimizer.beta1"):
        assert f"job.toml: {name}" in report
    for name in ("metrics.log_freq", "checkpoint.interval", "--checkpoint.kep"):
        assert f"command line: {name}" in report


@pytest.mark.parametrize(
    ("text", "argv", "found", "instead"),
    [
        ("validation.prefetch = 3", "", "validation.prefetch = 3", "no longer a key"),
        ('validation.sources = [{source = "c4", max_epochs = 2}]', "", "sources.0.max_epochs = 2", "no longer a key"),
        ("", "--validation.prefetch 3", "--validation.prefetch", "no longer a key"),
        ("", "--validation.no-document-mask", "--validation.no-document-mask", "no longer a key"),
        ('checkpoint.async_mode = "process"', "", 'async_mode = "process"', "'async'"),
    ],
)
def test_what_an_earlier_version_had_is_answered_with_what_to_use_instead(
    text: str, argv: str, found: str, instead: str
):
    report = mistakes(text, *argv.split())
    assert report.startswith("1 mistake")
    assert found in report
    assert instead in report


def test_the_jobs_that_an_earlier_version_saved_are_read_without_what_is_gone():
    dropped = {name: {key: value for key, (value, _) in model.dropped.items()} for name, model in SECTIONS.items()}
    assert load(tomlkit.dumps({name: table for name, table in dropped.items() if table})) == load("")
    saved = JobConfig().model_dump(mode="json")
    saved["validation"] |= {"prefetch": 3}
    saved["checkpoint"]["async_mode"] = "process"
    saved["metrics"]["details"] = ["updates", "float8"]
    assert JobConfig.of_checkpoint(saved) == JobConfig()
    saved["model"]["from_the_future"] = 5
    with pytest.raises(WrongJob, match="from_the_future"):
        JobConfig.of_checkpoint(saved)


@given(st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"])), st.floats(1e-300, 1e300))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_written_configuration_reloads_to_an_equal_object(text: str, number: float):
    content = {"job": {"description": text}, "optimizer": {"lr": number}, "samples": {"prompts": [text, "x"]}}
    content |= {"dataset": {"sources": [{"source": "c4", "weight": 2}]}, "checkpoint": {"enable": False}}
    job = load(tomlkit.dumps(content))
    Path("copy.toml").write_text(dump_config(job), encoding="utf-8")
    assert load_job(["--job.config_file", "copy.toml"]) == job  # with the name and the outputs of the original


def test_a_job_cannot_be_changed():
    job = load_job([])
    with pytest.raises(ValidationError, match="frozen"):
        job.training.steps = 5
    assert isinstance(hash(job), int)


def test_a_path_is_seen_from_the_current_folder_or_else_from_titanlites_own(in_empty_folder: Path):
    assert resolve_path("assets/tokenizer") == PACKAGE / "assets/tokenizer"
    Path("pyproject.toml").write_text("")
    assert resolve_path("pyproject.toml").resolve() == in_empty_folder / "pyproject.toml"
    assert resolve_path("/nowhere/x") == Path("/nowhere/x")


def test_a_job_made_in_python_is_refused_in_the_words_of_a_job_file():
    text = "steps = 5\nmodel = 7\n[training]\nsteps = 0\nseq_len = 0.5\n[modell]\n[optimizer]\nlr = nan\n"
    with pytest.raises(WrongJob) as of_python:
        JobConfig.model_validate(tomli.loads(text))
    found = re.sub(r"\s+", " ", str(of_python.value))
    assert found == mistakes(text).replace("job.toml: ", "JobConfig: ")
    for value in (5, None, "training", [], {5: {}}, {("a", "b"): 1}):
        with pytest.raises(WrongJob, match="1 mistake"):
            JobConfig.model_validate(value)


def test_what_model_copy_let_in_is_found_by_the_check():
    job = JobConfig()
    training = job.training.model_copy(update={"steps": "many", "stepz": 3})
    with pytest.raises(WrongJob) as caught:
        check_run(job.model_copy(update={"training": training}), 1)
    assert [mistake.found for mistake in caught.value.mistakes] == ['training.steps = "many"', "training.stepz = 3"]

"""A job file and the command line become one job, or one report of every mistake in them."""

import contextlib
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
from titanlite.config.load import (
    JOB_FILES,
    PACKAGE,
    dump_config,
    find_job_file,
    load_job,
    read_job,
    resolve_path,
)
from titanlite.config.mistakes import WrongJob, table_within
from titanlite.config.schema import KEYS, NEVER_READ, SECTIONS, JobConfig, ValidationSource
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


# ------------------------------------------------------------------------------------------------------------ what wins


def test_without_arguments_it_is_the_debug_model():
    job = load_job([])
    assert Path(job.job.config_file or "").name == "debug_model.toml"
    assert job.job.dump_folder == "outputs/debug_model"
    assert job.model.flavor == "debugmodel"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults():
    job = load("[training]\nsteps = 5\nseq_len = 64\n", "--training.steps", "7")
    assert (job.training.steps, job.training.seq_len) == (7, 64)
    assert job.training.local_batch_size == JobConfig().training.local_batch_size


def test_a_value_equal_to_the_default_wins_over_the_file_too():
    default = JobConfig().training.steps
    assert load("[training]\nsteps = 5\n", "--training.steps", str(default)).training.steps == default


def test_the_command_line_mends_a_wrong_value_in_the_file():
    assert load('[training]\nsteps = "abc"\n', "--training.steps", "7").training.steps == 7


@pytest.mark.parametrize(
    "argv",
    [
        ["--training.local_batch_size", "3"],
        ["--training.local-batch-size", "3"],
        ["--training.local_batch_size=3"],
        ["--training.local-batch-size=3"],
        ["--training.local_batch_size", "5", "--training.local_batch_size", "3"],
    ],
)
def test_hyphen_and_underscore_are_the_same_and_the_last_one_counts(argv: list[str]):
    assert load("", *argv).training.local_batch_size == 3


def test_every_kind_of_value_can_be_given_on_the_command_line():
    job = load(
        "[compile]\ncomponents = ['model']\n",
        "--compile.enable",
        "--checkpoint.no-enable",
        "--model.tied_embeddings",
        *("--float8.filter_fqns", "output", "layers.0"),
        *("--training.global_batch_size", "-1"),
        *("--optimizer.lr", "1e-3"),
        *("--dataset.path", "data/*.jsonl"),
        *("--model.dim", "512"),
    )
    assert (job.compile.enable, job.checkpoint.enable, job.model.tied_embeddings) == (True, False, True)
    assert job.float8.filter_fqns == ("output", "layers.0")
    assert job.compile.components == ("model",)
    assert (job.training.global_batch_size, job.optimizer.lr, job.model.dim) == (-1, 1e-3, 512)
    assert job.dataset.path == "data/*.jsonl"


def test_a_value_may_begin_with_a_hyphen():
    job = load("", "--job.description=--x", "--dataset.path", "-x", "--float8.filter_fqns", "-a", "-b")
    assert (job.job.description, job.dataset.path, job.float8.filter_fqns) == ("--x", "-x", ("-a", "-b"))


def test_none_takes_a_value_of_the_file_back_where_there_may_be_none():
    job = load("[model]\ndim = 8\n[dataset]\npath = 'x'\n", "--model.dim", "None", "--dataset.path", "None")
    assert (job.model.dim, job.dataset.path) == (None, None)


def test_an_empty_list_can_be_given_on_the_command_line():
    assert load("[compile]\ncomponents = ['clip']\n", "--compile.components").compile.components == ()


def test_a_list_of_tables_is_written_in_the_file_only():
    job = load('[[dataset.sources]]\nsource = "c4"\n[[dataset.sources]]\npath = "x"\nweight = 2\n')
    assert [source.weight for source in job.dataset.sources] == [1.0, 2.0]
    Path("copy.toml").write_text(dump_config(job))
    assert load_job(["--job.config_file", "copy.toml"]) == job
    assert "--dataset.sources is a list of tables: write [[dataset.sources]]" in mistakes("", "--dataset.sources", "x")


def test_an_absent_optional_key_stays_absent():
    job = load("[model]\nflavor = '8b'\n")
    assert job.model.tied_embeddings is None
    assert job.lr_scheduler.decay_ratio is None


@pytest.mark.parametrize(
    "flag", ["--model.tied_embeddings", "--model.no-tied-embeddings", "--model.no_tied_embeddings"]
)
def test_an_optional_boolean_is_a_flag(flag: str):
    assert load("", flag).model.tied_embeddings is ("no" not in flag)


def test_whole_numbers_are_fine_where_fractions_are_allowed():
    assert load("[optimizer]\neps = 1\n").optimizer.eps == 1.0


# ----------------------------------------------------------------------------------------------------------- which file


@pytest.mark.parametrize("name", ["sub/mine.toml", "sub/mine", "llama_8b.toml", "llama_8b", "debug_model"])
def test_a_bare_name_is_found_in_the_folders_of_job_files(name: str):
    Path("sub").mkdir()
    Path("sub/mine.toml").write_text("")
    assert load_job([f"--job.config-file={name}"]).job.dump_folder == f"outputs/{Path(name).stem}"


def test_the_current_folder_comes_before_train_configs_and_that_before_titanlites_own():
    assert find_job_file("llama_8b") == JOB_FILES / "llama_8b.toml"
    Path("train_configs").mkdir()
    Path("train_configs/llama_8b.toml").write_text("")
    assert find_job_file("llama_8b") == Path("train_configs/llama_8b.toml")
    Path("llama_8b.toml").write_text("")
    assert find_job_file("llama_8b") == Path("llama_8b.toml")


def test_a_byte_order_mark_before_the_file_is_no_mistake():
    Path("job.toml").write_bytes(b"\xef\xbb\xbf[training]\nsteps = 5\n")
    assert load_job(["--job.config_file", "job.toml"]).training.steps == 5


@pytest.mark.parametrize("file", sorted(JOB_FILES.glob("*.toml")), ids=lambda file: file.stem)
def test_each_job_file_starts_with_its_command_and_holds_only_what_differs(file: Path):
    first, second, *_ = file.read_text().splitlines()
    assert "./run_train.sh" in first
    assert (file.name in first) == (file.stem != "debug_model")  # which needs no name
    assert second.startswith("# ")
    defaults = JobConfig().model_dump()
    load_job(["--job.config_file", str(file)])
    for section, table in tomli.loads(file.read_text()).items():
        for key, value in table.items():
            assert defaults[section][key] != value, f"{section}.{key} is the default"


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_all_mistakes_of_file_and_command_line_are_reported_together():
    text = '[training]\nsteps = "abc"\nseq_len = 0\n[modle]\ndim = 1\n[optimizer]\nlrr = 1\nbeta1 = 7\n'
    report = mistakes(text, "--metrics.log_freq", "x", "--checkpoint.interval", "0", "--checkpoint.kep", "1")
    assert report.startswith("8 mistakes")
    found = (
        "training.steps",
        "training.seq_len",
        "[modle]",
        "lrr",
        "beta1",
        "log_freq",
        "interval",
        "--checkpoint.kep",
    )
    assert all(name in report for name in found)


def test_mistakes_of_the_command_line_are_reported_beside_a_file_that_cannot_be_read():
    assert mistakes("[training\n", "--training.steps", "x").startswith("2 mistakes")


def test_the_draft_of_a_wrong_job_has_defaults_where_values_are_wrong():
    Path("job.toml").write_text("[training]\nsteps = 0\nseq_len = 64\n")
    draft = read_job(["--job.config_file", "job.toml", "--metrics.log_freq", "x"])
    assert (draft.job.training.steps, draft.job.training.seq_len) == (JobConfig().training.steps, 64)
    assert draft.invalid == {"training.steps", "metrics.log_freq"}
    assert draft.origins["training.seq_len"] == "job.toml"


names = st.sampled_from([*KEYS, "steps", "trainin.x", "compile.no_enable", ""])
words = st.sampled_from(["5", "-1", "x", "", "true", "None", "--", "--=", "-h=", "a b", "1e9", "é"]) | st.text(
    max_size=5
)


@given(st.lists(st.builds("--{}".format, names) | words, max_size=6))
@settings(max_examples=25, deadline=None)
def test_no_command_line_leads_to_a_traceback(argv: list[str]):
    argv = [word for word in argv if word not in ("-h", "--help")]
    with contextlib.suppress(UserError):  # anything else fails the test
        load_job(argv)


# ------------------------------------------------------------------------------------------------------- dropped keys


def dropped_keys() -> list[tuple[str, str, object]]:
    return [(name, key, default) for name, section in SECTIONS.items() for key, (default, _) in section.dropped.items()]


def test_a_key_that_was_dropped_is_read_at_its_default_only():
    """As a resolved file of an earlier version has it; the job that a checkpoint holds is read by the schema alone."""
    old: dict[str, Any] = {}
    for section, key, value in dropped_keys():
        assert key not in SECTIONS[section].model_fields
        old.setdefault(section, {})[key] = value
    assert load(tomlkit.dumps(old)) == load("")
    assert JobConfig.model_validate(old) == JobConfig()
    old["validation"]["sources"] = [{"source": "c4", "max_epochs": 0}]
    assert load(tomlkit.dumps(old)).validation.sources == (ValidationSource(source="c4"),)


@pytest.mark.parametrize(
    ("text", "argv", "key", "sentence"),
    [
        ("[validation]\nprefetch = 3", [], "validation.prefetch = 3", NEVER_READ),
        ('[[validation.sources]]\nsource = "c4"\nmax_epochs = 2', [], "sources.0.max_epochs = 2", NEVER_READ),
        ("", ["--validation.prefetch", "3"], "--validation.prefetch", NEVER_READ),
        ("", ["--validation.no-document-mask"], "--validation.no-document-mask", NEVER_READ),
        (
            '[checkpoint]\nasync_mode = "process"',
            [],
            'async_mode = "process"',
            'is no longer a way to save. Use "async"',
        ),
        (
            "",
            ["--checkpoint.async_mode", "process"],
            'async_mode = "process"',
            'is no longer a way to save. Use "async"',
        ),
        ("", ["--metrics.details", "updates", "float8"], 'metrics.details.1 = "float8"', "is no longer measured"),
    ],
)
def test_what_an_earlier_version_had_is_answered_with_what_to_use_instead(
    text: str, argv: list[str], key: str, sentence: str
):
    report = mistakes(text, *argv)
    assert report.startswith("1 mistake")
    assert f"{key} {sentence}" in report


def test_the_job_of_an_old_checkpoint_is_read_without_what_is_gone():
    saved = JobConfig().model_dump(mode="json")
    saved["validation"] |= {"prefetch": 3}
    saved["checkpoint"]["async_mode"] = "process"
    saved["metrics"]["details"] = ["updates", "float8"]
    job = JobConfig.of_checkpoint(saved)
    assert job.metrics.details == ("updates",)
    assert job.model_copy(update={"metrics": JobConfig().metrics}) == JobConfig()


# ---------------------------------------------------------------------------------------------------- the resolved copy


def valid_values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Valid values of a key, drawn from its JSON schema."""
    schema = next((option for option in schema.get("anyOf", []) if option["type"] != "null"), schema)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    if schema["type"] == "array":
        return st.lists(valid_values(schema["items"]), max_size=3)
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 1)), schema.get("maximum", 1)
    kinds = {
        "boolean": st.booleans(),
        "integer": st.integers(max(low, 1), min(schema.get("maximum", 2**40), 2**40)),
        "number": st.floats(max(low, 1e-9), high, exclude_max="exclusiveMaximum" in schema),
        "string": st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), min_size=1, max_size=20),
    }
    return kinds[schema["type"]]


SCHEMAS = {name: section.model_json_schema()["properties"] for name, section in SECTIONS.items()}


def values_of(key: str) -> st.SearchStrategy[Any]:
    section, name = key.split(".")
    return valid_values(SCHEMAS[section][name])


some_keys = st.lists(
    st.sampled_from(
        sorted(key for key, field in KEYS.items() if key != "job.config_file" and not table_within(field.annotation))
    ),
    unique=True,
    max_size=12,
)


@given(some_keys.flatmap(lambda keys: st.fixed_dictionaries({key: values_of(key) for key in keys})))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_written_configuration_reloads_to_an_equal_object(values: dict[str, Any]):
    content: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        content.setdefault(section, {})[name] = value
    job = load(tomlkit.dumps(content))
    Path("copy.toml").write_text(dump_config(job), encoding="utf-8")
    assert load_job(["--job.config_file", "copy.toml"]) == job


def test_a_resolved_copy_keeps_the_name_of_its_original_and_its_outputs():
    job = load("", "--training.steps", "3")
    folder = Path(job.job.dump_folder)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(job))
    again = load_job(["--job.config_file", str(folder / "config.toml")])
    assert again == job
    assert (again.job.config_file, again.job.dump_folder) == ("job.toml", "outputs/job")


def test_a_job_cannot_be_changed():
    job = load_job([])
    with pytest.raises(ValidationError, match="frozen"):
        job.training.steps = 5
    assert isinstance(hash(job), int)


# ---------------------------------------------------------------------------------------------------------------- paths


def test_a_path_is_seen_from_the_current_folder_or_else_from_titanlites_own(in_empty_folder: Path):
    assert resolve_path("assets/tokenizer") == PACKAGE / "assets/tokenizer"
    Path("pyproject.toml").write_text("")
    assert resolve_path("pyproject.toml").resolve() == in_empty_folder / "pyproject.toml"
    assert resolve_path("/nowhere/x") == Path("/nowhere/x")


PATH_KEYS = ("job.dump_folder", "tokenizer.path", "dataset.path", "checkpoint.folder", "checkpoint.initial_load_path")


@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_tilde_is_the_home_folder_and_a_name_that_no_system_takes_is_a_mistake(key: str):
    section, name = key.split(".")
    job = load(f'[{section}]\n{name} = "~/x"\n')
    assert getattr(getattr(job, section), name) == str(Path("~/x").expanduser())
    assert getattr(getattr(load("", f"--{key}", "~nobody123/x"), section), name) == "~nobody123/x"  # no such user
    assert "is no path: File name too long" in mistakes("", f"--{key}", "x" * 256)
    assert "embedded null" in mistakes("", f"--{key}", "a\0b")  # byte or character, as the version of Python has it


# --------------------------------------------------------------------------------------------------------- from Python


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

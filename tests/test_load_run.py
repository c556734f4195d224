"""A job file and the command line become one validated run, or one report of all mistakes.

tests/test_wrong_inputs.py lists the inputs that are rejected.
"""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomlkit

from titanlite.checkpoint.find import read_newest_job
from titanlite.checkpoint.manifest import encode_manifest
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.load import JOB_FILES, dump_config, load_job
from titanlite.config.schema import SECTIONS, JobConfig, Model, Training
from titanlite.load_run import check_run, load_run


@pytest.fixture(autouse=True)
def in_folder_with_a_job(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[training]\nsteps = 1000\n")


JOB = ["--job.config_file", "job.toml"]


def load(text: str, *argv: str) -> JobConfig:
    Path("job.toml").write_text(text, encoding="utf-8")
    return load_job([*JOB, *argv])


def report(line: str = "", ranks: int = 1) -> str:
    """Return the report on job.toml with the options in `line`, or "" if all is valid."""
    try:
        load_run([*JOB, *line.split()], ranks)
    except UserError as error:
        return re.sub(r"\s+", " ", str(error))  # the report is wrapped
    return ""


def read_key(job: JobConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(job, section), name)


# Job file | options | resulting value
CASES = """
training.steps = 5 | --training.steps 7 | training.steps = 7
training.steps = 5 | --training.steps 10000 | training.steps = 10000
training.steps = 5 | --training.steps 8 --training.steps 7 | training.steps = 7
training.steps = 'abc' | --training.steps 7 | training.steps = 7
training.seq_len = 64 | --training.steps 7 | training.seq_len = 64
| --training.local-batch-size 3 | training.local_batch_size = 3
| --training.local_batch_size=3 | training.local_batch_size = 3
| --training.global_batch_size -1 | training.global_batch_size = -1
| --optimizer.lr 1e-3 | optimizer.lr = 1e-3
optimizer.eps = 1 | | optimizer.eps = 1.0
metrics.writers = ["json"] | | metrics.loggers = ["json"]
| --compile.enable | compile.enable = true
| --checkpoint.no-enable | checkpoint.enable = false
| --model.tied-embeddings | model.tied_embeddings = true
| --model.no_tied_embeddings | model.tied_embeddings = false
| --float8.filter_fqns output -a | float8.filter_fqns = ["output", "-a"]
compile.components = ['clip'] | --compile.components | compile.components = []
| --job.description=--x | job.description = "--x"
| --dataset.path -x | dataset.path = "-x"
| | job.dump_folder = "outputs/job"
\ufefftraining.steps = 5 | | training.steps = 5
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_the_command_line_wins_over_the_file_and_that_over_the_defaults(case):
    text, options, expected = case.split("|")
    key, _, value = expected.strip().partition(" = ")

    job = load(text.rstrip(" "), *options.split())

    loaded = read_key(job, key)
    loaded = list(loaded) if isinstance(loaded, tuple) else loaded

    assert loaded == tomli.loads(f"value = {value}")["value"]


def test_none_resets_an_option_and_a_tilde_is_expanded():
    assert load("model.dim = 8", "--model.dim", "None").model.dim is None
    assert load("job.dump_folder = '~/x'").job.dump_folder == str(Path("~/x").expanduser())


def test_a_bare_name_is_looked_up_here_then_in_train_configs_then_in_the_package():
    assert load_job([]).job.dump_folder == "outputs/debug_model"
    for folder in (JOB_FILES, Path("train_configs"), Path()):
        file = folder / "llama_8b.toml"
        if folder != JOB_FILES:
            folder.mkdir(exist_ok=True)
            file.write_text("")
        for name in ("llama_8b", "llama_8b.toml"):
            job = load_job([f"--job.config-file={name}"])
            assert job.job.config_file == str(file)


def test_a_job_without_a_file_is_not_described_as_the_debug_model():
    assert load_job(["--model.flavor", "3b"]).job.description == ""


@pytest.mark.parametrize(
    "file",
    sorted(JOB_FILES.glob("*.toml")),
    ids=lambda file: file.stem,
)
def test_each_job_file_starts_with_its_command_and_holds_only_what_differs(file):
    text = file.read_text()
    first, second, *_ = text.splitlines()

    assert "./run_train.sh" in first
    assert (file.name in first) == (file.stem != "debug_model")  # which needs no name
    assert second.startswith("# ")

    load_job(["--job.config_file", str(file)])
    for section, table in tomli.loads(text).items():
        for key, value in table.items():
            default = read_key(JobConfig(), f"{section}.{key}")
            assert value != default, f"{section}.{key} is the default"


def count_vocabulary(line: str) -> int:
    """Return the number of rows of the model's embedding."""
    run = load_run([*JOB, *line.split()], 1)
    assert check_run(run.job, 1) == run
    return run.arch.vocab_size


@pytest.mark.parametrize("flavor", ["debugmodel", "150m"])
def test_a_flavor_without_a_vocabulary_rounds_that_of_the_tokenizer_up_to_128(flavor):
    lines = []
    for rank in range(1744):  # and 256 special tokens
        token = base64.b64encode(rank.to_bytes(1 if rank < 256 else 4)).decode()
        lines.append(f"{token} {rank}\n")
    Path("odd.model").write_text("".join(lines))
    options = f"--model.flavor {flavor}"

    # Earlier versions saved checkpoints of debug models without this number, which was 4096.
    assert count_vocabulary(options) == 4096
    assert count_vocabulary(f"{options} --tokenizer.path odd.model") == 2048
    assert count_vocabulary(f"{options} --model.vocab_size 5001") == 5001
    assert count_vocabulary("--model.flavor 1b") == 128256

    too_small = "--tokenizer.path odd.model --model.vocab_size 1999"
    assert "at least 2000" in report(too_small)


def test_a_job_file_may_contain_options_that_were_dropped():
    dropped = {}
    for name, model in SECTIONS.items():
        if name != "model":  # its dropped options come from torchtitan
            dropped[name] = {key: value for key, (value, _) in model.dropped.items()}
    text = tomlkit.dumps({name: table for name, table in dropped.items() if table})

    assert load(text) == load("")


def test_a_job_in_a_checkpoint_may_contain_dropped_but_no_unknown_options(tmp_path):
    job = JobConfig().model_dump(mode="json")
    job["validation"] |= {"prefetch": 3}
    job["checkpoint"]["async_mode"] = "process"
    job["metrics"]["details"] = ["updates", "float8"]
    state = {"step": 1, "tokens": 64, "data": {"version": 1}}
    info = {"job": job, "architecture": {}, "train_state": state}
    body = {"format": 1, "step": 1, "files": {}, "info": info}
    manifest = tmp_path / "checkpoint/step-00000001/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(encode_manifest(body))

    assert read_newest_job(manifest.parent) == JobConfig()

    job["model"] |= {"from_the_future": 5, "norm_placement": "both"}
    manifest.write_bytes(encode_manifest(body))

    with pytest.raises(CheckpointError, match=r"model\.norm_placement; .*model\.from_the_future"):
        read_newest_job(manifest.parent)


@pytest.mark.parametrize(
    "text",
    [
        '[[dataset.sources]]\nsource = "c4"\n' * 2,
        "[validation]\nfreq = 5\nholdout = 0.1\n[lr_scheduler]\nwarmup_steps = 30\n",
        # The held-out text is not trained on, even without validation.
        "[validation]\nfreq = 0\nholdout = 0.1\n",
        '[validation]\nfreq = 5\nsource = "c4"\n',
        (
            '[job]\ndescription = "\u6771\u4eac \\u001b \\\\ \\""\n'
            '[samples]\nfreq = 0\nprompts = ["", " x\\n"]\n'
        ),
    ],
)
def test_a_written_config_with_all_defaults_loads_to_the_same_job(text):
    """The copy keeps the name and the output folder of the original."""
    Path("job.toml").write_text(text)
    job = load_run([*JOB, "--training.steps", "5"], 1).job
    Path("copy.toml").write_text(dump_config(job))

    assert load_run(["--job.config_file", "copy.toml"], 1).job == job


def test_all_mistakes_of_file_command_line_and_rules_are_reported_together_with_their_places():
    text = (
        "[training]\nseq_len = 9000\n[modle]\ndim = 1\n[model]\nn_heads = 3\n[optimizer]\nlrr = 1"
    )
    Path("job.toml").write_text(text)

    report_text = report("--metrics.log_freq x --checkpoint.kep 1 --model.vocab_size 100")

    assert report_text.startswith("7 mistakes")

    for key in ("2: training.seq_len", "3: [modle]", "6: model.n_heads", "8: optimizer.lrr"):
        assert f"job.toml:{key}" in report_text
    for name in ("metrics.log_freq", "--checkpoint.kep", "model.vocab_size"):
        assert f"command line: {name}" in report_text


def test_a_rule_is_skipped_if_a_value_that_it_reads_is_wrong_already():
    line = "--training.local_batch_size 0 --training.global_batch_size 7 --model.dim x"

    report_text = report(line, ranks=2)

    assert report_text.startswith("2 mistakes")
    assert "training.global_batch_size" not in report_text


def test_a_wrong_job_in_python_is_rejected_with_the_messages_of_a_job_file():
    text = (
        "steps = 5\nmodel = 7\n[training]\nsteps = 0\nseq_len = 0.5\n"
        "[modell]\n[optimizer]\nlr = nan\n"
    )
    Path("job.toml").write_text(text)

    with pytest.raises(UserError) as caught:
        JobConfig.model_validate(tomli.loads(text))

    of_file = re.sub(r"job.toml:\d+:", "JobConfig:", report())
    assert re.sub(r"\s+", " ", str(caught.value)) == of_file

    wrong_keys = ({5: {}}, {("a", "b"): 1})
    for value in (5, None, "training", [], *wrong_keys):
        with pytest.raises(UserError, match=r"^JobConfig: [^\n]*$"):
            JobConfig.model_validate(value)


def test_a_job_in_python_is_checked_like_a_job_file():
    # model_copy does not validate.
    changed = JobConfig().training.model_copy(update={"steps": "many", "stepz": 3})
    copied = JobConfig().model_copy(update={"training": changed})
    built = JobConfig(training=Training(seq_len=9000), model=Model(n_heads=3))
    for job, message in (
        (built, "model.n_heads .* got 3.*seq_len .* got 9000"),
        (copied, 'training.steps .* got "many".*training.stepz'),
    ):
        with pytest.raises(UserError, match=f"(?s)^2 mistakes.*{message}"):
            check_run(job, 1)

    run = check_run(JobConfig(), 1)

    assert (run.arch.vocab_size, run.job.job.dump_folder) == (4096, "outputs/python")


# In the last job, the default warmup adapts to the short run.
VALID_JOBS = """
--training.local_batch_size 4 --training.global_batch_size 16 @2
--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2 @4
--parallelism.data_parallel_replicate_degree 4 @4
--training.seq_len 8192
--training.seq_len 9000 --model.max_seq_len 9000
--activation_checkpoint.mode memory_budget --compile.enable
--float8.enable --float8.min_features 0 --model.vocab_size 4100
--dataset.source text --dataset.path job.toml
--dataset.source text --dataset.path **/*.toml
--validation.freq 2 --validation.source python_stdlib
--validation.freq 2 --validation.holdout 0.1
--training.steps 5
--samples.freq 0 --samples.prompts def
--compile.no-enable --compile.components model
--float8.no-enable --float8.recipe_name mxfp8
"""


@pytest.mark.parametrize("line", VALID_JOBS.strip().split("\n"))
def test_a_valid_job_has_an_empty_report_and_creates_no_files(line):
    options, _, ranks = line.partition(" @")

    assert report(f"{options} --job.dump_folder a/b", int(ranks or 1)) == ""

    assert [path.name for path in Path().iterdir()] == ["job.toml"]


PIPELINE = "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("key", "line", "ranks"),
    [
        ("seq_len", "--parallelism.context_parallel_degree 2 --training.seq_len 510", 2),
        ("global_batch_size", f"{PIPELINE} 1F1B", 2),
        ("global_batch_size", "--training.global_batch_size 12", 1),
        ("global_batch_size", f"{PIPELINE} Interleaved1F1B --training.global_batch_size 40", 2),
    ],
)
def test_multiples_of_the_number_in_a_report_are_valid(key, line, ranks):
    (unit,) = re.findall(rf"training.{key} must be a multiple of (\d+)", report(line, ranks))

    for factor in (5, 8):  # an odd and an even multiple
        assert report(f"{line} --training.{key} {factor * int(unit)}", ranks) == ""


@pytest.mark.parametrize(("torch", "is_valid"), [("2.11.0+cu130", False), ("2.13.0", True)])
def test_a_schedule_that_an_older_torch_lacks_is_rejected(torch, is_valid, monkeypatch):
    monkeypatch.setattr("titanlite.rules.version", lambda name: torch)
    line = (
        f"{PIPELINE} ZBVZeroBubble "
        "--training.global_batch_size 32 --activation_checkpoint.mode none"
    )

    report_text = report(line, ranks=2)

    assert (report_text == "") == is_valid
    assert ("parallelism.pipeline_parallel_schedule" in report_text) != is_valid

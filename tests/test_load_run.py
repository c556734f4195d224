"""A job file and the command line become one checked run, or one report of all mistakes in them.

What is refused is listed in tests/test_wrong_inputs.py.
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


def load(text: str, *argv: str) -> JobConfig:
    Path("job.toml").write_text(text, encoding="utf-8")
    return load_job(["--job.config_file", "job.toml", *argv])


def check(*argv: str, ranks: int = 1) -> str:
    """The report on job.toml with these options; empty if there is nothing to say."""
    try:
        load_run(["--job.config_file", "job.toml", *argv], ranks)
    except UserError as error:
        return re.sub(r"\s+", " ", str(error))  # the report is wrapped
    return ""


def value_of(job: JobConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(job, section), name)


@pytest.mark.parametrize(
    ("text", "argv", "key", "value"),
    [
        ("training.steps = 5", "--training.steps 7", "training.steps", 7),
        (
            "training.steps = 5",
            "--training.steps 10000",
            "training.steps",
            10000,
        ),  # even if it is the default
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
def test_the_command_line_wins_over_the_file_and_that_over_the_defaults(
    text: str, argv: str, key: str, value: object
):
    assert value_of(load(text, *argv.split()), key) == value


def test_a_bare_name_is_looked_up_here_then_in_train_configs_then_in_titanlites_own():
    assert load_job([]).job.dump_folder == "outputs/debug_model"
    for folder in (JOB_FILES, Path("train_configs"), Path()):
        folder.mkdir(exist_ok=True)
        if folder != JOB_FILES:
            (folder / "llama_8b.toml").write_text("")
        for name in ("llama_8b", "llama_8b.toml"):
            assert load_job([f"--job.config-file={name}"]).job.config_file == str(
                folder / "llama_8b.toml"
            )


def test_a_job_without_a_file_is_not_described_as_the_debug_model():
    assert load_job(["--model.flavor", "3b"]).job.description == ""


@pytest.mark.parametrize("file", sorted(JOB_FILES.glob("*.toml")), ids=lambda file: file.stem)
def test_each_job_file_starts_with_its_command_and_holds_only_what_differs(file: Path):
    first, second, *_ = file.read_text().splitlines()
    assert "./run_train.sh" in first
    assert (file.name in first) == (file.stem != "debug_model")  # which needs no name
    assert second.startswith("# ")
    load_job(["--job.config_file", str(file)])
    for section, table in tomli.loads(file.read_text()).items():
        for key, value in table.items():
            assert value_of(JobConfig(), f"{section}.{key}") != value, (
                f"{section}.{key} is the default"
            )


def vocabulary(*argv: str) -> int:
    """Rows of the model's embedding, as the complete job has them."""
    run = load_run(["--job.config_file", "job.toml", *argv], 1)
    assert check_run(run.job, 1) == run
    return run.arch.vocab_size


@pytest.mark.parametrize("flavor", ["debugmodel", "150m"])
def test_a_flavor_of_our_own_has_the_tokenizers_vocabulary_in_multiples_of_128(flavor: str):
    tokens = (
        base64.b64encode(rank.to_bytes(1 if rank < 256 else 4)).decode() for rank in range(1744)
    )  # 256 special
    Path("odd.model").write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(tokens)))
    assert (
        vocabulary("--model.flavor", flavor) == 4096
    )  # as every debug model that was saved without the number
    assert vocabulary("--model.flavor", flavor, "--tokenizer.path", "odd.model") == 2048
    assert vocabulary("--model.flavor", flavor, "--model.vocab_size", "5001") == 5001
    assert vocabulary("--model.flavor", "1b") == 128256
    assert "at least 2000" in check("--tokenizer.path", "odd.model", "--model.vocab_size", "1999")


def test_jobs_that_an_earlier_version_saved_are_read_without_what_is_gone(tmp_path):
    dropped = {
        name: {key: value for key, (value, _) in model.dropped.items()}
        for name, model in SECTIONS.items()
    }
    del dropped["model"]  # a key of torchtitan's
    assert load(tomlkit.dumps({name: table for name, table in dropped.items() if table})) == load(
        ""
    )
    job = JobConfig().model_dump(mode="json")
    job["validation"] |= {"prefetch": 3}
    job["checkpoint"]["async_mode"] = "process"
    job["metrics"]["details"] = ["updates", "float8"]
    state = {"step": 1, "tokens": 64, "data": {"version": 1}}
    body = {
        "format": 1,
        "step": 1,
        "files": {},
        "info": {"job": job, "architecture": {}, "train_state": state},
    }
    folder = tmp_path / "checkpoint/step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(encode_manifest(body))
    assert read_newest_job(folder) == JobConfig()
    job["model"]["from_the_future"] = 5
    (folder / "manifest.json").write_bytes(encode_manifest(body))
    with pytest.raises(CheckpointError, match="from_the_future"):
        read_newest_job(folder)


@pytest.mark.parametrize(
    "text",
    [
        '[[dataset.sources]]\nsource = "c4"\n' * 2,
        "[validation]\nfreq = 5\nholdout = 0.1\n[lr_scheduler]\nwarmup_steps = 30\n",
        "[validation]\nfreq = 0\nholdout = 0.1\n",  # what was held out is still not trained on
        '[validation]\nfreq = 5\nsource = "c4"\n',
        '[job]\ndescription = "\u6771\u4eac \\u001b \\\\ \\""\n[samples]\nprompts = ["", " x\\n"]\n',
    ],
)
def test_a_resolved_job_which_names_every_default_is_as_good_as_its_original(text: str):
    Path("job.toml").write_text(text)
    job = load_run(["--job.config_file", "job.toml", "--training.steps", "5"], 1).job
    Path("copy.toml").write_text(dump_config(job))
    assert (
        load_run(["--job.config_file", "copy.toml"], 1).job == job
    )  # with the name and the outputs of the original


def test_all_mistakes_of_file_command_line_and_rules_are_reported_together_with_their_places():
    text = (
        "[training]\nseq_len = 9000\n[modle]\ndim = 1\n[model]\nn_heads = 3\n[optimizer]\nlrr = 1"
    )
    Path("job.toml").write_text(text)
    report = check("--metrics.log_freq", "x", "--checkpoint.kep", "1", "--model.vocab_size", "100")
    assert report.startswith("7 mistakes")
    for line, name in enumerate(
        ("training.seq_len", "[modle]", "model.n_heads", "optimizer.lrr"), start=1
    ):
        assert re.search(rf"job.toml:{2 * line - (line == 2)}: {re.escape(name)}", report), report
    for name in ("metrics.log_freq", "--checkpoint.kep", "model.vocab_size"):
        assert f"command line: {name}" in report


def test_a_rule_is_skipped_where_a_value_that_it_reads_is_wrong_already():
    report = check(
        "--training.local_batch_size",
        "0",
        "--training.global_batch_size",
        "7",
        "--model.dim",
        "x",
        ranks=2,
    )
    assert report.startswith("2 mistakes")
    assert "training.global_batch_size" not in report


def test_a_job_of_python_is_refused_in_the_words_of_a_job_file():
    text = "steps = 5\nmodel = 7\n[training]\nsteps = 0\nseq_len = 0.5\n[modell]\n[optimizer]\nlr = nan\n"
    Path("job.toml").write_text(text)
    with pytest.raises(UserError) as of_python:
        JobConfig.model_validate(tomli.loads(text))
    of_file = re.sub(r"job.toml:\d+:", "JobConfig:", check())
    assert re.sub(r"\s+", " ", str(of_python.value)) == of_file
    for value in (5, None, "training", [], {5: {}}, {("a", "b"): 1}):
        with pytest.raises(UserError, match=r"^JobConfig: [^\n]*$"):
            JobConfig.model_validate(value)


def test_a_job_of_python_is_checked_as_one_of_a_file():
    copied = JobConfig().training.model_copy(
        update={"steps": "many", "stepz": 3}
    )  # which does not validate
    for job, found in (
        (
            JobConfig(training=Training(seq_len=9000), model=Model(n_heads=3)),
            ["model.n_heads .* got 3", "seq_len .* got 9000"],
        ),
        (
            JobConfig().model_copy(update={"training": copied}),
            ['training.steps .* got "many"', "training.stepz"],
        ),
    ):
        with pytest.raises(UserError, match=f"(?s)^2 mistakes.*{'.*'.join(found)}"):
            check_run(job, 1)
    run = check_run(JobConfig(), 1)
    assert (run.arch.vocab_size, run.job.job.dump_folder) == (4096, "outputs/python")


SOUND = """
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
"""  # the last is a look at the first steps of a longer run, with its own warmup


@pytest.mark.parametrize("line", SOUND.strip().split("\n"))
def test_what_is_allowed_is_not_reported_and_leaves_nothing(line: str):
    words, _, ranks = line.partition(" @")
    assert check(*words.split(), "--job.dump_folder", "a/b", ranks=int(ranks or 1)) == ""
    assert [path.name for path in Path().iterdir()] == ["job.toml"]


PIPELINE = "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("key", "line", "ranks", "nearest"),
    [
        (
            "seq_len",
            "--parallelism.context_parallel_degree 2 --training.seq_len 510",
            2,
            ["508", "512"],
        ),
        ("global_batch_size", f"{PIPELINE} 1F1B", 2, ["16"]),
        ("global_batch_size", "--training.global_batch_size 12", 1, ["8", "16"]),
        (
            "global_batch_size",
            f"{PIPELINE} Interleaved1F1B --training.global_batch_size 40",
            2,
            ["32", "48"],
        ),
    ],
)
def test_the_nearest_that_is_named_works(key: str, line: str, ranks: int, nearest: list[str]):
    report = check(*line.split(), ranks=ranks)
    assert f"training.{key}" in report
    assert re.findall(r"\d+", report.partition("Nearest: ")[2]) == nearest, report
    assert [check(*line.split(), f"--training.{key}", value, ranks=ranks) for value in nearest] == [
        ""
    ] * len(nearest)


def test_what_an_older_torch_cannot_do_is_refused(monkeypatch):
    line = f"{PIPELINE} ZBVZeroBubble --training.global_batch_size 32 --activation_checkpoint.mode none"
    for torch, refused in (("2.11.0+cu130", True), ("2.13.0", False)):
        monkeypatch.setattr("titanlite.rules.version", lambda _name, torch=torch: torch)
        report = check(*line.split(), ranks=2)
        assert (bool(report), "parallelism.pipeline_parallel_schedule" in report) == (
            refused,
            refused,
        )

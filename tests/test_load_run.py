"""Rules that span keys, the world size and files on disk: each is reported with its remedy, all in one report."""

import base64
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.checkpoint.find import known_job
from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.checkpoint.step_folders import encode_manifest
from titanlite.config.errors import UserError
from titanlite.config.flavors import architecture, unused_rows
from titanlite.config.load import dump_config, load_job
from titanlite.config.rules import RULES
from titanlite.config.schema import KEYS, JobConfig, Model, Training
from titanlite.load_run import check_run, load_run


@pytest.fixture(autouse=True)
def in_folder_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[training]\nsteps = 1000\n")


def check(*argv: str, ranks: int = 1) -> str:
    """The report on job.toml with these options; empty if there is nothing to say."""
    try:
        load_run(["--job.config_file", "job.toml", *argv], ranks)
    except UserError as error:
        return re.sub(r"\s+", " ", str(error))  # the report is wrapped
    return ""


def write_tokenizer(path: str, size: int) -> None:
    """A tiktoken file with `size` ids, 256 of which are the special tokens."""
    tokens = (base64.b64encode(rank.to_bytes(1 if rank < 256 else 4)).decode() for rank in range(size - 256))
    Path(path).write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(tokens)))


def test_a_sound_job_passes_and_is_returned():
    argv = ["--job.config_file", "job.toml"]
    assert load_run(argv, 4).job == load_job([*argv, "--model.vocab_size", "4096"])


SOUND = [
    (["--training.local_batch_size", "4", "--training.global_batch_size", "16"], 2),
    ([*("--parallelism.data_parallel_replicate_degree", "2"), *("--parallelism.data_parallel_shard_degree", "2")], 4),
    (["--parallelism.data_parallel_replicate_degree", "4"], 4),
    (["--training.seq_len", "8192"], 1),
    (["--training.seq_len", "9000", "--model.max_seq_len", "9000"], 1),
    (["--activation_checkpoint.selective_ac_option", "6"], 1),
    (["--activation_checkpoint.mode", "memory_budget", "--compile.enable"], 1),
    (["--float8.precompute_float8_dynamic_scale_for_fsdp", "--model.ffn_dim", "700"], 1),  # float8 is off
    (["--float8.enable", "--float8.min_features", "0", "--model.vocab_size", "4100"], 1),  # the output is not converted
    (["--dataset.source", "text", "--dataset.path", "job.toml"], 1),
    (["--dataset.source", "text", "--dataset.path", "**/*.toml"], 1),
    (["--validation.source", "jsonl", "--validation.freq", "0"], 1),  # there is no validation
    (["--validation.freq", "2", "--validation.source", "python_stdlib"], 1),  # named, even if it is the default
    (["--validation.freq", "2", "--validation.holdout", "0.1"], 1),
    (["--training.steps", "5"], 1),  # a look at the first steps of a longer run, with its own warmup
]


@pytest.mark.parametrize(("argv", "ranks"), SOUND)
def test_what_is_allowed_is_not_reported(argv: list[str], ranks: int):
    assert check(*argv, ranks=ranks) == ""


def test_the_tokenizer_is_compared_with_the_model_in_either_format():
    write_tokenizer("big.model", 5000)
    assert "at least 5000" in check("--tokenizer.path", "big.model", "--model.vocab_size", "4999")


def vocabulary(*argv: str) -> int:
    """Rows of the model's embedding, as the complete job has them."""
    run = load_run(["--job.config_file", "job.toml", *argv], 1)
    assert check_run(run.job, 1) == run
    return run.arch.vocab_size


@pytest.mark.parametrize("flavor", ["debugmodel", "150m"])
def test_a_flavor_of_our_own_has_the_tokenizers_vocabulary_in_multiples_of_128(flavor: str):
    write_tokenizer("odd.model", 2000)
    assert vocabulary("--model.flavor", flavor) == 4096  # as every debug model that was saved without the number
    assert vocabulary("--model.flavor", flavor, "--tokenizer.path", "odd.model") == 2048
    assert vocabulary("--model.flavor", flavor, "--model.vocab_size", "5001") == 5001


def test_a_job_that_was_saved_without_the_vocabulary_is_resumed_unchanged():
    job = check_run(JobConfig(), 1).job
    before, now = (j.model_dump(mode="json") for j in (job.model_copy(update={"model": Model()}), job))
    assert before["model"] != now["model"]
    assert compare_jobs(before, now).lines() == []


def test_a_published_flavor_keeps_its_vocabulary():
    assert vocabulary("--model.flavor", "1b") == 128256


def test_rows_that_no_token_uses_are_counted():
    arch = architecture(Model(vocab_size=4224))
    assert unused_rows(arch, 4097) == "127 of 4,224 rows of the embedding (model.vocab_size) stand for no token."
    assert unused_rows(arch, 4224) == ""


def test_validation_can_be_turned_off_where_the_file_holds_documents_out():
    Path("job.toml").write_text("[validation]\nfreq = 5\nholdout = 0.1\n")
    off = load_run(["--job.config_file", "job.toml", "--validation.freq", "0"], 1).job
    assert (off.validation.freq, off.validation.holdout) == (0, 0.1)  # what was held out is still not trained on
    Path("job.toml").write_text(dump_config(off))
    assert load_run(["--job.config_file", "job.toml"], 1).job.validation == off.validation


def test_a_job_of_python_is_checked_as_one_of_a_file():
    wrong = JobConfig(training=Training(seq_len=9000), model=Model(n_heads=3))
    with pytest.raises(UserError) as caught:
        check_run(wrong, 1)
    report = re.sub(r"\s+", " ", str(caught.value))
    assert report.startswith("2 mistakes in the job: JobConfig: model.n_heads = 3 must divide model.dim = 256 ")
    assert "JobConfig: training.seq_len = 9000 must be at most model.max_seq_len" in report
    assert check_run(JobConfig(), 1).arch.vocab_size == 4096


def test_the_check_of_a_folder_leaves_nothing():
    before = sorted(Path().rglob("*"))
    assert check("--job.dump_folder", "a/b") == ""
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "text",
    [
        '[[dataset.sources]]\nsource = "c4"\n' * 2,
        "[validation]\nfreq = 5\nholdout = 0.1\n",
        '[validation]\nfreq = 5\nsource = "c4"\n',
    ],
)
def test_a_resolved_job_which_names_every_default_is_as_good_as_its_original(text: str):
    Path("job.toml").write_text(text)
    Path("job.toml").write_text(dump_config(load_run(["--job.config_file", "job.toml"], 1).job))
    assert check() == ""


def test_each_stage_of_a_mix_must_run():
    sources = '[training]\nsteps = 10\n[[dataset.sources]]\nsource = "c4"\n'
    stages = [f"[[dataset.stages]]\nstart_step = {start}\nweights = [1]\n" for start in (5, 5, 10)]
    Path("job.toml").write_text(sources + "".join(stages))
    report = check()
    assert report.startswith("2 mistakes")
    assert "dataset.stages.1.start_step = 5" in report
    assert "dataset.stages.2.start_step = 10" in report
    Path("job.toml").write_text(sources + stages[0])
    assert check("--training.steps", "3") == ""  # a look at the first steps


def test_rules_and_schema_are_reported_together():
    report = check("--model.n_heads", "3", "--training.seq_len", "9000", "--optimizer.lr", "-1", "--trainin.x", "1")
    assert report.startswith("4 mistakes")
    assert all(name in report for name in ("model.n_heads", "training.seq_len", "optimizer.lr", "--trainin.x"))


def test_a_rule_is_skipped_where_a_key_of_it_is_invalid_already():
    report = check("--training.local_batch_size", "0", "--training.global_batch_size", "7", "--model.dim", "x", ranks=2)
    assert report.startswith("2 mistakes")
    assert "training.global_batch_size" not in report


def test_no_rule_runs_on_the_defaults_of_a_file_that_cannot_be_read():
    Path("job.toml").write_text("[training")
    assert check(ranks=3).startswith("1 mistake")


def test_each_rule_names_keys_that_exist():
    sections = {key.split(".")[0] for key in KEYS}
    assert all(key in KEYS or key in sections for keys, _ in RULES for key in keys)


def test_a_value_is_reported_with_the_place_where_it_was_set():
    Path("job.toml").write_text("[training]\nseq_len = 9000\n[model]\nn_heads = 3\n")
    report = check("--model.vocab_size", "100")
    assert "job.toml: training.seq_len = 9000" in report
    assert "job.toml: model.n_heads = 3" in report
    assert "command line: model.vocab_size = 100" in report


degrees = st.integers(1, 6)


@given(degrees, st.integers(1, 60), degrees, degrees | st.just(-1), st.integers(1, 12))
@settings(deadline=None, max_examples=200)
def test_layout_and_batch_are_accepted_exactly_when_they_divide(
    local: int, wanted: int, replicate: int, shard: int, ranks: int
):
    training = {"local_batch_size": local, "global_batch_size": wanted}
    layout = {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
    job = JobConfig.model_validate({"training": training, "parallelism": layout})
    fits = ranks % replicate == 0 and shard in (-1, ranks // replicate)
    divides = wanted % (local * ranks) == 0
    try:
        report = f"{check_run(job, ranks)}"
    except UserError as error:
        report = str(error)
        assert report.startswith("1 mistake")  # without a layout nothing is known about the batch
    assert report.startswith("Run(") == (fits and divides)


def test_a_wrong_job_of_the_largest_model_is_found_out_in_a_fraction_of_a_second():
    write_tokenizer("llama.model", 128256)
    started = time.perf_counter()
    report = check("--model.flavor", "405b", "--tokenizer.path", "llama.model", "--model.n_heads", "127")
    assert report.startswith("1 mistake")
    assert time.perf_counter() - started < 2.0  # 0.3 s on two idle cores, most of it reading the tokenizer twice


def test_a_checkpoint_of_an_older_version_stays_readable(tmp_path: Path):
    """Whatever its job has of what is gone since."""
    job = JobConfig().model_dump(mode="json")
    job["checkpoint"]["async_mode"] = "process"
    state = {"step": 1, "tokens": 64, "data": {"version": 1}}
    body = {"format": 1, "step": 1, "files": {}, "info": {"job": job, "train_state": state}}
    folder = tmp_path / "checkpoint/step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(encode_manifest(body))
    assert known_job(folder) == JobConfig()

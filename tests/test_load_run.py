"""Rules that span keys, the world size and files on disk, all in one report. What they refuse, row by row, is in
tests/test_wrong_inputs.py."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.checkpoint.find import known_job
from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.checkpoint.step_folders import encode_manifest
from titanlite.config.errors import UserError
from titanlite.config.load import dump_config
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig, Model, Training
from titanlite.load_run import check_run, layout_rules, load_run


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


SOUND = """
--training.local_batch_size 4 --training.global_batch_size 16 @2
--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2 @4
--parallelism.data_parallel_replicate_degree 4 @4
--training.seq_len 8192
--training.seq_len 9000 --model.max_seq_len 9000
--activation_checkpoint.selective_ac_option 6
--activation_checkpoint.mode memory_budget --compile.enable
--float8.precompute_float8_dynamic_scale_for_fsdp --model.ffn_dim 700
--float8.enable --float8.min_features 0 --model.vocab_size 4100
--dataset.source text --dataset.path job.toml
--dataset.source text --dataset.path **/*.toml
--validation.source jsonl --validation.freq 0
--validation.freq 2 --validation.source python_stdlib
--validation.freq 2 --validation.holdout 0.1
--training.steps 5
"""  # the last is a look at the first steps of a longer run, with its own warmup


@pytest.mark.parametrize("line", SOUND.strip().split("\n"))
def test_what_is_allowed_is_not_reported_and_leaves_nothing(line: str):
    words, _, ranks = line.partition(" @")
    assert check(*words.split(), "--job.dump_folder", "a/b", ranks=int(ranks or 1)) == ""
    assert [path.name for path in Path().iterdir()] == ["job.toml"]


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
    assert vocabulary("--model.flavor", "1b") == 128256
    assert "at least 2000" in check("--tokenizer.path", "odd.model", "--model.vocab_size", "1999")


def test_a_job_that_was_saved_without_the_vocabulary_is_resumed_unchanged():
    job = check_run(JobConfig(), 1).job
    before, now = (j.model_dump(mode="json") for j in (job.model_copy(update={"model": Model()}), job))
    assert before["model"] != now["model"]
    assert compare_jobs(before, now) == []


def test_a_job_of_python_is_checked_as_one_of_a_file():
    wrong = JobConfig(training=Training(seq_len=9000), model=Model(n_heads=3))
    with pytest.raises(UserError) as caught:
        check_run(wrong, 1)
    report = re.sub(r"\s+", " ", str(caught.value))
    assert report.startswith("2 mistakes: JobConfig: model.n_heads = 3 must divide model.dim = 256 ")
    assert "JobConfig: training.seq_len = 9000 must be at most model.max_seq_len" in report
    run = check_run(JobConfig(), 1)
    assert (run.arch.vocab_size, run.job.job.dump_folder) == (4096, "outputs/python")


@pytest.mark.parametrize(
    "text",
    [
        '[[dataset.sources]]\nsource = "c4"\n' * 2,
        "[validation]\nfreq = 5\nholdout = 0.1\n",
        "[validation]\nfreq = 0\nholdout = 0.1\n",  # what was held out is still not trained on
        '[validation]\nfreq = 5\nsource = "c4"\n',
    ],
)
def test_a_resolved_job_which_names_every_default_is_as_good_as_its_original(text: str):
    Path("job.toml").write_text(text)
    job = load_run(["--job.config_file", "job.toml"], 1).job
    Path("job.toml").write_text(dump_config(job))
    assert load_run(["--job.config_file", "job.toml"], 1).job == job


def test_each_stage_of_a_mix_must_run():
    stages = [{"start_step": start, "weights": [1]} for start in (5, 5, 10)]
    Path("job.toml").write_text(tomlkit.dumps({"dataset": {"sources": [{"source": "c4"}], "stages": stages}}))
    assert re.findall(r"stages\.\d\.start_step = \d+", check()) == ["stages.1.start_step = 5"]
    Path("job.toml").write_text(Path("job.toml").read_text() + "[training]\nsteps = 10\n")
    assert re.findall(r"stages\.\d", check()) == ["stages.1", "stages.2"]
    assert re.findall(r"stages\.\d", check("--training.steps", "3")) == ["stages.1"]  # a look at the first steps


def test_rules_and_schema_are_reported_together_with_the_place_where_a_value_was_set():
    Path("job.toml").write_text("[training]\nseq_len = 9000\n[model]\nn_heads = 3\n")
    report = check("--model.vocab_size", "100", "--optimizer.lr", "-1", "--trainin.x", "1")
    assert report.startswith("5 mistakes")
    for name in ("job.toml: model.n_heads", "job.toml: training.seq_len", "command line: model.vocab_size"):
        assert name in report
    assert "command line: optimizer.lr" in report
    assert "command line: --trainin.x" in report


def test_a_rule_is_skipped_where_a_value_that_it_reads_is_wrong_already():
    report = check("--training.local_batch_size", "0", "--training.global_batch_size", "7", "--model.dim", "x", ranks=2)
    assert report.startswith("2 mistakes")
    assert "training.global_batch_size" not in report
    Path("job.toml").write_text("[training")
    assert "job.toml is not valid TOML" in check(ranks=3)


some = st.integers(1, 4)


@given(some, some, some, some, some | st.just(-1), st.integers(1, 64), st.integers(1, 6), st.integers(1, 60))
@settings(deadline=None, max_examples=300)
def test_layout_and_batch_are_accepted_exactly_when_they_divide(
    pp: int, replicate: int, cp: int, tp: int, shard: int, world: int, local: int, wanted: int
):
    names = ("pipeline_parallel", "data_parallel_replicate", "context_parallel", "tensor_parallel")
    layout = dict(zip([f"{name}_degree" for name in names], (pp, replicate, cp, tp), strict=True))
    training = {"local_batch_size": local, "global_batch_size": wanted}
    job = {"training": training, "parallelism": layout | {"data_parallel_shard_degree": shard}}
    run, fixed = Run(JobConfig.model_validate(job), world), pp * replicate * cp * tp
    found = dict(layout_rules(run))
    fits = world % fixed == 0 if shard == -1 else fixed * shard == world
    assert any("the world has" in text for text in found.values()) != fits
    assert not fits or run.degrees.world == world
    if fits and pp == 1:
        assert ("training.global_batch_size" in found) == (wanted % (local * world // (cp * tp)) != 0)


def problems(sections: dict[str, Any], world: int) -> dict[str, str]:
    return dict(layout_rules(Run(JobConfig.model_validate(sections), world)))


PP2 = {"pipeline_parallel_degree": 2}
INTERLEAVED = PP2 | {"pipeline_parallel_schedule": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("key", "layout", "training", "world", "nearest"),
    [
        ("training.seq_len", {"context_parallel_degree": 2}, {"seq_len": 510}, 2, [508, 512]),
        ("training.global_batch_size", PP2, {}, 2, [16]),
        ("training.global_batch_size", {}, {"global_batch_size": 12}, 1, [8, 16]),
        ("training.global_batch_size", INTERLEAVED, {"global_batch_size": 40}, 2, [32, 48]),
        ("parallelism.pipeline_parallel_degree", {"pipeline_parallel_degree": 7}, {"global_batch_size": 56}, 7, [6]),
    ],
)
def test_the_nearest_that_is_named_works(
    key: str, layout: dict[str, Any], training: dict[str, Any], world: int, nearest: list[int]
):
    sections = {"parallelism": layout, "training": training}
    found = problems(sections, world)[key].partition("Nearest: ")[2]
    assert [int(n) for n in re.findall(r"\d+", found)] == nearest
    section, name = key.split(".")
    for value in nearest:
        changed = sections | {section: sections[section] | {name: value}}
        assert key not in problems(changed, value if section == "parallelism" else world)


@pytest.mark.parametrize(("schedule", "float8"), [("ZBVZeroBubble", False), ("InterleavedZeroBubble", True)])
def test_what_an_older_torch_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, schedule: str, float8: bool):
    job = {
        "parallelism": PP2 | {"pipeline_parallel_schedule": schedule},
        "training": {"global_batch_size": 32},
        "float8": {"enable": float8},
        "activation_checkpoint": {"mode": "none"},
    }
    for torch, refused in (("2.11.0+cu130", ["parallelism.pipeline_parallel_schedule"]), ("2.13.0", [])):
        monkeypatch.setattr("titanlite.load_run.version", lambda _name, torch=torch: torch)
        assert list(problems(job, 2)) == refused


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

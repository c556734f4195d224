"""A job file of torchtitan's becomes one of ours: nothing of it is lost without a word."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli
from from_torchtitan.jobs import BEFORE_01, JOBS, OF_01, OF_02, SCHEMA_KEYS, changed

from titanlite import cli
from titanlite.config.errors import UserError
from titanlite.config.flavors import architecture
from titanlite.config.load import JOB_FILES, PACKAGE, load_job
from titanlite.config.schema import KEYS, JobConfig
from titanlite.load_run import load_run
from titanlite.torchtitan import tables
from titanlite.torchtitan.migrate import migrate


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def new_keys(text: str) -> dict[str, Any]:
    tables_of_it = tomli.loads(migrate(text, "old.toml").text)
    return {f"{section}.{key}": value for section, table in tables_of_it.items() for key, value in table.items()}


def test_each_key_of_torchtitan_is_in_one_table_and_each_of_ours_exists():
    groups = [set(tables.EQUIVALENT), set(tables.CONVERTED), set(tables.WITHOUT)]
    assert set(SCHEMA_KEYS) <= tables.ALL
    assert sum(map(len, groups)) == len(tables.ALL)
    assert {*tables.EQUIVALENT.values(), *tables.DEFAULTS} <= KEYS.keys()


@pytest.mark.parametrize("name", JOBS)
def test_the_job_files_of_torchtitan_pass_the_check_once_the_tokenizer_is_there(name: str):
    result = migrate(JOBS[name], "old.toml")
    Path("new.toml").write_text(result.text)
    tokenizer = Path(tomli.loads(result.text)["tokenizer"]["path"])
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_bytes((PACKAGE / "assets/tokenizer" / f"tokenizer{tokenizer.suffix}").read_bytes())
    run = load_run(["--job.config_file", "new.toml"], 1 if "8b" in name or "debug" in name else 8)
    large = "405b" in name or "70b" in name
    assert run.job.float8.enable is run.job.compile.enable is large
    assert run.job.dataset.document_mask is ("varlen" in name)
    assert run.arch.rope_scaling_factor == (8.0 if name.startswith("0.2") else 1.0)
    assert run.arch.rope_theta == 500000.0
    assert result.version == ("0.2" if name.startswith("0.2") else "0.1")


@pytest.mark.parametrize("name", JOBS)
def test_each_key_is_carried_over_or_named(name: str):
    result = migrate(JOBS[name], "old.toml")
    old = tomli.loads(JOBS[name])
    keys = {f"{section}.{key}" for section, table in old.items() if section != "quantize" for key in table}
    keys |= {f"quantize.linear.float8.{k}" for k in old.get("quantize", {}).get("linear", {}).get("float8", {})}
    named = {*result.renamed, *(key for keys in result.lost.values() for key in keys)}
    named |= {key.partition(" = ")[0] for key in result.added}
    assert keys - named <= new_keys(JOBS[name]).keys()


def test_comments_and_numbers_stay_as_they_were_written():
    assert migrate(OF_02, "old.toml").text == EXPECTED


EXPECTED = """\
# NOTE: this toml config is a preset for 64 A100 GPUs.

[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[model]
flavor = "8b"

[tokenizer]
# weights and tokenizer
path = "./assets/hf/Llama-3.1-8B/tokenizer.json"

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0  # grad norm clipping
steps = 1000

[dataset]
source = "c4"

[optimizer]
# converters = ["quantize.linear.float8"]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200  # lr scheduler warm up

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = "op"  # a number n: every nth layer

[compile]
enable = false
components = ["model", "loss"]

[float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"  # ["disabled", "async", "async_with_pinned_mem"]

[metrics]
log_freq = 10
enable_tensorboard = true

[profiling]
enable_profiling = true
profile_freq = 100
"""


@pytest.mark.parametrize("flavor", tables.TORCHTITAN_FLAVORS)
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_a_flavor_is_the_same_model(flavor: str, version: tables.Version):
    result = migrate(f"[model]\nflavor = '{flavor}'\n[training]\nseq_len = 16384", "old.toml", version)
    found = asdict(architecture(JobConfig.model_validate(tomli.loads(result.text)).model))
    wanted = asdict(tables.TORCHTITAN_FLAVORS[flavor]) | {"rope_scaling_factor": 8.0 if version == "0.2" else 1.0}
    assert found.pop("max_seq_len") >= 16384
    assert {key: value for key, value in found.items() if wanted[key] != value} in ({}, {"vocab_size": 4096})


VALUES: list[tuple[str, dict[str, Any]]] = [  # keys of torchtitan's, and those of ours that they become
    (
        "",
        {
            "optimizer.lr": 8e-4,
            "activation_checkpoint.selective_ac_option": "2",
            "checkpoint.enable": False,
            "metrics.enable_tensorboard": False,
            "lr_scheduler.warmup_steps": 200,
            "model.n_heads": 16,
        },
    ),
    ('[model]\nconverters = ["float8"]', {"float8.enable": True, "float8.min_features": 0}),
    ("[training]\ncompile = true", {"compile.enable": True}),
    ("[debug]\nseed = 5\ndeterministic = true", {"training.seed": 5, "training.deterministic": True}),
    ("[training.dataloader]\nnum_workers = 4\nprefetch_factor = 3", {"dataset.num_workers": 4, "dataset.prefetch": 3}),
    ("[lr_scheduler]\nlr_min = 0.1", {"lr_scheduler.min_lr_factor": 0.1}),
    ("[training]\nsteps = 50", {"training.steps": 50, "lr_scheduler.warmup_steps": 50}),
    ("[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 9", {"lr_scheduler.warmup_steps": 5}),
    (
        "[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 9\ntotal_steps = 1000",
        {"lr_scheduler.warmup_steps": 9, "lr_scheduler.total_steps": 1000, "training.steps": 5},
    ),
    ("[checkpoint]\nenable = true", {"checkpoint.enable": True, "checkpoint.last_save_model_only": True}),
    ("[activation_checkpoint]\nselective_ac_option = 3", {"activation_checkpoint.selective_ac_option": "3"}),
    ('[float8]\nfilter_fqns = "attention.wk,output"', {"float8.filter_fqns": ["attention.wk", "output"]}),
    (
        '[model]\nconverters = ["float8"]\n[float8]\nfilter_fqns = ["auto_filter_small_kn"]',
        {"float8.filter_fqns": [], "float8.min_features": 1024},
    ),
    ('[model]\ntokenizer_path = "a/tokenizer.model"', {"tokenizer.path": "a/tokenizer.model"}),
    ('[training]\ndataset = "mine"\ndataset_path = "a/b"', {"dataset.source": "huggingface", "dataset.path": "a/b"}),
    (
        '[training]\ndataset = "c4"\ndataset_path = "a/c4"',
        {"dataset.path": "a/c4", "dataset.config": "en", "dataset.streaming": True},
    ),
    (
        "[validation]\nenable = true\nsteps = 4\nlocal_batch_size = 2\nfreq = 7",
        {"validation.source": "c4", "validation.split": "validation", "validation.freq": 7, "validation.sequences": 8},
    ),
    (
        '[checkpoint]\nenable = true\ninitial_load_in_hf = true\n[model]\nhf_assets_path = "a"',
        {"checkpoint.initial_load_path": "a", "checkpoint.initial_load_in_hf": True},
    ),
    (
        '[parallelism]\nmodule_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]',
        {"parallelism.pipeline_parallel_split_points": ["layers.1"]},
    ),
    (
        "[parallelism]\npipeline_parallel_degree = 2\ndata_parallel_shard_degree = 4\n[training]\nlocal_batch_size = 8",
        {"training.local_batch_size": 1, "training.global_batch_size": 32},
    ),
    ("training = { steps = 500 }", {"training.steps": 500}),
    ("[training]\r\nsteps = 500\r\n", {"training.steps": 500}),
    (
        BEFORE_01,
        {
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.enable_async_tensor_parallel": True,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
            "parallelism.pipeline_parallel_split_points": ["layers.40"],
            "training.local_batch_size": 2,
            "training.global_batch_size": 16,
            "float8.enable": True,
            "float8.min_features": 0,
            "lr_scheduler.warmup_steps": 200,
        },
    ),
]


@pytest.mark.parametrize(("text", "keys"), VALUES, ids=[text.replace("\n", " ")[:60] for text, _ in VALUES])
def test_a_value_becomes(text: str, keys: dict[str, Any]):
    found = new_keys(text)
    assert {key: found.get(key) for key in keys} == keys


LOST = [  # what cannot be carried over, and words of the reason
    ('[checkpoint]\ninitial_load_path = "a/step-5"', "titanlite import --torchtitan"),
    ("[checkpoint]\nload_step = 5", "checkpoint of torchtitan's run"),
    ('[model]\nconverters = ["mx"]', "no such conversion"),
    ('[model]\nconverters = ["float8"]', "because its logits are computed in chunks"),
    ("[training]\nfooled = 1", "no key of torchtitan 0.1 or 0.2"),
    ("[parallelism]\npipeline_parallel_degree = 2", "training.global_batch_size to 8 times their number"),
    ("[validation]\nenable = true", "validation.sequences"),
    ('[training]\ndataset = "c4_test"', "python_stdlib"),
    ('[optimizer]\nname = "Adam"', "With optimizer.weight_decay = 0"),
    ('[parallelism]\npipeline_parallel_schedule = "DualPipeV"', "ZBVZeroBubble"),
    ('[quantize.linear.float8]\nrecipe_name = "blockwise"', "'tensorwise', 'rowwise'"),
]


@pytest.mark.parametrize(("text", "reason"), LOST)
def test_what_has_no_equivalent_is_named_with_the_reason(text: str, reason: str):
    result = migrate(text, "old.toml")
    assert any(reason in found for found in result.lost), result.lost
    JobConfig.model_validate(tomli.loads(result.text))


REFUSED = [
    ('[model]\nname = "flux"', "Llamas only"),
    ("[encoder]\nt5_encoder = 'x'", "encoder.t5_encoder"),
    ("steps = 5", "steps is not torchtitan's"),
    ('[tokenizer]\npath = "x"', "a job file of titanlite's already"),
    ('[model]\nflavor = "13B"', 'model.flavor = "13B"'),
    ("[model]\nflavor = 8", "model.flavor = 8"),
    ("[model]\nname = [1]", "model.name = [1]"),
    ("[model]\nhf_assets_path = 5", "model.hf_assets_path"),
    ("[model]\nconverters = 5", "a list of texts"),
    ('[training]\nsteps = "many"', 'training.steps = "many"'),
    ("[training]\nsteps = true", "training.steps = true"),
    ("[training]\nseq_len = [5]", "training.seq_len = [5]"),
    ("[training]\ndataset = 5", "training.dataset = 5"),
    ('[training]\ndataset = "mine"', "Add dataset_path"),
    ("[parallelism]\nmodule_fqns_per_model_part = [[1], [2]]", "names of modules"),
    ("[parallelism]\npipeline_parallel_degree = 'x'", 'degree = "x"'),
    ("[parallelism]\npipeline_parallel_degree = {}", "pipeline_parallel_degree = {}"),
    ("[training]\nseed = 1\n[debug]\nseed = 2", "training.seed and debug.seed"),
    ("[[training]]\nsteps = 1", "[[training]]"),
    ("steps : 5", "not valid TOML"),
    ("[training]\nsteps = " + "[" * 2000 + "]" * 2000, "not valid TOML"),
    ("[training]\nsteps = " + "9" * 5000, "not valid TOML"),
    ("[training]\nsteps = 1 # \u202e", "control characters"),
    ("[validation]\nenable = true\nfreq = 'x'", 'validation.freq = "x"'),
    ("[activation_checkpoint]\nmode = 2024-01-01", "activation_checkpoint.mode"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text.replace("\n", " ")[:60] for text, _ in REFUSED])
def test_what_is_no_llama_job_of_torchtitans_is_refused_in_words(text: str, words: str):
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        migrate(text, "old.toml")
    assert "old.toml" in str(refused.value)


def test_the_command_writes_a_whole_file_or_prints_it(capsys: pytest.CaptureFixture[str]):
    new = migrate(OF_02, "old.toml").text
    Path("old.toml").write_text(OF_02)
    assert cli.main(["migrate", "old.toml", "--out", "made/new.toml"]) == 0
    assert Path("made/new.toml").read_text() == new
    assert os.listdir("made") == ["new.toml"]
    assert "  model.hf_assets_path -> tokenizer.path\n" in capsys.readouterr().out
    assert cli.main(["migrate", "old.toml"]) == 0
    out, report = capsys.readouterr()
    assert out == new
    assert "Left out:" in report
    assert cli.main(["migrate", "old.toml", "--torchtitan-version", "0.1"]) == 0
    assert "rope_scaling_factor = 1.0" in capsys.readouterr().out
    assert cli.main(["migrate", "old.toml", "--out", "old.toml"]) == 2
    assert Path("old.toml").read_text() == OF_02
    assert cli.main(["migrate", "old.toml", "--out", "old.toml", "--overwrite"]) == 0
    assert Path("old.toml").read_text() == new


@pytest.mark.parametrize("text", [OF_01, OF_02, BEFORE_01, '[model]\nflavor = "8B"'])
def test_a_job_file_of_torchtitans_is_recognised(text: str):
    Path("old.toml").write_text(text)
    with pytest.raises(UserError, match="`titanlite migrate"):
        load_job(["--job.config_file", "old.toml", "--training.steps", "0"])


def test_our_own_job_files_are_not_taken_for_torchtitans():
    migrated = Path("new.toml")
    migrated.write_text(migrate(changed(OF_02, enable="true"), "old.toml").text)
    for path in (migrated, *JOB_FILES.glob("*.toml")):
        with pytest.raises(UserError) as refused:
            load_job(["--job.config_file", str(path), "--training.steps", "0"])
        assert "titanlite migrate" not in str(refused.value)

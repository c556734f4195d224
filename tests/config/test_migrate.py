"""A job file of torchtitan's becomes one of ours: nothing of it is lost without a word."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli
from config.torchtitan_jobs import JOBS, OF_01, OF_02, SCHEMA_KEYS, changed

from titanlite.config import torchtitan
from titanlite.config.errors import UserError
from titanlite.config.flavors import architecture
from titanlite.config.keys import KEYS
from titanlite.config.load import PACKAGE
from titanlite.config.migrate import Migration, migrate
from titanlite.config.schema import JobConfig
from titanlite.load_run import load_run


def new(text: str) -> dict[str, dict[str, object]]:
    return tomli.loads(migrate(text, "old.toml").text)


def test_each_key_of_torchtitan_is_in_one_table_and_each_of_ours_exists():
    equivalent, converted, without = set(torchtitan.EQUIVALENT), set(torchtitan.CONVERTED), set(torchtitan.WITHOUT)
    assert set(SCHEMA_KEYS) <= torchtitan.ALL
    assert len(equivalent) + len(converted) + len(without) == len(torchtitan.ALL)
    assert set(torchtitan.EQUIVALENT.values()) | set(torchtitan.DEFAULTS) <= KEYS.keys()
    assert not without & KEYS.keys() - {"job.config_file"}, "titanlite has such a key: carry it over"
    assert torchtitan.ALL - set(SCHEMA_KEYS) == {  # of files that are older than 0.1.0
        "training.batch_size",
        "training.warmup_steps",
        "checkpoint.interval_type",
        "checkpoint.model_weights_only",
    }


@pytest.mark.parametrize("name", JOBS)
def test_the_job_files_of_torchtitan_pass_the_check_once_the_tokenizer_is_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = migrate(JOBS[name], "old.toml")
    Path("new.toml").write_text(result.text)
    tokenizer = Path(tomli.loads(result.text)["tokenizer"]["path"])
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_bytes((PACKAGE / "assets/tokenizer" / f"tokenizer{tokenizer.suffix}").read_bytes())
    ranks = 8 if "405b" in name or "70b" in name else 1
    run = load_run(["--job.config_file", "new.toml"], ranks)
    assert run.job.training.local_batch_size == int(re.search(r"local_batch_size = (\d+)", JOBS[name])[1])  # type: ignore[index]
    assert run.job.float8.enable is run.job.compile.enable is ("405b" in name)
    assert run.job.dataset.document_mask is ("varlen" in name)
    assert run.arch.rope_scaling_factor == (8.0 if name.startswith("0.2") else 1.0)
    assert run.arch.rope_theta == 500000.0
    assert (run.arch.n_heads, run.arch.ffn_dim) == {
        "8b": (32, 14336),
        "70b": (64, 28672),
        "405b": (128, 53248),
        "debug": (16, 768),
    }[name.split()[1].split("_")[0]]


@pytest.mark.parametrize("name", JOBS)
def test_each_key_is_carried_over_or_named(name):
    result = migrate(JOBS[name], "old.toml")
    old = tomli.loads(JOBS[name])
    keys = {f"{s}.{k}" for s, table in old.items() if s != "quantize" for k in table}
    keys |= {f"quantize.linear.float8.{k}" for k in old.get("quantize", {}).get("linear", {}).get("float8", {})}
    ours = {f"{s}.{k}" for s, table in tomli.loads(result.text).items() for k in table}
    named = {*result.renamed, *(key for keys in result.lost.values() for key in keys)}
    assert keys - named <= ours
    assert len(ours) == result.carried + len(result.added) + len(result.renamed) + unnamed(result)


def unnamed(result: Migration) -> int:
    """Keys of a source of data beside the one that has torchtitan's name."""
    return sum(text in result.text for text in ('source = "python_stdlib"',))


def test_comments_and_numbers_stay_as_they_were_written():
    result = migrate(OF_02, "old.toml")
    assert result.text == EXPECTED
    assert "lr = 3e-4" in result.text
    assert result.lost["It was commented out."] == ["# model.converters"]


EXPECTED = """\
# NOTE: this toml config is a preset for 64 A100 GPUs.

[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true

[model]
flavor = "8b"

[tokenizer]
# weights and tokenizer
path = "./assets/hf/Llama-3.1-8B/tokenizer.json"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200  # lr scheduler warm up

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0  # grad norm clipping
steps = 1000

[dataset]
source = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"  # ["disabled", "async", "async_with_pinned_mem"]

[compile]
enable = false
components = ["model", "loss"]

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = "op"  # a number n: every nth layer

[float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
"""


def test_a_file_without_keys_keeps_torchtitans_defaults():
    result = migrate("[model]\nname = 'llama3'\n", "old.toml")
    job = JobConfig.model_validate(tomli.loads(result.text))
    assert job.optimizer.lr == 8e-4
    assert job.activation_checkpoint.selective_ac_option == "2"
    assert not job.checkpoint.enable
    assert not job.metrics.enable_tensorboard
    assert job.lr_scheduler.warmup_steps == 200
    assert architecture(job.model).n_heads == 16
    assert "optimizer.lr = 8e-4" in result.added


@pytest.mark.parametrize("flavor", torchtitan.TORCHTITAN_FLAVORS)
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_a_flavor_is_the_same_model(flavor, version):
    result = migrate(f"[model]\nflavor = '{flavor}'\n[training]\nseq_len = 16384", "old.toml", version)
    found = asdict(architecture(JobConfig.model_validate(tomli.loads(result.text)).model))
    wanted = asdict(torchtitan.TORCHTITAN_FLAVORS[flavor]) | torchtitan.rotary_scaling(version)
    assert {k: v for k, v in found.items() if k not in ("vocab_size", "max_seq_len")} == {
        k: v for k, v in wanted.items() if k not in ("vocab_size", "max_seq_len")
    }
    assert found["max_seq_len"] >= 16384


def test_the_version_is_known_from_the_keys():
    assert migrate(OF_01, "old.toml").version == "0.1"
    assert migrate(OF_02, "old.toml").version == "0.2"
    assert migrate(OF_02, "old.toml", "0.1").version == "0.1"
    assert "rope_scaling_factor = 1.0" in migrate(OF_02, "old.toml", "0.1").text


VALUES = [  # keys of torchtitan's, and those of ours that they become
    ('[model]\nconverters = ["float8"]', {"float8.enable": True, "float8.min_features": 0}),
    ("[training]\ncompile = true", {"compile.enable": True}),
    ("[training]\nseed = 5", {"training.seed": 5}),
    ("[debug]\nseed = 5\ndeterministic = true", {"training.seed": 5, "training.deterministic": True}),
    ("[training.dataloader]\nnum_workers = 4\nprefetch_factor = 3", {"dataset.num_workers": 4, "dataset.prefetch": 3}),
    ("[lr_scheduler]\nlr_min = 0.1", {"lr_scheduler.min_lr_factor": 0.1}),
    ("[training]\nsteps = 50", {"training.steps": 50, "lr_scheduler.warmup_steps": 50}),
    ("[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 9", {"lr_scheduler.warmup_steps": 5}),
    ("[checkpoint]\nenable_checkpoint = true", {"checkpoint.enable": True}),
    ("[checkpoint]\nenable = true", {"checkpoint.last_save_model_only": True}),
    ("[activation_checkpoint]\nselective_ac_option = 3", {"activation_checkpoint.selective_ac_option": "3"}),
    ('[float8]\nfilter_fqns = "attention.wk,output"', {"float8.filter_fqns": ["attention.wk", "output"]}),
    ('[float8]\nfilter_fqns = ["auto_filter_small_kn"]', {"float8.filter_fqns": [], "float8.min_features": 1024}),
    ('[model]\ntokenizer_path = "a/tokenizer.model"', {"tokenizer.path": "a/tokenizer.model"}),
    ('[model]\nhf_assets_path = "a/"', {"tokenizer.path": "a/tokenizer.json"}),
    ('[training]\ndataset = "c4"', {"dataset.source": "c4"}),
    (
        '[training]\ndataset = "mine"\ndataset_path = "a/b"',
        {"dataset.source": "huggingface", "dataset.path": "a/b"},
    ),
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
    ("[training]\nbatch_size = 3", {"training.local_batch_size": 3}),
    ("training.steps = 500", {"training.steps": 500}),
    ("training = { steps = 500 }", {"training.steps": 500}),
    ("\ufeff[training]\r\nsteps = 500\r\n".removeprefix("\ufeff"), {"training.steps": 500}),
    ('[job]\ndescription = "\\u007f\\u009b"', {"job.description": "\x7f\x9b"}),
]


@pytest.mark.parametrize(("text", "keys"), VALUES, ids=[text.replace("\n", " ")[:60] for text, _ in VALUES])
def test_a_value_becomes(text, keys):
    found = {f"{s}.{k}": value for s, table in new(text).items() for k, value in table.items()}
    assert {key: found.get(key) for key in keys} == keys


LOST = [  # what cannot be carried over, and words of the reason
    ('[checkpoint]\ninitial_load_path = "a/step-5"', "titanlite import --torchtitan"),
    ("[checkpoint]\nload_step = 5", "checkpoint of torchtitan's run"),
    ("[metrics]\nsave_for_all_ranks = true", "One rank writes the metrics"),
    ("[memory_estimation]\nenabled = true", "cannot fit"),
    ("[fault_tolerance]\nenable = true", "starts again by itself"),
    ('[model]\nconverters = ["mx"]', "no such conversion"),
    ("[training]\nfooled = 1", "no key of torchtitan 0.1 or 0.2"),
    ("[parallelism]\npipeline_parallel_degree = 2", "training.global_batch_size to 8 times their number"),
    ("[validation]\nenable = true", "validation.sequences"),
    ('[training]\ndataset = "c4_test"', "python_stdlib"),
    (
        '[optimizer]\nname = "Adam"',
        'titanlite has "AdamW" only. Left out, it is "AdamW". With optimizer.weight_decay = 0',
    ),
    ('[parallelism]\npipeline_parallel_schedule = "DualPipeV"', '"GPipe" or "Interleaved1F1B"'),
    ('[quantize.linear.float8]\nrecipe_name = "blockwise"', '"tensorwise" or "rowwise"'),
]


@pytest.mark.parametrize(("text", "reason"), LOST)
def test_what_has_no_equivalent_is_named_with_the_reason(text, reason):
    assert any(reason in found for found in migrate(text, "old.toml").lost), migrate(text, "old.toml").lost


def test_a_name_of_something_that_titanlite_lacks_is_named_and_the_rest_is_carried_over():
    result = migrate('[optimizer]\nname = "Adam"  # as before\nlr = 1e-3', "old.toml")
    assert [keys for reason, keys in result.lost.items() if "AdamW" in reason] == [['optimizer.name = "Adam"']]
    assert tomli.loads(result.text)["optimizer"] == {"lr": 1e-3}


REFUSED = [
    ('[model]\nname = "flux"', "Llamas only"),
    ('[model]\nname = "deepseek_v3"\nflavor = "16B"', "deepseek_v3"),
    ("[encoder]\nt5_encoder = 'x'", "[encoder] is for Flux"),
    ("[hf_transformers]\nmodel = 'x'", "transformers experiment"),
    ("[xyzzy]\na = 1", "[xyzzy] is not torchtitan's"),
    ("steps = 5", "steps = 5 is not torchtitan's"),
    ('[tokenizer]\npath = "x"', "[tokenizer] is a section of titanlite's"),
    ('[model]\nflavor = "13B"', 'model.flavor = "13B"'),
    ("[model]\nflavor = 8", "model.flavor = 8"),
    ("[model]\nname = [1]", "model.name = [1]"),
    ("[model]\nhf_assets_path = 5", "a text is expected"),
    ("[model]\nconverters = 5", "a list of texts"),
    ('[training]\nsteps = "many"', 'training.steps = "many"'),
    ("[training]\nseq_len = [5]", "training.seq_len = [5]"),
    ("[training]\ndataset = 5", "training.dataset = 5"),
    ('[training]\ndataset = "mine"', "Add dataset_path"),
    ("[training]\ndataset = 5\ndataset_path = 5", "dataset.path = 5"),
    ("[parallelism]\nmodule_fqns_per_model_part = [1, 2]", "names of modules"),
    ("[parallelism]\npipeline_parallel_degree = 'x'\n[training]\nlocal_batch_size = 'y'", 'degree = "x"'),
    ("[training]\nseed = 1\n[debug]\nseed = 2", "training.seed and debug.seed"),
    ("[[training]]\nsteps = 1", "training = "),
    ("[training]\nsteps = true", "training.steps = true"),
    ("[parallelism]\npipeline_parallel_degree = {}", "pipeline_parallel_degree = {}"),
    ("[[checkpoint.folder]]\na = 1", "[[checkpoint.folder]]"),
    ("[[training.dataset]]\na = 1", "[[training.dataset]]"),
    ("steps : 5", "not valid TOML"),
    ("[training]\nsteps = " + "[" * 2000 + "]" * 2000, "not valid TOML"),
    ("[training]\nsteps = " + "9" * 5000, "not valid TOML"),
    ("[training]\nsteps = 1 # \x9b2J", "line 2 has control characters"),
    ("[training]\nsteps = 1 # \u202e", "line 2 has control characters"),
    ("[validation]\nenable = true\nfreq = 'x'", 'validation.freq = "x"'),
    ("[activation_checkpoint]\nmode = 2024-01-01", "activation_checkpoint.mode"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text.replace("\n", " ")[:60] for text, _ in REFUSED])
def test_what_is_no_llama_job_of_torchtitans_is_refused_in_words(text, words):
    with pytest.raises(UserError) as refused:
        migrate(text, "old.toml")
    assert words in str(refused.value)
    assert "old.toml" in str(refused.value)


def test_a_job_file_with_torchtitans_keys_is_recognised():
    assert torchtitan.looks_like_torchtitan(tomli.loads(OF_01))
    assert torchtitan.looks_like_torchtitan(tomli.loads(OF_02))
    assert torchtitan.looks_like_torchtitan({"model": {"flavor": "8B"}})
    assert torchtitan.looks_like_torchtitan({"quantize": {"linear": {}}})
    for path in (PACKAGE / "train_configs").glob("*.toml"):
        assert not torchtitan.looks_like_torchtitan(tomli.loads(path.read_text()))
    assert not torchtitan.looks_like_torchtitan({"training": {"stepz": 1}, "model": {"flavor": []}, "x": 5})
    migrated = tomli.loads(migrate(changed(OF_02, enable="true"), "old.toml").text)
    assert not torchtitan.looks_like_torchtitan(migrated)

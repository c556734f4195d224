"""Job files of torchtitan are migrated, and keys without an equivalent are reported."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli
from small_runs import job_tables

from titanlite import cli
from titanlite.config.errors import UserError
from titanlite.config.job_diff import flatten
from titanlite.config.load import JOB_FILES, PACKAGE, load_job
from titanlite.config.mistakes import describe_unknown_name
from titanlite.config.run import build_architecture
from titanlite.config.schema import JobConfig, list_keys
from titanlite.load_run import load_run
from titanlite.torchtitan import tables
from titanlite.torchtitan.migrate import Migration

OF_02 = """\
# NOTE: this toml config is a preset for 64 A100 GPUs.
job.description = "Llama 3 8B training"
profiling.enable_profiling = true
profiling.save_traces_folder = "profile_trace"
model.name = "llama3"
model.flavor = "8B"
model.hf_assets_path = "./assets/hf/Llama-3.1-8B"  # weights and tokenizer
optimizer.lr = 3e-4
lr_scheduler.warmup_steps = 200
training.seq_len = 8192
training.dataset = "c4"
parallelism.data_parallel_shard_degree = -1
checkpoint.enable = false
checkpoint.last_save_model_only = true
checkpoint.async_mode = "disabled"
compile.enable = false
activation_checkpoint.selective_ac_option = "op"
quantize.linear.float8.filter_fqns = ["output"]
validation.enable = false
validation.steps = 1200
"""
EXPECTED = """\
job.description = "Llama 3 8B training"
model.flavor = "8b"
tokenizer.path = "./assets/hf/Llama-3.1-8B/tokenizer.json"
training.seq_len = 8192
dataset.source = "c4"
optimizer.lr = 0.0003
lr_scheduler.warmup_steps = 200
parallelism.data_parallel_shard_degree = -1
activation_checkpoint.selective_ac_option = "op"
compile.enable = false
float8.filter_fqns = ["output"]
checkpoint.enable = false
checkpoint.last_save_model_only = true
checkpoint.async_mode = "disabled"
metrics.enable_tensorboard = false
profiling.enable_profiling = true
"""
OF_01 = """\
job.print_args = false
model.name = "llama3"
model.flavor = "405B"
model.tokenizer_path = "./tests/assets/test_tiktoken.model"
model.converters = "float8"
lr_scheduler.lr_min = 0.0
training.compile = true
training.dataset = "c4"
parallelism.tensor_parallel_degree = 8
checkpoint.enable_checkpoint = false
checkpoint.last_save_model_weights_only = false
activation_checkpoint.selective_ac_option = '2'
"""
BEFORE_01 = """\
metrics.enable_color_printing = true
model.name = "llama3"
model.flavor = "70B"
model.norm_type = "rmsnorm"
model.tokenizer_path = "./torchtitan/datasets/tokenizer/original/tokenizer.model"
optimizer.fused = true
training.batch_size = 8
training.warmup_steps = 200
training.steps = 1000
training.data_parallel_shard_degree = 2
training.tensor_parallel_degree = 2
training.compile = true
training.dataset = "c4"
experimental.pipeline_parallel_degree = 2
experimental.pipeline_parallel_split_points = "layers.40"
experimental.pipeline_parallel_schedule = "interleaved_1f1b"
experimental.pipeline_parallel_microbatches = 4
experimental.enable_async_tensor_parallel = true
checkpoint.interval_type = "steps"
checkpoint.model_weights_only = false
float8.enable_float8_linear = true
"""
JOBS = {
    "0.2": OF_02,
    "0.2 varlen": OF_02.replace('"8B"', '"8B_varlen"'),
    "0.1": OF_01,
    "0.1 before": BEFORE_01,
}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def migrate(
    text: str,
    version: tables.Version | None = None,
) -> tuple[Migration, dict[str, Any]]:
    """Migrate a job file, validate the new one, and return the migration and the new keys."""
    result = Migration(text.encode(), version)
    content = tomli.loads(result.text)
    JobConfig.model_validate(content)
    return result, flatten(content)


def run(command: str, code: int = 0) -> None:
    assert cli.main(command.split()) == code


def test_each_key_of_torchtitan_is_in_one_table_and_an_error_names_its_equivalent():
    for theirs, ours in tables.EQUIVALENT.items():
        if theirs not in list_keys():
            assert ours in describe_unknown_name(JobConfig, theirs).problem, theirs
    keys = [*tables.EQUIVALENT, *tables.CONVERTED, *tables.WITHOUT_EQUIVALENT]

    assert len(keys) == len({*keys})
    assert {*tables.EQUIVALENT.values(), *tables.DEFAULTS} <= list_keys().keys()


@pytest.mark.parametrize("name", JOBS)
def test_job_files_of_torchtitan_pass_the_check_and_each_key_is_carried_over_or_named(name):
    result, new = migrate(JOBS[name])
    old = flatten(tomli.loads(JOBS[name])).keys()
    added = {key.partition(" = ")[0] for key in result.added}
    lost = set().union(*result.lost.values())

    assert old - {*result.renamed, *lost} - added <= new.keys()

    Path("new.toml").write_text(result.text)
    tokenizer = Path(new["tokenizer.path"])
    tokenizer.parent.mkdir(parents=True)
    shutil.copy(PACKAGE / "assets/tokenizer" / f"tokenizer{tokenizer.suffix}", tokenizer)
    run = load_run(["--job.config_file", "new.toml"], 1 if name.startswith("0.2") else 8)

    assert run.job.float8.enable is run.job.compile.enable is name.startswith("0.1")
    assert run.job.dataset.document_mask is ("varlen" in name)

    expected = (8.0, "0.2") if name.startswith("0.2") else (1.0, "0.1")
    assert (run.arch.rope_scaling_factor, result.version) == expected


FLAVORS = []
for model, flavors in tables.TORCHTITAN_FLAVORS.items():
    FLAVORS += [(model, flavor) for flavor in flavors]


@pytest.mark.parametrize(("model", "flavor"), FLAVORS)
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_a_flavor_is_the_same_model(model, flavor, version):
    text = f"[model]\nname = '{model}'\nflavor = '{flavor}'\n[training]\nseq_len = 16384"
    result, _ = migrate(text, version)
    job = JobConfig.model_validate(tomli.loads(result.text))
    arch = asdict(build_architecture(job.model))
    expected = asdict(tables.TORCHTITAN_FLAVORS[model][flavor])
    expected["rope_scaling_factor"] = 8.0 if (model, version) == ("llama3", "0.2") else 1.0

    assert arch.pop("max_seq_len") >= 16384

    different = {key: value for key, value in arch.items() if expected[key] != value}
    assert different in ({}, {"vocab_size": 4096})


# torchtitan 0.3.0 wrote the file, with the command in docs/reference/from_torchtitan.md and the
# options --validator.enable --debug.seed 7 --parallelism.tensor_parallel_degree 2
# activation-checkpoint:full.
RESOLVED = Path(__file__).with_name("llama3_debugmodel_0.3.json")
OF_RESOLVED = """\
model.flavor = "debugmodel"
model.ffn_dim = 768
model.rope_scaling_factor = 8.0
tokenizer.path = "./tests/assets/tokenizer/tokenizer.json"
training.seed = 7
dataset.document_mask = true
validation.freq = 5
optimizer.lr = 8e-4
optimizer.beta2 = 0.95
lr_scheduler.decay_ratio = 0.8
parallelism.tensor_parallel_degree = 2
activation_checkpoint.mode = "full"
"""


def test_a_resolved_config_of_03_is_migrated():
    result, converted = migrate(RESOLVED.read_text())
    expected = flatten(tomli.loads(OF_RESOLVED))
    assert {key: converted.get(key) for key in expected} == expected
    assert result.renamed["hf_assets_path"] == "tokenizer.path"


PYTHON_CONFIG = """
from torchtitan.trainer import Trainer

def llama3_8b():
    return Trainer.Config()
""".lstrip()
OTHER_FORMATS = {'{"model_type": "llama"}': "is JSON", PYTHON_CONFIG: "is Python"}


@pytest.mark.parametrize(
    ("content", "named"),
    OTHER_FORMATS.items(),
    ids=OTHER_FORMATS.values(),
)
def test_files_of_other_formats_are_recognized(content, named, capsys):
    Path("file").write_text(content)
    for command in ("migrate file", "check --job.config_file file"):
        run(command, code=2)
        output = capsys.readouterr().err
        assert named in output
        assert "line 1" not in output


def test_a_job_file_with_python_in_a_string_is_reported_by_its_invalid_line(capsys):
    Path("file").write_text('[samples]\nprompts = ["""\ndef fib(n):\n"""]\nfreq = \n')

    run("check --job.config_file file", code=2)

    assert "line 5" in capsys.readouterr().err


# Each block has torchtitan keys, followed by the resulting titanlite keys. titanlite rejects some
# keys without the keys that they need.
CONVERSIONS = """
=> optimizer.lr = 8e-4 ; checkpoint.enable = false ; lr_scheduler.warmup_steps = 200 \
; model.n_heads = 16 ; activation_checkpoint.selective_ac_option = '2' \
; metrics.enable_tensorboard = false

model.converters = ['float8']
=> float8.enable = true ; float8.min_features = 0

model.converters = ['mx'] ; mx.filter_fqns = ['output', 'wk']
=> float8.enable = true ; float8.recipe_name = 'mxfp8' ; float8.min_features = 0 \
; float8.filter_fqns = ['output', 'wk']

model.converters = ['quantize.linear.mx'] ; quantize.linear.mx.filter_fqns = 'wk'
=> float8.enable = true ; float8.recipe_name = 'mxfp8' ; float8.min_features = 0 \
; float8.filter_fqns = ['wk']

training.dataloader = { num_workers = 4, prefetch_factor = 3 }
=> dataset.num_workers = 4 ; dataset.prefetch = 3

lr_scheduler.lr_min = 0.1
=> lr_scheduler.min_lr_factor = 0.1

training.steps = 50
=> training.steps = 50 ; lr_scheduler.warmup_steps = 50

training.steps = 5 ; lr_scheduler.warmup_steps = 9
=> lr_scheduler.warmup_steps = 5

training.steps = 5 ; lr_scheduler.warmup_steps = 9 ; lr_scheduler.total_steps = 1000
=> training.steps = 5 ; lr_scheduler.warmup_steps = 9 ; lr_scheduler.total_steps = 1000

checkpoint.enable = true
=> checkpoint.enable = true ; checkpoint.last_save_model_only = true

activation_checkpoint.selective_ac_option = 3
=> activation_checkpoint.selective_ac_option = '3'

float8.filter_fqns = 'attention.wk,output'
=> float8.filter_fqns = ['attention.wk', 'output']

model.converters = ['float8'] ; float8.filter_fqns = ['auto_filter_small_kn']
=> float8.filter_fqns = [] ; float8.min_features = 1024

training.dataset = 'mine' ; training.dataset_path = 'a'
=> dataset.source = 'huggingface' ; dataset.path = 'a'

training.dataset = 'c4' ; training.dataset_path = 'a'
=> dataset.config = 'en' ; dataset.streaming = true

validation.enable = true ; validation.freq = 7
=> validation.source = 'c4' ; validation.split = 'validation' ; validation.freq = 7

compile.components = ['model']
=> compile.enable = false

compile.enable = true ; compile.components = []
=> compile.enable = false

float8.recipe_name = 'rowwise'
=> float8.enable = false

checkpoint.enable = true ; checkpoint.initial_load_in_hf = true ; model.hf_assets_path = 'a'
=> checkpoint.initial_load_path = 'a' ; checkpoint.initial_load_in_hf = true

checkpoint.enable = false ; checkpoint.initial_load_in_hf = true ; model.hf_assets_path = 'a'
=> checkpoint.enable = false

parallelism.module_fqns_per_model_part = \
[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
=> parallelism.pipeline_parallel_split_points = ['layers.1']

parallelism.pipeline_parallel_degree = 2 ; parallelism.data_parallel_shard_degree = 4
=> training.local_batch_size = 1 ; training.global_batch_size = 32
"""
CONVERTED_DEBUG = "training.seed = 5 ; training.deterministic = true"
FROM_BEFORE_01 = """\
parallelism.data_parallel_shard_degree = 2
parallelism.tensor_parallel_degree = 2
parallelism.enable_async_tensor_parallel = true
parallelism.pipeline_parallel_degree = 2
parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
parallelism.pipeline_parallel_split_points = ["layers.40"]
training.local_batch_size = 2
training.global_batch_size = 16
lr_scheduler.warmup_steps = 200
float8.enable = true
float8.min_features = 0
"""


def split_rows(
    table: str,
    separator: str = "\n",
) -> list[tuple[str, str]]:
    """Return the texts before and after " => " in each row of a table."""
    pairs = []
    for row in table.strip().split(separator):
        left, _, right = row.rpartition("=> ")
        pairs.append((left.strip(), right))
    return pairs


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *split_rows(CONVERSIONS, "\n\n"),
        ("[debug]\r\nseed = 5\r\ndeterministic = true", CONVERTED_DEBUG),
        (BEFORE_01, FROM_BEFORE_01),
    ],
    ids=lambda text: text[:60],
)
def test_keys_of_torchtitan_are_converted(theirs, ours):
    _, converted = migrate(theirs.replace(" ; ", "\n"))
    expected = flatten(job_tables(ours))
    assert {key: converted.get(key) for key in expected} == expected


# Options without an equivalent, and text in the reported reason.
LOST = """
checkpoint.initial_load_path = "a/step-5" => titanlite import --torchtitan
checkpoint.load_step = 5 => titanlite run resumes from
model.converters = ["quantize.grouped_mm.mx"] => only float8.enable
mx.recipe_name = "mxfp8_emulated" => float8.emulate
model.converters = ["float8"] => because its logits are computed in chunks
training.steps = 5 ; training.fooled = 1 => no key of torchtitan 0.1 to 0.3
training.steps = 5 ; optimizer.wd = 0.1 => Did you mean optimizer.weight_decay?
parallelism.pipeline_parallel_degree = 2 => training.global_batch_size to 8 times
validation.enable = true => validation.sequences
training.dataset = "c4_test" => python_stdlib
"""


@pytest.mark.parametrize(("text", "reason"), split_rows(LOST))
def test_an_option_without_an_equivalent_is_reported_with_the_reason(text, reason):
    lost = migrate(text.replace(" ; ", "\n"))[0].lost
    assert any(reason in line for line in lost), lost


def test_the_command_writes_a_whole_file_or_prints_it(capsys):
    old = Path("old.toml")
    new = Path("made/new.toml")
    old.write_text("[training]\ndataset_path = 'data'\n[checkpoint]\ninitial_load_path = ''")

    run("migrate old.toml")

    # The report contains each key of the old file and no other key.
    report = capsys.readouterr().err
    assert "training.dataset ->" not in report
    assert "checkpoint.initial_load_path" in report

    old.write_text(OF_02)
    run("migrate old.toml --out made/new.toml")

    assert tomli.loads(new.read_text()) == tomli.loads(EXPECTED)
    assert os.listdir("made") == ["new.toml"]
    assert "  model.hf_assets_path -> tokenizer.path\n" in capsys.readouterr().out
    run("migrate old.toml --torchtitan-version 0.1")

    out, report = capsys.readouterr()
    assert tomli.loads(out) == tomli.loads(f"{EXPECTED}model.rope_scaling_factor = 1.0")
    assert "Left out:" in report

    run("migrate old.toml --out old.toml", code=2)
    assert old.read_text() == OF_02

    run("migrate old.toml --out old.toml --overwrite")
    assert old.read_text() == new.read_text()


def test_only_job_files_of_torchtitan_are_recognized_as_such():
    Path("new.toml").write_text(EXPECTED)
    for number, text in enumerate((OF_01, OF_02, BEFORE_01)):
        Path(f"{number}.toml").write_text(text)
    for path in (*Path().glob("*.toml"), *JOB_FILES.glob("*.toml")):
        with pytest.raises(UserError) as error:
            load_job(["--job.config_file", str(path), "--training.steps", "0"])
        assert ("titanlite migrate" in str(error.value)) == path.stem.isdecimal()

"""Values that follow from a job and its ranks, keys that are read, and text that is escaped."""

import ast
import dataclasses
import errno
import subprocess
import sys
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import pytest
import tomli
import torch
from small_runs import job_tables

from titanlite.config import schema
from titanlite.config.errors import CheckpointError, UserError, printable
from titanlite.config.files import write_output
from titanlite.config.flavors import FLAVORS
from titanlite.config.run import Degrees, Run, build_architecture
from titanlite.config.schema import JobConfig, Model
from titanlite.model.llama import Llama
from titanlite.observe.flops import num_params

# All numbers except the last two were published.
PARAMETERS = tomli.loads("""
1b = 1_235_814_400
3b = 3_212_749_824
8b = 8_030_261_248
70b = 70_553_706_496
405b = 405_853_388_800
llama2-7b = 6_738_415_616
mistral-7b = 7_248_023_552
mistral-nemo = 12_247_782_400
smollm2-135m = 134_515_008
smollm2-360m = 361_821_120
"smollm2-1.7b" = 1_711_376_384
"qwen2.5-0.5b" = 494_032_768
"qwen2.5-1.5b" = 1_543_714_304
"qwen2.5-7b" = 7_615_616_512
"qwen3-0.6b" = 596_049_920
"qwen3-1.7b" = 1_720_574_976
qwen3-4b = 4_022_468_096
qwen3-8b = 8_190_735_360
olmo2-1b = 1_484_916_736
olmo2-7b = 7_298_617_344
olmo3-7b = 7_298_011_136
olmo3-32b = 32_233_522_176
smollm3-3b = 3_075_098_624
debugmodel = 6_229_248
150m = 150_917_760
""")
ARCHITECTURE = job_tables(
    "dim = 96 ; n_layers = 3 ; n_heads = 6 ; n_kv_heads = 3 ; ffn_dim = 100 ; vocab_size = 77 ; "
    "max_seq_len = 33 ; norm_eps = 1e-6 ; rope_theta = 123.0 ; rope_scaling_factor = 2.0 ; "
    "tied_embeddings = true ; rope_low_freq_factor = 1.5 ; rope_high_freq_factor = 5.0 ; "
    "rope_original_max_seq_len = 16 ; rope_scaling = 'yarn' ; rope_beta_fast = 31.0 ; "
    "rope_beta_slow = 2.0 ; rope_attention_factor = 1.1 ; "
    "head_dim = 24 ; qkv_bias = true ; qk_norm = 'head' ; "
    "norm_placement = 'after' ; sliding_window = 7 ; full_attention_interval = 4 ; "
    "no_rope_interval = 3 ; logit_softcap = 9.0 ; mup_base_dim = 48 ; mup_base_head_dim = 12 ; "
    "architecture = 'llama'"
)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_flavor_has_exactly_its_number_of_parameters(flavor):
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[flavor]
    assert num_params(FLAVORS[flavor]) == PARAMETERS[flavor]


def test_a_job_overrides_each_number_of_a_flavor():
    overridden = build_architecture(Model.model_validate({"flavor": "8b", **ARCHITECTURE}))
    assert dataclasses.asdict(overridden) == ARCHITECTURE


def test_the_width_of_a_head_follows_the_number_of_heads_unless_the_flavor_sets_it():
    assert build_architecture(Model(flavor="8b", n_heads=8)).head_dim == 512
    assert build_architecture(Model(flavor="mistral-nemo", n_heads=8)).head_dim == 128


HSDP = "parallelism.tensor_parallel_degree = 2 ; parallelism.data_parallel_replicate_degree = 2"
HSDP_DEGREES = Degrees(pipeline=1, replicate=2, shard=4, context=1, tensor=2)
PIPELINE = "parallelism.pipeline_parallel_degree = 2"
SPLIT = f"{PIPELINE} ; parallelism.pipeline_parallel_split_points = ['layers.5']"
BF16_STATE = "training.dtype = 'bfloat16' ; optimizer.state_dtype = 'float32'"


@pytest.mark.parametrize(
    ("ranks", "job", "name", "value"),
    [
        (16, HSDP, "degrees", HSDP_DEGREES),
        (8, "training.local_batch_size = 3", "global_batch_size", 24),
        (8, HSDP, "global_batch_size", 32),
        (8, "training.local_batch_size = 3 ; training.global_batch_size = 48", "microbatches", 2),
        (1, "", "stages", [range(6)]),
        (2, PIPELINE, "stages", [range(3), range(3, 6)]),
        (2, SPLIT, "stages", [range(5), range(5, 6)]),
        (1, "training.seed = 7", "data_seed", 7),
        (1, "training.seed = 7 ; dataset.seed = 1", "data_seed", 1),
        (1, "training.seed = 7 ; dataset.seed = 1", "validation_seed", 7),
        (1, "dataset.seed = 1 ; validation.holdout = 0.1", "validation_seed", 1),
        (1, "dataset.seed = 1 ; validation.seed = 0", "validation_seed", 0),
        (1, "training.dtype = 'bfloat16'", "state_dtype", "bfloat16"),
        (1, BF16_STATE, "state_dtype", "float32"),
        (
            1,
            "job.dump_folder = 'out' ; checkpoint.folder = 'a'",
            "checkpoint_folder",
            Path("out/a"),
        ),
    ],
)
def test_values_that_follow_from_a_job_and_its_ranks(ranks, job, name, value):
    assert getattr(Run(JobConfig.model_validate(job_tables(job)), ranks), name) == value


@pytest.mark.parametrize(
    ("flavor", "degree", "schedule", "blocks"),
    [
        # The first and the last stage have one block less, as in the Llama 3 paper.
        ("405b", 8, "Interleaved1F1B", [7] + [8] * 14 + [7]),
        ("70b", 4, "1F1B", [20, 20, 21, 19]),
        # Stages of 17 and 15 blocks are faster, but take more memory on rank 0.
        ("8b", 2, "1F1B", [16, 16]),
        # Rank 0 keeps the most microbatches in flight.
        ("8b", 4, "1F1B", [8, 9, 9, 6]),
    ],
)
def test_stages_balance_time_within_the_memory_of_an_even_split(flavor, degree, schedule, blocks):
    job = job_tables(
        f"model.flavor = '{flavor}' ; training.seq_len = 8192 ; training.local_batch_size = 1 ; "
        f"training.global_batch_size = 64 ; parallelism.pipeline_parallel_degree = {degree} ; "
        f"parallelism.pipeline_parallel_schedule = '{schedule}'"
    )
    run = Run(JobConfig.model_validate(job), 2 * degree)

    assert list(map(len, run.stages)) == blocks


PACKAGE = Path(schema.__file__).parents[1]
# Rules only check keys, so they do not count as a use.
UNREAD = {"config/schema.py", "rules.py", "config/job_diff.py", "torchtitan/migrate.py"}
# This key only decides whether a run may start.
READ_BY_RULES = {"require_certificate"}


def find_read_attributes(code: str) -> set[str]:
    """Return the names of all attributes that a module reads."""
    attributes = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            attributes.add(node.attr)
    return attributes


READ = set[str]()
for path in PACKAGE.rglob("*.py"):
    if path.relative_to(PACKAGE).as_posix() not in UNREAD:
        READ |= find_read_attributes(path.read_text(encoding="utf-8"))
TABLES = [*schema.SECTIONS.values(), schema.DataSource, schema.DataStage, schema.ValidationSource]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_each_key_is_read_somewhere(table):
    assert set(table.model_fields) <= READ | READ_BY_RULES


UNSAFE = {"Cc", "Cs", "Zl", "Zp"}
BIDIRECTIONAL = {"LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_every_control_character_except_line_feed_and_tab_is_escaped():
    for character in set(map(chr, range(0x110000))) - {"\t", "\n"}:
        is_unsafe = unicodedata.category(character) in UNSAFE
        if is_unsafe or unicodedata.bidirectional(character) in BIDIRECTIONAL:
            shown = printable(character)
            assert shown.isascii(), hex(ord(character))
            assert shown.isprintable(), hex(ord(character))
    assert str(CheckpointError("\x1b[2J\u202e")) == r"\x1b[2J\u202e"


@pytest.mark.parametrize(
    "text", ["Zürich, 東京, שלום, \U0001f469\u200d\U0001f680, a\tb\nc", r"\x1b[2J"]
)
def test_printable_text_is_not_changed(text):
    assert printable(text) == text


WRITE_OFTEN = """
import sys, time
from pathlib import Path
from titanlite.config.files import write_output

folder = Path(sys.argv[1])
(folder / f"ready {sys.argv[2]}").touch()
while len(list(folder.glob("ready *"))) < 2:
    time.sleep(0.001)
for _ in range(300):
    write_output(folder / "out" / "out.txt", b"text")
"""


def test_several_processes_can_write_the_same_output_file(tmp_path):
    command = [sys.executable, "-c", WRITE_OFTEN, str(tmp_path)]
    processes = [subprocess.Popen([*command, name]) for name in ("0", "1")]

    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["out.txt"]
    assert (tmp_path / "out" / "out.txt").read_bytes() == b"text"


def test_a_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(errno.ENOSPC, "full")))

    with pytest.raises(UserError, match="full"):
        write_output(tmp_path / "out.txt", b"text")

    assert list(tmp_path.iterdir()) == []

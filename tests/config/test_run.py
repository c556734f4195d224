"""What a job means for a world of ranks: architecture, degrees, stages, batches and seeds.

Each key of it is read, and no text in it commands a terminal.
"""

import ast
import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.config import schema
from titanlite.config.errors import CheckpointError, printable
from titanlite.config.flavors import FLAVORS
from titanlite.config.run import Degrees, Run, build_architecture
from titanlite.config.schema import JobConfig, Model
from titanlite.model.llama import Llama

PARAMETERS = {  # those of all but the last two are published
    **{
        "1b": 1_235_814_400,
        "3b": 3_212_749_824,
        "8b": 8_030_261_248,
        "70b": 70_553_706_496,
        "405b": 405_853_388_800,
    },
    **{"llama2-7b": 6_738_415_616, "mistral-7b": 7_248_023_552, "mistral-nemo": 12_247_782_400},
    **{"smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384},
    **{"qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512},
    **{
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
    },
    **{"olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344, "smollm3-3b": 3_075_098_624},
    **{"debugmodel": 6_229_248, "150m": 150_917_760},
}
ARCHITECTURE = {
    **{"dim": 96, "n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "ffn_dim": 100, "vocab_size": 77},
    **{
        "max_seq_len": 33,
        "norm_eps": 1e-6,
        "rope_theta": 123.0,
        "rope_scaling_factor": 2.0,
        "tied_embeddings": True,
    },
    **{"rope_low_freq_factor": 1.5, "rope_high_freq_factor": 5.0, "rope_original_max_seq_len": 16},
    **{
        "head_dim": 24,
        "qkv_bias": True,
        "qk_norm": "head",
        "norm_placement": "after",
        "sliding_window": 7,
    },
    **{"no_rope_interval": 3, "architecture": "llama"},
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_flavor_has_exactly_its_number_of_parameters(flavor: str):
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[flavor]


def test_a_job_overrides_each_number_of_a_flavor():
    assert (
        dataclasses.asdict(
            build_architecture(Model.model_validate({"flavor": "8b", **ARCHITECTURE}))
        )
        == ARCHITECTURE
    )
    assert build_architecture(Model(flavor="3b", n_layers=2)) == dataclasses.replace(
        FLAVORS["3b"], n_layers=2
    )
    assert [
        build_architecture(Model(flavor=flavor, n_heads=8)).head_dim
        for flavor in ("8b", "mistral-nemo")
    ] == [512, 128]


HSDP = {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}}
BATCH = {
    "training": {"local_batch_size": 3, "global_batch_size": 48},
    "parallelism": {"tensor_parallel_degree": 2},
}
SPLIT = {
    "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ["layers.5"]}
}


@pytest.mark.parametrize(
    ("ranks", "sections", "values"),
    [
        (16, HSDP, {"degrees": Degrees(pipeline=1, replicate=2, shard=4, context=1, tensor=2)}),
        (8, BATCH, {"global_batch_size": 48, "microbatches": 4}),
        (
            8,
            {"parallelism": {"tensor_parallel_degree": 2}},
            {"global_batch_size": 32, "microbatches": 1},
        ),
        (1, {}, {"stages": [range(6)]}),
        (2, {"parallelism": {"pipeline_parallel_degree": 2}}, {"stages": [range(3), range(3, 6)]}),
        (2, SPLIT, {"stages": [range(5), range(5, 6)]}),
        (1, {"training": {"seed": 7}}, {"data_seed": 7, "validation_seed": 7}),
        (
            1,
            {"training": {"seed": 7}, "dataset": {"seed": 1}},
            {"data_seed": 1, "validation_seed": 7},
        ),
        (
            1,
            {"dataset": {"seed": 1}, "validation": {"holdout": 0.1}},
            {"data_seed": 1, "validation_seed": 1},
        ),
        (1, {"dataset": {"seed": 1}, "validation": {"seed": 0}}, {"validation_seed": 0}),
        (1, {"training": {"dtype": "bfloat16"}}, {"state_dtype": "bfloat16"}),
        (
            1,
            {"training": {"dtype": "bfloat16"}, "optimizer": {"state_dtype": "float32"}},
            {"state_dtype": "float32"},
        ),
        (
            1,
            {"job": {"dump_folder": "out"}, "checkpoint": {"folder": "a"}},
            {"checkpoint_folder": Path("out/a")},
        ),
    ],
)
def test_what_follows_from_a_job_and_its_ranks(
    ranks: int, sections: dict[str, Any], values: dict[str, Any]
):
    found = Run(JobConfig.model_validate(sections), ranks)
    assert {name: getattr(found, name) for name in values} == values


@pytest.mark.parametrize(
    ("flavor", "degree", "schedule", "blocks"),
    [
        (
            "405b",
            8,
            "Interleaved1F1B",
            [7] + [8] * 14 + [7],
        ),  # one block less at both ends, as in the Llama 3 paper
        ("70b", 4, "1F1B", [20, 20, 21, 19]),
        ("8b", 2, "1F1B", [16, 16]),  # 17 and 15 are faster, but rank 0 would take more memory
        ("8b", 4, "1F1B", [8, 9, 9, 6]),  # rank 0 keeps the most microbatches in flight
    ],
)
def test_stages_balance_time_within_the_memory_of_an_even_split(flavor, degree, schedule, blocks):
    layout = {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule}
    training = {"seq_len": 8192, "local_batch_size": 1, "global_batch_size": 64}
    sections = {"model": {"flavor": flavor}, "training": training, "parallelism": layout}
    run = Run(JobConfig.model_validate(sections), 2 * degree)
    assert list(map(len, run.stages)) == blocks


PACKAGE = Path(schema.__file__).parents[1]
# Rules do not count: to check a key is not to use it.
UNREAD = {"config/schema.py", "rules.py", "checkpoint/job_diff.py", "torchtitan/migrate.py"}
READ_BY_RULES = {"require_certificate"}  # it only decides whether a run may start
READ = {
    node.attr
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).as_posix() not in UNREAD
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
}
TABLES = [*schema.SECTIONS.values(), schema.DataSource, schema.DataStage, schema.ValidationSource]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_each_key_is_read_somewhere(table: type[schema.Section]):
    assert set(table.model_fields) <= READ | READ_BY_RULES


def test_every_control_character_is_escaped_but_line_feed_and_tab():
    unsafe, bidirectional = (
        ("Cc", "Cs", "Zl", "Zp"),
        {"LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"},
    )
    for character in map(chr, range(0x110000)):
        if (
            unicodedata.category(character) in unsafe
            or unicodedata.bidirectional(character) in bidirectional
        ):
            shown = printable(character)
            plain = (
                shown == character
                if character in "\t\n"
                else shown.isascii() and shown.isprintable()
            )
            assert plain, hex(ord(character))
    assert str(CheckpointError("\x1b[2J\u202e")) == r"\x1b[2J\u202e"
    for text in (
        "Zürich, 東京, שלום, \U0001f469\u200d\U0001f680, a\tb\nc",
        r"C:\x1b",
        r"\x1b[2J\u202e",
    ):
        assert printable(text) == text

"""The layouts that are compared with one process, and their tolerances.

`benchmarks/equivalence.sh` measures all rows. tests/distributed/test_equivalence.py proves them.
"""

from collections.abc import Iterable
from importlib.metadata import version
from typing import NamedTuple

import tomli
import torch
from ranks import run_ranks
from train_variants import Options, Results, merge, train_variants

# No degree divides the vocabulary of 97 tokens. At this learning rate, ten steps of Adam roughly
# halve the loss.
MODEL = {"n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 97}
TRAINING = {"steps": 10, "local_batch_size": 8}
LEARNING_RATE = 1e-3


class Numbers(NamedTuple):
    """Largest relative differences of loss and gradient norm, and of final weights in updates.

    One update is the learning rate, about the largest change of a weight in one Adam step.
    """

    loss: float
    norm: float
    mean_weight: float
    largest_weight: float


IDENTICAL = Numbers(0, 0, 0, 0)
# fp32 sums in another order differ by 1e-7. Adam divides a gradient by its own size, so if it is
# nearly zero, rounding can change its sign and a whole update. Measured: at most 0.015 updates, and
# 1e-5 in the mean.
EXACT = Numbers(5e-6, 2e-5, 1e-4, 0.1)
# The norm of many elements differs by up to two of fp32's last bits. Adding them up one after the
# other differed by 3e-7 to 8e-7.
LARGE_SUMS = Numbers(1e-6, 2e-7, 1e-4, 0.1)
# bf16 has 8 bits of mantissa, e4m3 has 4. Each product rounds differently where a tensor is split,
# and ten steps add up.
BF16 = Numbers(1e-4, 1e-3, 0.1, 20.0)
FP8 = Numbers(1e-4, 1e-3, 1.0, 20.0)
# Norms after the blocks magnify the differences. One process differs from fp32 by 4e-3 and 0.12.
FP8_AFTER = Numbers(1e-2, 0.3, 1.0, 20.0)
# bf16 weights are rounded with the same random bits in every layout, and computed in fp32. A sum in
# another order rounds one weight in thousands the other way, by its last bit (7.8 updates for a
# weight of 1).
ROUNDED = Numbers(5e-6, 2e-5, 1e-3, 10.0)


class Row(NamedTuple):
    """One job on a number of ranks, compared with the row `reference` on one process."""

    name: str
    ranks: int
    overrides: Options
    reference: str = "one process"
    tolerance: Numbers = EXACT


def options(*lines: str) -> Options:
    """Parse options, written as in a job file."""
    return tomli.loads("\n".join(lines))


def layout(
    pp: int = 1,
    replicate: int = 1,
    cp: int = 1,
    tp: int = 1,
    schedule: str = "1F1B",
    batch: int | None = None,
) -> Options:
    """Return the options of a layout. The remaining ranks shard the model.

    Args:
        batch: Local batch size.
    """
    degrees = {"pipeline": pp, "context": cp, "tensor": tp}
    keys = {f"{name}_parallel_degree": degree for name, degree in degrees.items()}
    keys |= {"data_parallel_replicate_degree": replicate, "pipeline_parallel_schedule": schedule}
    sections = {"parallelism": keys}
    if batch is not None:
        sections["training"] = {"local_batch_size": batch}
    return sections


ONE_PROCESS = layout(batch=8)
SCHEDULES = [
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
]
PIPELINES: dict[str, tuple[int, Options]] = {}
for schedule in SCHEDULES:
    PIPELINES[f"pp2 {schedule}"] = 2, layout(pp=2, schedule=schedule, batch=1)
LAYOUTS: dict[str, tuple[int, Options]] = {  # ranks and overrides
    "fsdp2": (2, layout(batch=4)),
    "replicate2": (2, layout(replicate=2, batch=4)),
    "tp2": (2, layout(tp=2)),
    "cp2": (2, layout(cp=2)),
    **PIPELINES,
    "fsdp4": (4, layout(batch=2)),
    "hsdp 2x2": (4, layout(replicate=2, batch=2)),
    "tp4": (4, layout(tp=4)),
    "cp4": (4, layout(cp=4)),
    "fsdp2 x tp2": (4, layout(tp=2, batch=4)),
    "fsdp2 x cp2": (4, layout(cp=2, batch=4)),
    "cp2 x tp2": (4, layout(cp=2, tp=2)),
    "pp2 x fsdp2": (4, layout(pp=2, batch=1)),
    "pp2 x tp2": (4, layout(pp=2, tp=2, batch=1)),
    "pp2 x cp2": (4, layout(pp=2, cp=2, batch=1)),
    "pp2 ZBVZeroBubble x fsdp2": (4, layout(pp=2, schedule="ZBVZeroBubble", batch=1)),
    "pp2 x fsdp2 x tp2": (8, layout(pp=2, tp=2, batch=1)),
    "fsdp2 x cp2 x tp2": (8, layout(cp=2, tp=2, batch=4)),
    "pp2 x hsdp 2x2": (8, layout(pp=2, replicate=2, batch=1)),
    "pp2 x cp2 x tp2": (8, layout(pp=2, cp=2, tp=2, batch=1)),
}
TORCH_VERSION = tuple(map(int, version("torch").split(".")[:2]))
if TORCH_VERSION < (2, 13):  # load_run rejects ZBV there
    LAYOUTS = {name: row for name, row in LAYOUTS.items() if "ZBV" not in name}

DOCUMENTS = {"documents": True}
VARLEN = DOCUMENTS | options("model.attention_backend = 'varlen'")
TIED = options("model.tied_embeddings = true")
LARGE = options("model.vocab_size = 32_000")
"""4 million gradients. Adding their squares one after the other would lose precision."""
MUP = options("model.mup_base_dim = 16", "model.mup_base_head_dim = 2")
BASE_OF_MUP = options("model.mup_base_dim = 64", "model.mup_base_head_dim = 8")
WINDOWS = options(
    "model.sliding_window = 12", "model.full_attention_interval = 2", "model.logit_softcap = 0.5"
)
SWITCHES = {  # features of other model families
    "switches": options(
        "model.head_dim = 16",
        "model.qkv_bias = true",
        "model.qk_norm = 'head'",
        "model.sliding_window = 12",
    ),
    "OLMo 2": options(
        "model.qk_norm = 'projection'",
        "model.norm_placement = 'after'",
        "model.no_rope_interval = 2",
    ),
}
# These options change when and where tensors are computed, but not the results.
SCHEDULING: dict[str, Options] = {
    "accumulation 2": options("training.local_batch_size = 2"),
    "accumulation 4": options("training.local_batch_size = 1"),
    "accumulation 4, each reduced": options(
        "training.local_batch_size = 1", "parallelism.fsdp_reduce = 'microbatch'"
    ),
    "AC full": options("activation_checkpoint.mode = 'full'"),
    "AC op": options("activation_checkpoint.mode = 'selective'"),
    "AC every 2nd block": options(
        "activation_checkpoint.mode = 'selective'",
        "activation_checkpoint.selective_ac_option = '2'",
    ),
    "CPU offload": options("training.enable_cpu_offload = true"),
    "CPU offload, accumulation 4, each reduced": options(
        "training.enable_cpu_offload = true",
        "training.local_batch_size = 1",
        "parallelism.fsdp_reduce = 'microbatch'",
    ),
    "no memory savers": options("parallelism.memory_savers = 'none'"),
    "all memory savers": options("parallelism.memory_savers = 'all'"),
    "two blocks a group": options("parallelism.fsdp_min_num_params = 60_000"),
    # By default, such a small model is a single FSDP group.
    "one group": options("parallelism.fsdp_min_num_params = 1_000_000"),
    "reshard never": options("parallelism.fsdp_reshard_after_forward = 'never'"),
    "reshard always": options("parallelism.fsdp_reshard_after_forward = 'always'"),
}
FLOAT8 = options("float8.enable = true")
PRECISION: dict[str, tuple[Options, Numbers]] = {
    "bf16": (options("training.mixed_precision_param = 'bfloat16'"), BF16),
    "bf16 weights, stochastic rounding": (
        options("training.dtype = 'bfloat16'", "optimizer.stochastic_rounding = true"),
        ROUNDED,
    ),
    "float8 tensorwise": (FLOAT8, FP8),
    "float8 all-gather": (
        options(
            "float8.enable = true",
            "float8.enable_fsdp_float8_all_gather = true",
            "float8.precompute_float8_dynamic_scale_for_fsdp = true",
        ),
        FP8,
    ),
}
for recipe in ("rowwise", "rowwise_with_gw_hp"):
    recipe_options = options("float8.enable = true", f"float8.recipe_name = '{recipe}'")
    PRECISION[f"float8 {recipe}"] = recipe_options, FP8
# Halves of the key and value heads must be multiples of 32.
MXFP8 = merge(
    FLOAT8,
    options("float8.recipe_name = 'mxfp8'", "float8.emulate = true", "model.dim = 128"),
)
# Models that the layouts train, and that one process trains as their reference.
MODELS = {
    "documents": DOCUMENTS,
    "tied": TIED,
    "vocabulary of 32,000": LARGE,
    "muP": MUP,
    "windows": WINDOWS,
    "float8 mxfp8": MXFP8,
}
COMPILED = options("compile.enable = true", "compile.components = ['model']")
# The table of combinations: feature -> (overrides, row on one process to compare with, tolerance)
FEATURES: dict[str, tuple[Options, str, Numbers]] = {}
for name in ("AC full", "AC op", "CPU offload", "one group"):
    FEATURES[name] = SCHEDULING[name], "one process", EXACT
for name, (overrides, tolerance) in PRECISION.items():
    FEATURES[name] = overrides, name, tolerance
FEATURES["compile"] = COMPILED, "one process", EXACT
for mode in ("AC full", "AC op"):
    overrides = merge(COMPILED, SCHEDULING[mode])
    FEATURES[f"compile, {mode}"] = overrides, "one process", EXACT
FEATURES["compile, float8 tensorwise"] = merge(COMPILED, FLOAT8), "float8 tensorwise", FP8
for mode in ("AC full", "AC op"):
    overrides, tolerance = PRECISION["float8 all-gather"]
    overrides = merge(COMPILED, overrides, SCHEDULING[mode])
    FEATURES[f"compile, float8 all-gather, {mode}"] = overrides, "float8 all-gather", tolerance

COMBINED = ("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 ZBVZeroBubble", "fsdp2 x tp2", "hsdp 2x2")
COMBINED = tuple(name for name in COMBINED if name in LAYOUTS)
REJECTED = {  # by titanlite.load_run
    (name, feature)
    for name in COMBINED
    for feature in FEATURES
    if "ZBV" in name and (feature == "AC op" or "compile" in feature)
}


def row_of(
    layout_name: str,
    suffix: str,
    extra: Options,
    reference: str = "one process",
    tolerance: Numbers = EXACT,
) -> Row:
    """Return the row of a layout with further options. `suffix` names them."""
    ranks, overrides = LAYOUTS[layout_name]
    name = f"{layout_name}, {suffix}"
    return Row(name, ranks, merge(overrides, extra), reference, tolerance)


def combined(layout_name: str, feature: str) -> Row:
    """Return the row of one layout and one feature."""
    return row_of(layout_name, feature, *FEATURES[feature])


def switched_rows() -> list[Row]:
    """Return the rows of other model families."""
    rows: list[Row] = []
    for family, switches in SWITCHES.items():
        float8 = FP8_AFTER if family == "OLMo 2" else FP8
        for suffix, extra, tolerance in (
            ("", {}, EXACT),
            (", documents", DOCUMENTS, EXACT),
            (", float8", FLOAT8, float8),
        ):
            name = f"{family}{suffix}"
            overrides = merge(switches, extra)
            rows.append(Row(name, 1, merge(layout(batch=8), overrides), name))
            for layout_name in ("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 x cp2 x tp2"):
                rows.append(row_of(layout_name, name, overrides, name, tolerance))
            overrides = merge(overrides, COMPILED, SCHEDULING["AC op"])
            rows.append(row_of("tp2", f"{name}, compile, AC op", overrides, name, tolerance))
    return rows


def all_rows() -> list[Row]:
    """Return all rows, each after its reference."""
    rows = one_process_rows()
    rows += [Row(name, ranks, overrides) for name, (ranks, overrides) in LAYOUTS.items()]
    for name, extra in SCHEDULING.items():
        if name not in FEATURES:
            rows.append(row_of("fsdp2", name, extra))
    rows += model_rows()
    rows += varlen_rows()
    rows += switched_rows()
    rows += combined_rows()
    return rows


def one_process_rows() -> list[Row]:
    """Return the rows on one process, which are the references of all others."""
    references = MODELS | {name: overrides for name, (overrides, _) in PRECISION.items()}
    rows = [Row("one process", 1, ONE_PROCESS)]
    for name, extra in references.items():
        rows.append(Row(name, 1, merge(ONE_PROCESS, extra), name))
    for name, extra in SCHEDULING.items():
        rows.append(Row(name, 1, merge(ONE_PROCESS, extra)))
    base_of_mup = merge(ONE_PROCESS, BASE_OF_MUP)
    rows.append(Row("base of muP", 1, base_of_mup, tolerance=IDENTICAL))
    return rows


def model_rows() -> list[Row]:
    """Return the rows of MODELS in several layouts."""
    rows: list[Row] = []
    for reference, tolerance, names in (
        (
            "documents",
            EXACT,
            ("tp2", "cp2", "pp2 1F1B", "pp2 x cp2", "cp2 x tp2", "pp2 x cp2 x tp2"),
        ),
        ("tied", EXACT, ("fsdp2", "fsdp4", "tp2", "cp2", "fsdp2 x tp2")),
        ("windows", EXACT, ("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 x cp2 x tp2")),
        ("vocabulary of 32,000", LARGE_SUMS, ("fsdp2", "tp2", "fsdp4", "pp2 x fsdp2")),
        ("float8 mxfp8", FP8, ("fsdp2", "tp2", "cp2", "pp2 1F1B", "fsdp2 x tp2")),
        ("muP", EXACT, ("fsdp2", "tp2", "cp2", "pp2 Interleaved1F1B", "fsdp2 x tp2")),
    ):
        for name in names:
            rows.append(row_of(name, reference, MODELS[reference], reference, tolerance))
    compiled_mxfp8 = merge(MXFP8, COMPILED, SCHEDULING["AC op"])
    for name in ("fsdp2", "tp2"):
        suffix = "float8 mxfp8, compile, AC op"
        rows.append(row_of(name, suffix, compiled_mxfp8, "float8 mxfp8", FP8))
    return rows


def varlen_rows() -> list[Row]:
    """Return the rows with variable-length attention."""
    varlen_windows = merge(WINDOWS, options("model.attention_backend = 'varlen'"))
    rows = [
        Row("documents, varlen", 1, merge(ONE_PROCESS, VARLEN), "documents"),
        Row("windows, varlen", 1, merge(ONE_PROCESS, varlen_windows), "windows"),
    ]
    for name in ("fsdp2", "tp2", "pp2 1F1B", "pp2 Interleaved1F1B", "pp2 x fsdp2 x tp2"):
        rows.append(row_of(name, "documents, varlen", VARLEN, "documents"))
    compiled_varlen = merge(VARLEN, COMPILED, SCHEDULING["AC op"])
    rows.append(row_of("tp2", "documents, varlen, compile, AC op", compiled_varlen, "documents"))
    return rows


def combined_rows() -> list[Row]:
    """Return the rows of layouts and features, and of compiled models."""
    rows: list[Row] = []
    for name in COMBINED:
        rows += [combined(name, other) for other in FEATURES if (name, other) not in REJECTED]
    rows += [combined(name, "compile") for name in ("pp2 x tp2", "cp2 x tp2", "pp2 x fsdp2 x tp2")]
    rows.append(combined("pp2 x tp2", "compile, float8 all-gather, AC op"))
    memory_budget = options("activation_checkpoint.mode = 'memory_budget'")
    for name, extra, reference in (
        ("tied", TIED, "tied"),
        ("windows", WINDOWS, "windows"),
        ("documents", DOCUMENTS, "documents"),
        ("AC every 2nd block", SCHEDULING["AC every 2nd block"], "one process"),
        ("AC memory budget", memory_budget, "one process"),
    ):
        rows.append(row_of("tp2", f"compile, {name}", merge(extra, COMPILED), reference))
    return rows


class Difference(NamedTuple):
    """Difference from the reference: equality of initial weights, and largest differences."""

    same_start: bool
    numbers: Numbers

    def within(self, tolerance: Numbers) -> bool:
        pairs = zip(self.numbers, tolerance, strict=True)
        return self.same_start and all(number <= limit for number, limit in pairs)


def run(rows: Iterable[Row]) -> dict[str, Results]:
    """Train all rows, and return the results by name.

    Rows on the same number of ranks share processes.
    """
    by_ranks: dict[int, dict[str, Options]] = {}
    for row in rows:
        base = {"model": MODEL, "training": TRAINING, "optimizer": {"lr": LEARNING_RATE}}
        by_ranks.setdefault(row.ranks, {})[row.name] = merge(base, row.overrides)
    results: dict[str, Results] = {}
    for ranks, variants in sorted(by_ranks.items()):
        results |= run_ranks(ranks, train_variants, variants, timeout=1200)[0]
    return results


def compare(result: Results, reference: Results) -> Difference:
    """Measure how far a result is from the result of the reference."""

    def relative(name: str) -> float:
        pairs = zip(result[name], reference[name], strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    weights = result["weights"]
    expected = reference["weights"]
    assert weights.keys() == expected.keys()
    changes = [(weights[name] - expected[name]).flatten() for name in weights]
    updates = torch.cat(changes).abs() / LEARNING_RATE
    numbers = Numbers(
        loss=max(relative("losses"), relative("evaluated")),
        norm=relative("norms"),
        mean_weight=updates.mean().item(),
        largest_weight=updates.max().item(),
    )
    return Difference(result["initial"] == reference["initial"], numbers)

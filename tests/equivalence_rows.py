"""The layouts that are compared with one process, and their tolerances.

`benchmarks/equivalence.sh` compares all rows, and the tests compare a sample.
"""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from ranks import run_ranks
from train_variants import merge, train_variants

# 97 tokens: no degree divides the vocabulary. Adam's rate is such that ten steps halve the loss, or nearly.
MODEL = {"n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 97}
TRAINING = {"steps": 10, "local_batch_size": 8}
RATE = 1e-3


class Numbers(NamedTuple):
    """Largest relative differences of loss and gradient norm, and of final weights in updates.

    One update is the learning rate, about the largest change of a weight in one Adam step.
    """

    loss: float
    norm: float
    mean_weight: float
    largest_weight: float


# fp32 sums in another order differ by 1e-7. Where a gradient is nearly zero, Adam divides it by its
# own size, so that its sign, and with it a whole update, can hang on that rounding. Measured: 0.015
# updates at most, 1e-5 in the mean.
EXACT = Numbers(5e-6, 2e-5, 1e-4, 0.1)
# The norm of many elements: up to two of fp32's last bits. Added up one after the other they made
# 3e-7 to 8e-7 here.
LARGE_SUMS = Numbers(1e-6, 2e-7, 1e-4, 0.1)
# bf16 has 8 bits of mantissa, e4m3 4. Each product rounds differently where a tensor is cut, and
# ten steps add up.
BF16 = Numbers(1e-4, 1e-3, 0.1, 20.0)
FP8 = Numbers(1e-4, 1e-3, 1.0, 20.0)
FP8_AFTER = Numbers(
    1e-2, 0.3, 1.0, 20.0
)  # norms of outputs magnify it; from fp32, one process is 4e-3 and 0.12 away
# Weights of 8 bits whose roundings hang on the same random bits everywhere: what a sum in another
# order turns the other way is one weight in thousands, by its last bit (7.8 updates for a weight of
# 1). fp32 is computed in.
ROUNDED = Numbers(5e-6, 2e-5, 1e-3, 10.0)


class Row(NamedTuple):
    """One job on a number of ranks, compared with the row `reference` on one process."""

    name: str
    ranks: int
    overrides: dict[str, Any]
    reference: str = "one process"
    tolerance: Numbers = EXACT


def layout(
    pp: int = 1, replicate: int = 1, cp: int = 1, tp: int = 1, schedule: str = "1F1B"
) -> dict[str, Any]:
    """Return the options of a layout. The remaining ranks shard the model."""
    degrees = {"pipeline": pp, "context": cp, "tensor": tp}
    keys = {f"{name}_parallel_degree": degree for name, degree in degrees.items()}
    keys |= {"data_parallel_replicate_degree": replicate, "pipeline_parallel_schedule": schedule}
    return {"parallelism": keys}


def local(rows: int) -> dict[str, Any]:
    return {"training": {"local_batch_size": rows}}


SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and overrides
    "fsdp2": (2, merge(layout(), local(4))),
    "replicate2": (2, merge(layout(replicate=2), local(4))),
    "tp2": (2, layout(tp=2)),
    "cp2": (2, layout(cp=2)),
    **{
        f"pp2 {schedule}": (2, merge(layout(pp=2, schedule=schedule), local(1)))
        for schedule in SCHEDULES
    },
    "fsdp4": (4, merge(layout(), local(2))),
    "hsdp 2x2": (4, merge(layout(replicate=2), local(2))),
    "tp4": (4, layout(tp=4)),
    "cp4": (4, layout(cp=4)),
    "fsdp2 x tp2": (4, merge(layout(tp=2), local(4))),
    "fsdp2 x cp2": (4, merge(layout(cp=2), local(4))),
    "cp2 x tp2": (4, layout(cp=2, tp=2)),
    "pp2 x fsdp2": (4, merge(layout(pp=2), local(1))),
    "pp2 x tp2": (4, merge(layout(pp=2, tp=2), local(1))),
    "pp2 x cp2": (4, merge(layout(pp=2, cp=2), local(1))),
    "pp2 ZBVZeroBubble x fsdp2": (4, merge(layout(pp=2, schedule="ZBVZeroBubble"), local(1))),
    "pp2 x fsdp2 x tp2": (8, merge(layout(pp=2, tp=2), local(1))),
    "fsdp2 x cp2 x tp2": (8, merge(layout(cp=2, tp=2), local(4))),
    "pp2 x hsdp 2x2": (8, merge(layout(pp=2, replicate=2), local(1))),
    "pp2 x cp2 x tp2": (8, merge(layout(pp=2, cp=2, tp=2), local(1))),
}
if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):  # refused by titanlite.load_run
    LAYOUTS = {name: row for name, row in LAYOUTS.items() if "ZBV" not in name}
DOCUMENTS = {"documents": True}
TIED = {"model": {"tied_embeddings": True}}
SWITCHES = {
    "switches": {
        "model": {"head_dim": 16, "qkv_bias": True, "qk_norm": "head", "sliding_window": 12}
    },
    "OLMo 2": {
        "model": {"qk_norm": "projection", "norm_placement": "after", "no_rope_interval": 2}
    },
}  # what other families of models have
LARGE = {
    "model": {"vocab_size": 32_000}
}  # 4 million gradients: a sum of squares one after the other goes astray
ONE_GROUP = {
    "parallelism": {"fsdp_min_num_params": 1_000_000}
}  # the default: so small a model is not cut
SCHEDULING: dict[str, dict[str, Any]] = {  # when and where something is computed, not what
    "accumulation 2": local(2),
    "accumulation 4": local(1),
    "accumulation 4, each reduced": {**local(1), "parallelism": {"fsdp_reduce": "microbatch"}},
    "AC full": {"activation_checkpoint": {"mode": "full"}},
    "AC op": {"activation_checkpoint": {"mode": "selective"}},
    "AC every 2nd block": {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}
    },
    "CPU offload": {"training": {"enable_cpu_offload": True}},
    "CPU offload, accumulation 4, each reduced": {
        "training": {"enable_cpu_offload": True, "local_batch_size": 1},
        "parallelism": {"fsdp_reduce": "microbatch"},
    },
    "no memory savers": {"parallelism": {"memory_savers": "none"}},
    "all memory savers": {"parallelism": {"memory_savers": "all"}},
    "two blocks a group": {"parallelism": {"fsdp_min_num_params": 60_000}},
    "one group": ONE_GROUP,
    "reshard never": {"parallelism": {"fsdp_reshard_after_forward": "never"}},
    "reshard always": {"parallelism": {"fsdp_reshard_after_forward": "always"}},
}
ALL_GATHER = {
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
COMPILED = {"enable": True, "components": ["model"]}
BF16_WEIGHTS = {"training": {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}}
PRECISION: dict[str, tuple[dict[str, Any], Numbers]] = {
    "bf16": ({"training": {"mixed_precision_param": "bfloat16"}}, BF16),
    "bf16 weights, stochastic rounding": (BF16_WEIGHTS, ROUNDED),
    "float8 tensorwise": ({"float8": {"enable": True}}, FP8),
    "float8 all-gather": ({"float8": {"enable": True} | ALL_GATHER}, FP8),
    "float8 rowwise": ({"float8": {"enable": True, "recipe_name": "rowwise"}}, FP8),
    "float8 rowwise_with_gw_hp": (
        {"float8": {"enable": True, "recipe_name": "rowwise_with_gw_hp"}},
        FP8,
    ),
}
# The table of combinations: feature -> (overrides, row on one process to compare with, tolerance)
FEATURES: dict[str, tuple[dict[str, Any], str, Numbers]] = {
    "AC full": (SCHEDULING["AC full"], "one process", EXACT),
    "AC op": (SCHEDULING["AC op"], "one process", EXACT),
    "CPU offload": (SCHEDULING["CPU offload"], "one process", EXACT),
    "one group": (ONE_GROUP, "one process", EXACT),
    **{name: (overrides, name, tolerance) for name, (overrides, tolerance) in PRECISION.items()},
    "compile": ({"compile": COMPILED}, "one process", EXACT),
    "compile, AC full": ({"compile": COMPILED, **SCHEDULING["AC full"]}, "one process", EXACT),
    "compile, AC op": ({"compile": COMPILED, **SCHEDULING["AC op"]}, "one process", EXACT),
    "compile, float8 tensorwise": (
        {"compile": COMPILED, "float8": {"enable": True}},
        "float8 tensorwise",
        FP8,
    ),
}
for mode in ("AC full", "AC op"):
    overrides, tolerance = PRECISION["float8 all-gather"]
    overrides = {"compile": COMPILED, **overrides, **SCHEDULING[mode]}
    FEATURES[f"compile, float8 all-gather, {mode}"] = overrides, "float8 all-gather", tolerance
COMBINED = ("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 ZBVZeroBubble", "fsdp2 x tp2", "hsdp 2x2")
COMBINED = tuple(name for name in COMBINED if name in LAYOUTS)
REFUSED = {  # by titanlite.load_run
    (name, feature)
    for name in COMBINED
    for feature in FEATURES
    if "ZBV" in name and (feature == "AC op" or "compile" in feature)
}
MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {  # planted -> layout, and what is planted
    "keys' gradients not reduced": ("cp2", {"plant": "missing_reduction"}),
    "loss not reduced over the vocabulary": ("tp2", {"plant": "local_softmax"}),
    "gradients averaged, not summed": ("fsdp2", {"plant": "averaged_gradients"}),
    "every rank holds the first shard": ("fsdp2", {"plant": "doubled_shard"}),
    "every rank reads the first rows": ("fsdp2", {"plant": "doubled_data"}),
}


def combined(layout_name: str, feature: str) -> Row:
    """Return the row of one layout and one feature."""
    ranks, overrides = LAYOUTS[layout_name]
    extra, reference, tolerance = FEATURES[feature]
    return Row(f"{layout_name}, {feature}", ranks, merge(overrides, extra), reference, tolerance)


def all_rows() -> list[Row]:
    """Return all rows, with the rows on one process first."""
    one = merge(layout(), local(8))
    rows = [Row("one process", 1, one)]
    alone = {"documents": DOCUMENTS, "tied": TIED, "vocabulary of 32,000": LARGE}
    rows += [Row(name, 1, merge(one, more), name) for name, more in alone.items()]
    rows += [
        Row(name, 1, merge(one, overrides), name) for name, (overrides, _) in PRECISION.items()
    ]
    rows += [Row(name, 1, merge(one, overrides)) for name, overrides in SCHEDULING.items()]
    rows += [Row(name, ranks, overrides) for name, (ranks, overrides) in LAYOUTS.items()]
    fsdp2 = LAYOUTS["fsdp2"][1]
    rows += [
        Row(f"fsdp2, {name}", 2, merge(fsdp2, over))
        for name, over in SCHEDULING.items()
        if name not in FEATURES
    ]
    for like, tolerance, names in (
        (
            "documents",
            EXACT,
            ("tp2", "cp2", "pp2 1F1B", "pp2 x cp2", "cp2 x tp2", "pp2 x cp2 x tp2"),
        ),
        ("tied", EXACT, ("fsdp2", "fsdp4", "tp2", "cp2", "fsdp2 x tp2")),
        ("vocabulary of 32,000", LARGE_SUMS, ("fsdp2", "tp2", "fsdp4", "pp2 x fsdp2")),
    ):
        for name in names:
            ranks, overrides = LAYOUTS[name]
            rows.append(
                Row(f"{name}, {like}", ranks, merge(overrides, alone[like]), like, tolerance)
            )
    for family, switches in SWITCHES.items():
        for more, extra, tolerance in (
            ("", {}, EXACT),
            (", documents", DOCUMENTS, EXACT),
            (
                ", float8",
                PRECISION["float8 tensorwise"][0],
                FP8_AFTER if family == "OLMo 2" else FP8,
            ),
        ):
            over, like = merge(switches, extra), f"{family}{more}"
            rows.insert(1, Row(like, 1, merge(one, over), like))
            layouts = {
                name: LAYOUTS[name]
                for name in ("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 x cp2 x tp2")
            }
            rows += [
                Row(f"{n}, {like}", r, merge(o, over), like, tolerance)
                for n, (r, o) in layouts.items()
            ]
            compiled = merge(LAYOUTS["tp2"][1], over, {"compile": COMPILED}, SCHEDULING["AC op"])
            rows.append(Row(f"tp2, {like}, compile, AC op", 2, compiled, like, tolerance))
    rows += [combined(a, b) for a in COMBINED for b in FEATURES if (a, b) not in REFUSED]
    rows += [combined(name, "compile") for name in ("pp2 x tp2", "cp2 x tp2", "pp2 x fsdp2 x tp2")]
    rows.append(combined("pp2 x tp2", "compile, float8 all-gather, AC op"))
    ranks, overrides = LAYOUTS["tp2"]
    for name, more, reference in (
        ("tied", TIED, "tied"),
        ("documents", DOCUMENTS, "documents"),
        ("AC every 2nd block", SCHEDULING["AC every 2nd block"], "one process"),
        ("AC memory budget", {"activation_checkpoint": {"mode": "memory_budget"}}, "one process"),
    ):
        over = merge(overrides, more, {"compile": COMPILED})
        rows.append(Row(f"tp2, compile, {name}", ranks, over, reference))
    return rows


class Difference(NamedTuple):
    """Difference from the reference: equality of initial weights, and largest differences."""

    same_start: bool
    numbers: Numbers

    def within(self, tolerance: Numbers) -> bool:
        return self.same_start and all(a <= b for a, b in zip(self.numbers, tolerance, strict=True))


def run(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Train all rows, and return the results by name.

    Rows on the same number of ranks share processes.
    """
    by_ranks: dict[int, dict[str, Any]] = {}
    for row in rows:
        base = {"model": MODEL, "training": TRAINING, "optimizer": {"lr": RATE}}
        by_ranks.setdefault(row.ranks, {})[row.name] = merge(base, row.overrides)
    results: dict[str, dict[str, Any]] = {}
    for ranks, variants in sorted(by_ranks.items()):
        results |= run_ranks(ranks, train_variants, variants, timeout=1200)[0]
    return results


def compare(result: dict[str, Any], reference: dict[str, Any]) -> Difference:
    def relative(*names: str) -> float:
        pairs = [
            (a, b) for name in names for a, b in zip(result[name], reference[name], strict=True)
        ]
        return max(abs(a - b) / abs(b) for a, b in pairs)

    def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in weights.values()])

    assert result["weights"].keys() == reference["weights"].keys()
    updates = (flat(result["weights"]) - flat(reference["weights"])).abs() / RATE
    numbers = (
        relative("losses", "evaluated"),
        relative("norms"),
        updates.mean().item(),
        updates.max().item(),
    )
    return Difference(result["initial"] == reference["initial"], Numbers(*numbers))

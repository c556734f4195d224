"""Every layout beside one process: what is compared, with which tolerance, and the table of the results.

`benchmarks/equivalence.sh [--write FILE]` runs all rows, prints the table, and exits with 1 if a row
misses; with --write it also replaces the tables in FILE between their markers. The tests run a sample.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from train_variants import train_variants

# 97 tokens: no degree divides the vocabulary. Adam's rate is such that ten steps halve the loss, or nearly.
MODEL = {"n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 97}
TRAINING = {"steps": 10, "local_batch_size": 8}
RATE = 1e-3


@dataclass(frozen=True)
class Tolerance:
    """Largest relative difference of loss and gradient norm at any step, and of the final weights, in updates (an Adam
    step moves a weight by at most about the learning rate)."""

    loss: float
    norm: float
    mean_weight: float
    largest_weight: float


# fp32 sums in another order differ by 1e-7. Where a gradient is nearly zero, Adam divides it by its own size, so that
# its sign, and with it a whole update, can hang on that rounding. Measured: 0.015 updates at most, 1e-5 in the mean.
EXACT = Tolerance(5e-6, 2e-5, 1e-4, 0.1)
# The norm of many elements: up to two of fp32's last bits. Added up one after the other they made 3e-7 to 8e-7 here.
LARGE_SUMS = Tolerance(1e-6, 2e-7, 1e-4, 0.1)
# bf16 has 8 bits of mantissa, e4m3 4. Each product rounds differently where a tensor is cut, and ten steps add up.
BF16 = Tolerance(1e-4, 1e-3, 0.1, 20.0)
FP8 = Tolerance(1e-4, 1e-3, 1.0, 20.0)
# Weights of 8 bits whose roundings hang on the same random bits everywhere: what a sum in another order turns the other
# way is one weight in thousands, by its last bit (7.8 updates for a weight of 1). fp32 is computed in.
ROUNDED = Tolerance(5e-6, 2e-5, 1e-3, 10.0)


@dataclass(frozen=True)
class Row:
    """One variant on a number of ranks; `reference` is a row on one process."""

    name: str
    ranks: int
    overrides: dict[str, Any] = field(default_factory=dict)
    reference: str = "one process"
    tolerance: Tolerance = EXACT


def layout(pp: int = 1, replicate: int = 1, cp: int = 1, tp: int = 1, schedule: str = "1F1B") -> dict[str, Any]:
    """Overrides that lay out the ranks; what is left shards."""
    return {
        "parallelism": {
            "pipeline_parallel_degree": pp,
            "data_parallel_replicate_degree": replicate,
            "context_parallel_degree": cp,
            "tensor_parallel_degree": tp,
            "pipeline_parallel_schedule": schedule,
        }
    }


def merged(*tables: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            result[key] = {**result.get(key, {}), **value} if isinstance(value, dict) else value
    return result


def local(rows: int) -> dict[str, Any]:
    return {"training": {"local_batch_size": rows}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and overrides
    "fsdp2": (2, merged(layout(), local(4))),
    "replicate2": (2, merged(layout(replicate=2), local(4))),
    "tp2": (2, layout(tp=2)),
    "cp2": (2, layout(cp=2)),
    "pp2 1F1B": (2, merged(layout(pp=2), local(1))),
    "pp2 GPipe": (2, merged(layout(pp=2, schedule="GPipe"), local(1))),
    "pp2 Interleaved1F1B": (2, merged(layout(pp=2, schedule="Interleaved1F1B"), local(1))),
    "pp2 LoopedBFS": (2, merged(layout(pp=2, schedule="LoopedBFS"), local(1))),
    "pp2 InterleavedZeroBubble": (2, merged(layout(pp=2, schedule="InterleavedZeroBubble"), local(1))),
    "pp2 ZBVZeroBubble": (2, merged(layout(pp=2, schedule="ZBVZeroBubble"), local(1))),
    "fsdp4": (4, merged(layout(), local(2))),
    "hsdp 2x2": (4, merged(layout(replicate=2), local(2))),
    "tp4": (4, layout(tp=4)),
    "cp4": (4, layout(cp=4)),
    "fsdp2 x tp2": (4, merged(layout(tp=2), local(4))),
    "fsdp2 x cp2": (4, merged(layout(cp=2), local(4))),
    "cp2 x tp2": (4, layout(cp=2, tp=2)),
    "pp2 x fsdp2": (4, merged(layout(pp=2), local(1))),
    "pp2 x tp2": (4, merged(layout(pp=2, tp=2), local(1))),
    "pp2 x cp2": (4, merged(layout(pp=2, cp=2), local(1))),
    "pp2 ZBVZeroBubble x fsdp2": (4, merged(layout(pp=2, schedule="ZBVZeroBubble"), local(1))),
    "pp2 x fsdp2 x tp2": (8, merged(layout(pp=2, tp=2), local(1))),
    "fsdp2 x cp2 x tp2": (8, merged(layout(cp=2, tp=2), local(4))),
    "pp2 x hsdp 2x2": (8, merged(layout(pp=2, replicate=2), local(1))),
    "pp2 x cp2 x tp2": (8, merged(layout(pp=2, cp=2, tp=2), local(1))),
}
if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):  # refused by titanlite.load_run
    LAYOUTS = {name: row for name, row in LAYOUTS.items() if "ZBV" not in name}
DOCUMENTS = {"documents": True}
TIED = {"model": {"tied_embeddings": True}}
LARGE = {"model": {"vocab_size": 32_000}}  # 4 million gradients: a sum of squares one after the other goes astray
ONE_GROUP = {"parallelism": {"fsdp_min_num_params": 1_000_000}}  # the default: so small a model is not cut
SCHEDULING: dict[str, dict[str, Any]] = {  # when and where something is computed, not what
    "accumulation 2": local(2),
    "accumulation 4": local(1),
    "accumulation 4, each reduced": {**local(1), "parallelism": {"fsdp_reduce": "microbatch"}},
    "AC full": {"activation_checkpoint": {"mode": "full"}},
    "AC op": {"activation_checkpoint": {"mode": "selective"}},
    "AC every 2nd block": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}},
    "CPU offload": {"training": {"enable_cpu_offload": True}},
    "prefetch": {"parallelism": {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2}},
    "two blocks a group": {"parallelism": {"fsdp_min_num_params": 60_000}},
    "one group": ONE_GROUP,
    "reshard never": {"parallelism": {"fsdp_reshard_after_forward": "never"}},
    "reshard always": {"parallelism": {"fsdp_reshard_after_forward": "always"}},
}
ALL_GATHER = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
COMPILED = {"enable": True, "components": ["model"]}
PRECISION: dict[str, tuple[dict[str, Any], Tolerance]] = {
    "bf16": ({"training": {"mixed_precision_param": "bfloat16"}}, BF16),
    "bf16 weights, stochastic rounding": (
        {"training": {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}},
        ROUNDED,
    ),
    "float8 tensorwise": ({"float8": {"enable": True}}, FP8),
    "float8 all-gather": ({"float8": {"enable": True} | ALL_GATHER}, FP8),
    "float8 rowwise": ({"float8": {"enable": True, "recipe_name": "rowwise"}}, FP8),
    "float8 rowwise_with_gw_hp": ({"float8": {"enable": True, "recipe_name": "rowwise_with_gw_hp"}}, FP8),
}
# The table of combinations: feature -> (overrides, row on one process to compare with, tolerance)
FEATURES: dict[str, tuple[dict[str, Any], str, Tolerance]] = {
    "AC full": (SCHEDULING["AC full"], "one process", EXACT),
    "AC op": (SCHEDULING["AC op"], "one process", EXACT),
    "CPU offload": (SCHEDULING["CPU offload"], "one process", EXACT),
    "one group": (ONE_GROUP, "one process", EXACT),
    **{name: (overrides, name, tolerance) for name, (overrides, tolerance) in PRECISION.items()},
    "compile": ({"compile": COMPILED}, "one process", EXACT),
    "compile, AC full": ({"compile": COMPILED, **SCHEDULING["AC full"]}, "one process", EXACT),
    "compile, AC op": ({"compile": COMPILED, **SCHEDULING["AC op"]}, "one process", EXACT),
    "compile, float8 tensorwise": ({"compile": COMPILED, "float8": {"enable": True}}, "float8 tensorwise", FP8),
    "compile, float8 all-gather, AC full": (
        {"compile": COMPILED, "float8": {"enable": True} | ALL_GATHER, **SCHEDULING["AC full"]},
        "float8 all-gather",
        FP8,
    ),
    "compile, float8 all-gather, AC op": (
        {"compile": COMPILED, "float8": {"enable": True} | ALL_GATHER, **SCHEDULING["AC op"]},
        "float8 all-gather",
        FP8,
    ),
}
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
    """A cell of the table of combinations."""
    ranks, overrides = LAYOUTS[layout_name]
    extra, reference, tolerance = FEATURES[feature]
    return Row(f"{layout_name}, {feature}", ranks, merged(overrides, extra), reference, tolerance)


def all_rows() -> list[Row]:
    """Every comparison; the rows on one process come first."""
    one = merged(layout(), local(8))
    rows = [Row("one process", 1, one)]
    alone = {"documents": DOCUMENTS, "tied": TIED, "vocabulary of 32,000": LARGE}
    rows += [Row(name, 1, merged(one, more), name) for name, more in alone.items()]
    rows += [Row(name, 1, merged(one, overrides), name) for name, (overrides, _) in PRECISION.items()]
    rows += [Row(name, 1, merged(one, overrides)) for name, overrides in SCHEDULING.items()]
    rows += [Row(name, ranks, overrides) for name, (ranks, overrides) in LAYOUTS.items()]
    fsdp2 = LAYOUTS["fsdp2"][1]
    rows += [Row(f"fsdp2, {name}", 2, merged(fsdp2, over)) for name, over in SCHEDULING.items() if name not in FEATURES]
    for name in ("tp2", "cp2", "pp2 1F1B", "pp2 x cp2", "cp2 x tp2", "pp2 x cp2 x tp2"):
        ranks, overrides = LAYOUTS[name]
        rows.append(Row(f"{name}, documents", ranks, merged(overrides, DOCUMENTS), "documents"))
    for name in ("fsdp2", "tp2", "cp2", "fsdp2 x tp2"):
        ranks, overrides = LAYOUTS[name]
        rows.append(Row(f"{name}, tied", ranks, merged(overrides, TIED), "tied"))
    for name in ("fsdp2", "tp2", "fsdp4", "pp2 x fsdp2"):
        (ranks, overrides), large = LAYOUTS[name], "vocabulary of 32,000"
        rows.append(Row(f"{name}, {large}", ranks, merged(overrides, LARGE), large, LARGE_SUMS))
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
        over = merged(overrides, more, {"compile": COMPILED})
        rows.append(Row(f"tp2, compile, {name}", ranks, over, reference))
    return rows


@dataclass(frozen=True)
class Result:
    """What a row's run gave. Weights are fp32, of the whole model, by name."""

    initial: str
    losses: list[float]
    norms: list[float]
    evaluated: float
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """From the reference; the largest over steps or weights. Weights in updates."""

    same_start: bool
    loss: float
    norm: float
    mean_weight: float
    largest_weight: float

    def within(self, tolerance: Tolerance) -> bool:
        return (
            self.same_start
            and self.loss <= tolerance.loss
            and self.norm <= tolerance.norm
            and self.mean_weight <= tolerance.mean_weight
            and self.largest_weight <= tolerance.largest_weight
        )


KEPT = ("initial", "losses", "norms", "evaluated", "weights")


def run(rows: Iterable[Row]) -> dict[str, Result]:
    """Train every row; those on the same number of ranks share them."""
    results = {}
    by_ranks: dict[int, dict[str, Any]] = {}
    for row in rows:
        base = {"model": MODEL, "training": TRAINING, "optimizer": {"lr": RATE}}
        by_ranks.setdefault(row.ranks, {})[row.name] = merged(base, row.overrides)
    for ranks, variants in sorted(by_ranks.items()):
        for name, result in run_ranks(ranks, train_variants, variants, timeout=1200)[0].items():
            results[name] = Result(**{key: result[key] for key in KEPT})
    return results


def compare(result: Result, reference: Result) -> Difference:
    def relative(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in weights.values()])

    assert result.weights.keys() == reference.weights.keys()
    updates = (flat(result.weights) - flat(reference.weights)).abs() / RATE
    return Difference(
        result.initial == reference.initial,
        relative([*result.losses, result.evaluated], [*reference.losses, reference.evaluated]),
        relative(result.norms, reference.norms),
        updates.mean().item(),
        updates.max().item(),
    )


def markdown(cells: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    rows, results = all_rows(), run(all_rows())
    file = parser.parse_args().write
    table, misses, found = [["layout", "ranks", "loss", "gradient norm", "mean weight", "largest weight"]], [], {}
    for row in rows:
        if row.name == row.reference:
            continue
        difference = compare(results[row.name], results[row.reference])
        found[row.name] = difference
        if not difference.within(row.tolerance):
            misses.append(f"{row.name}: {difference} beyond {row.tolerance}")
        numbers = (difference.loss, difference.norm, difference.mean_weight, difference.largest_weight)
        table.append([row.name, str(row.ranks), *(f"{number:.1e}" for number in numbers)])
    grid = [["", *FEATURES]]
    for name in COMBINED:
        cells = [f"{found[f'{name}, {f}'].loss:.0e}" if (name, f) not in REFUSED else "refused" for f in FEATURES]
        grid.append([name, *cells])
    texts = {"equivalence": markdown(table), "combinations": markdown(grid)}
    for name, text in texts.items():
        print(text, end="\n\n")
        if file:
            pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            page = re.sub(
                pattern, lambda match, text=text: match[1] + text + "\n" + match[2], file.read_text(), flags=re.S
            )
            file.write_text(page)
    print(f"{len(table) - 1} rows, {len(misses)} beyond their tolerance", *misses, sep="\n")
    sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()

"""The layouts that are compared with one process, and their tolerances.

`benchmarks/equivalence.sh` measures all rows. tests/distributed/test_equivalence.py proves them.
"""

import itertools
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
    reference: str
    tolerance: Numbers


def make_layout(
    ranks: int,
    pp: int = 1,
    replicate: int = 1,
    cp: int = 1,
    tp: int = 1,
    schedule: str = "1F1B",
    batch: int | None = None,
) -> tuple[int, Options]:
    """Return the number of ranks and the options of a layout. The remaining ranks shard the model.

    Args:
        batch: Local batch size.
    """
    degrees = {"pipeline": pp, "context": cp, "tensor": tp}
    keys = {f"{name}_parallel_degree": degree for name, degree in degrees.items()}
    keys |= {"data_parallel_replicate_degree": replicate, "pipeline_parallel_schedule": schedule}
    sections = {"parallelism": keys}
    if batch is not None:
        sections["training"] = {"local_batch_size": batch}
    return ranks, sections


DEGREES = tomli.loads("""
"one process" = {ranks = 1, batch = 8}
"fsdp2" = {ranks = 2, batch = 4}
"replicate2" = {ranks = 2, replicate = 2, batch = 4}
"tp2" = {ranks = 2, tp = 2}
"cp2" = {ranks = 2, cp = 2}
"pp2 1F1B" = {ranks = 2, pp = 2, batch = 1}
"pp2 GPipe" = {ranks = 2, pp = 2, schedule = "GPipe", batch = 1}
"pp2 Interleaved1F1B" = {ranks = 2, pp = 2, schedule = "Interleaved1F1B", batch = 1}
"pp2 LoopedBFS" = {ranks = 2, pp = 2, schedule = "LoopedBFS", batch = 1}
"pp2 InterleavedZeroBubble" = {ranks = 2, pp = 2, schedule = "InterleavedZeroBubble", batch = 1}
"pp2 ZBVZeroBubble" = {ranks = 2, pp = 2, schedule = "ZBVZeroBubble", batch = 1}
"fsdp4" = {ranks = 4, batch = 2}
"hsdp 2x2" = {ranks = 4, replicate = 2, batch = 2}
"tp4" = {ranks = 4, tp = 4}
"cp4" = {ranks = 4, cp = 4}
"fsdp2 x tp2" = {ranks = 4, tp = 2, batch = 4}
"fsdp2 x cp2" = {ranks = 4, cp = 2, batch = 4}
"cp2 x tp2" = {ranks = 4, cp = 2, tp = 2}
"pp2 x fsdp2" = {ranks = 4, pp = 2, batch = 1}
"pp2 x tp2" = {ranks = 4, pp = 2, tp = 2, batch = 1}
"pp2 x cp2" = {ranks = 4, pp = 2, cp = 2, batch = 1}
"pp2 ZBVZeroBubble x fsdp2" = {ranks = 4, pp = 2, schedule = "ZBVZeroBubble", batch = 1}
"pp2 x fsdp2 x tp2" = {ranks = 8, pp = 2, tp = 2, batch = 1}
"fsdp2 x cp2 x tp2" = {ranks = 8, cp = 2, tp = 2, batch = 4}
"pp2 x hsdp 2x2" = {ranks = 8, pp = 2, replicate = 2, batch = 1}
"pp2 x cp2 x tp2" = {ranks = 8, pp = 2, cp = 2, tp = 2, batch = 1}
""")
TORCH_VERSION = tuple(map(int, version("torch").split(".")[:2]))
if TORCH_VERSION < (2, 13):  # load_run rejects ZBV there
    DEGREES = {name: degrees for name, degrees in DEGREES.items() if "ZBV" not in name}
LAYOUTS = {name: make_layout(**degrees) for name, degrees in DEGREES.items()}

# These features do not change the results, so the reference does not have them.
SAME_RESULTS = tomli.loads("""
["accumulation 2"]
training.local_batch_size = 2
["accumulation 4"]
training.local_batch_size = 1
["each reduced"]
parallelism.fsdp_reduce = "microbatch"
["AC full"]
activation_checkpoint.mode = "full"
["AC op"]
activation_checkpoint.mode = "selective"
["AC every 2nd block"]
activation_checkpoint.mode = "selective"
activation_checkpoint.selective_ac_option = "2"
["AC memory budget"]
activation_checkpoint.mode = "memory_budget"
["CPU offload"]
training.enable_cpu_offload = true
["no memory savers"]
parallelism.memory_savers = "none"
["all memory savers"]
parallelism.memory_savers = "all"
["two blocks a group"]
parallelism.fsdp_min_num_params = 60_000
["one group"]  # By default, such a small model is a single FSDP group.
parallelism.fsdp_min_num_params = 1_000_000
["reshard never"]
parallelism.fsdp_reshard_after_forward = "never"
["reshard always"]
parallelism.fsdp_reshard_after_forward = "always"
[compile]
compile.enable = true
compile.components = ["model"]
[varlen]
model.attention_backend = "varlen"
["base of muP"]
model.mup_base_dim = 64
model.mup_base_head_dim = 8
""")
# These features change the results, so the reference also has them. "documents" is not a job key.
# It packs several documents into each sequence.
OTHER_RESULTS = tomli.loads("""
[documents]
documents = true
[tied]
model.tied_embeddings = true
["vocabulary of 32,000"]  # 4 million gradients. A plain sum of their squares loses precision.
model.vocab_size = 32_000
[muP]
model.mup_base_dim = 16
model.mup_base_head_dim = 2
[windows]
model.sliding_window = 12
model.full_attention_interval = 2
model.logit_softcap = 0.5
[switches]  # Options of other model families
model.head_dim = 16
model.qkv_bias = true
model.qk_norm = "head"
model.sliding_window = 12
["OLMo 2"]
model.qk_norm = "projection"
model.norm_placement = "after"
model.no_rope_interval = 2
[bf16]
training.mixed_precision_param = "bfloat16"
["bf16 weights"]
training.dtype = "bfloat16"
["stochastic rounding"]
optimizer.stochastic_rounding = true
["float8 tensorwise"]
float8.enable = true
["float8 all-gather"]
float8.enable = true
float8.enable_fsdp_float8_all_gather = true
float8.precompute_float8_dynamic_scale_for_fsdp = true
["float8 rowwise"]
float8.enable = true
float8.recipe_name = "rowwise"
["float8 rowwise_with_gw_hp"]
float8.enable = true
float8.recipe_name = "rowwise_with_gw_hp"
["float8 mxfp8"]
float8.enable = true
float8.recipe_name = "mxfp8"
float8.emulate = true
model.dim = 128  # Halves of the key and value heads must be multiples of 32.
""")
# Tolerances by the name of a row or of its reference. By default, rows with float8 have FP8, and
# all other rows have EXACT.
TOLERANCES = {
    "base of muP": IDENTICAL,
    "vocabulary of 32,000": LARGE_SUMS,
    "bf16": BF16,
    "bf16 weights, stochastic rounding": ROUNDED,
    "OLMo 2, float8 tensorwise": FP8_AFTER,
}

# Each of these layouts trains with each line of FEATURES, which lists one or more features.
COMBINED = ("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 ZBVZeroBubble", "fsdp2 x tp2", "hsdp 2x2")
COMBINED = tuple(name for name in COMBINED if name in LAYOUTS)
FEATURES = """
AC full
AC op
CPU offload
one group
bf16
bf16 weights, stochastic rounding
float8 tensorwise
float8 all-gather
float8 rowwise
float8 rowwise_with_gw_hp
compile
compile, AC full
compile, AC op
compile, float8 tensorwise
compile, float8 all-gather, AC full
compile, float8 all-gather, AC op
""".strip().splitlines()
REJECTED = {  # by titanlite.load_run
    (name, feature)
    for name in COMBINED
    for feature in FEATURES
    if "ZBV" in name and (feature == "AC op" or "compile" in feature)
}
# Each layout on the left trains with each list of features on the right.
ROWS = """
one process => accumulation 2 ; accumulation 4 ; accumulation 4, each reduced ; base of muP
one process => CPU offload ; CPU offload, accumulation 4, each reduced
one process => AC full ; AC op ; AC every 2nd block ; two blocks a group ; one group
one process => no memory savers ; all memory savers ; reshard never ; reshard always
one process => documents, varlen ; windows, varlen
fsdp2 => accumulation 2 ; accumulation 4 ; accumulation 4, each reduced ; AC every 2nd block
fsdp2 => CPU offload, accumulation 4, each reduced ; two blocks a group
fsdp2 => no memory savers ; all memory savers ; reshard never ; reshard always
tp2 ; cp2 ; pp2 1F1B ; pp2 x cp2 ; cp2 x tp2 ; pp2 x cp2 x tp2 => documents
fsdp2 ; fsdp4 ; tp2 ; cp2 ; fsdp2 x tp2 => tied
fsdp2 ; tp2 ; cp2 ; pp2 1F1B ; pp2 x cp2 x tp2 => windows
fsdp2 ; tp2 ; fsdp4 ; pp2 x fsdp2 => vocabulary of 32,000
fsdp2 ; tp2 ; cp2 ; pp2 1F1B ; fsdp2 x tp2 => float8 mxfp8
fsdp2 ; tp2 ; cp2 ; pp2 Interleaved1F1B ; fsdp2 x tp2 => muP
fsdp2 ; tp2 => float8 mxfp8, compile, AC op
fsdp2 ; tp2 ; pp2 1F1B ; pp2 Interleaved1F1B ; pp2 x fsdp2 x tp2 => documents, varlen
tp2 => documents, varlen, compile, AC op
fsdp2 ; tp2 ; cp2 ; pp2 1F1B ; pp2 x cp2 x tp2 => switches ; OLMo 2
fsdp2 ; tp2 ; cp2 ; pp2 1F1B ; pp2 x cp2 x tp2 => switches, documents ; OLMo 2, documents
fsdp2 ; tp2 ; cp2 ; pp2 1F1B ; pp2 x cp2 x tp2 => switches, float8 tensorwise
fsdp2 ; tp2 ; cp2 ; pp2 1F1B ; pp2 x cp2 x tp2 => OLMo 2, float8 tensorwise
tp2 => switches, compile, AC op ; switches, documents, compile, AC op
tp2 => switches, float8 tensorwise, compile, AC op
tp2 => OLMo 2, compile, AC op ; OLMo 2, documents, compile, AC op
tp2 => OLMo 2, float8 tensorwise, compile, AC op
pp2 x tp2 ; cp2 x tp2 ; pp2 x fsdp2 x tp2 => compile
pp2 x tp2 => compile, float8 all-gather, AC op
tp2 => compile, tied ; compile, windows ; compile, documents
tp2 => compile, AC every 2nd block ; compile, AC memory budget
"""


def merge_features(names: Iterable[str]) -> Options:
    """Return the options of several features."""
    known = SAME_RESULTS | OTHER_RESULTS
    return merge(*(known[name] for name in names))


def make_row(name: str) -> Row:
    """Return the row with a name such as "tp2, tied, compile", a layout and its features.

    A name without a layout stands for one process.
    """
    features = name.split(", ")
    layout_name = features.pop(0) if features[0] in LAYOUTS else "one process"
    ranks, overrides = LAYOUTS[layout_name]
    overrides = merge(overrides, merge_features(features))
    reference = (
        ", ".join(feature for feature in features if feature in OTHER_RESULTS) or "one process"
    )
    default = FP8 if "float8" in reference else EXACT
    tolerance = TOLERANCES.get(name, TOLERANCES.get(reference, default))
    return Row(name, ranks, overrides, reference, tolerance)


def all_rows() -> list[Row]:
    """Return all rows, the references first."""
    names = list(LAYOUTS)
    for line in ROWS.strip().splitlines():
        layouts, features = (side.split(" ; ") for side in line.split(" => "))
        for name, feature in itertools.product(layouts, features):
            names.append(f"{name}, {feature}")
    for name, feature in itertools.product(COMBINED, FEATURES):
        if (name, feature) not in REJECTED:
            names.append(f"{name}, {feature}")
    rows = [make_row(name.removeprefix("one process, ")) for name in names]
    references = [make_row(row.reference) for row in rows]
    return list({row.name: row for row in [*references, *rows]}.values())


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

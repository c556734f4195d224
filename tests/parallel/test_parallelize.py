"""Every way to run the same model computes the same thing: shards, precision, recomputation, offload, FP8."""

from typing import Any

import pytest
from ranks import run_ranks
from train_variants import train_variants

BF16 = {"mixed_precision_param": "bfloat16"}
FP8_ALL_GATHER = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulate": {"training": {"local_batch_size": 1}},
    "bf16": {"training": BF16},
    "built_in_bf16": {"training": BF16 | {"init_dtype": "bfloat16"}},
    "pure_bf16": {"training": BF16 | {"dtype": "bfloat16"}},
    "ac_full": {"activation_checkpoint": {"mode": "full"}},
    "ac_op": {"activation_checkpoint": {"mode": "selective"}},
    "ac_every_2nd": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}},
    "offload": {"training": {"enable_cpu_offload": True}},
    "never_reshard": {"parallelism": {"fsdp_reshard_after_forward": "never"}},
    "always_reshard": {"parallelism": {"fsdp_reshard_after_forward": "always"}},
    "prefetch": {"parallelism": {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2}},
    "two_blocks_a_group": {"parallelism": {"fsdp_min_num_params": 60_000}},
    "one_group": {"parallelism": {"fsdp_min_num_params": 1_000_000}},
    "tied": {"model": {"tied_embeddings": True}},
    "fp8": {"float8": {"enable": True}},
    "fp8_all_gather": {"float8": {"enable": True} | FP8_ALL_GATHER},
    "fp8_rowwise": {"float8": {"enable": True, "recipe_name": "rowwise"}},
    "fp8_gw_hp": {"float8": {"enable": True, "recipe_name": "rowwise_with_gw_hp"}},
    "fp8_filtered": {"float8": {"enable": True, "filter_fqns": ["attention"]}},
}
BUILT = ("built_in_bf16", "pure_bf16")
COMPILED = {"enable": True, "components": ["model"]}
COMPILED_VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "compile": {"compile": COMPILED},
    "compile_budget": {
        "compile": COMPILED,
        "activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.3},
    },
    "compile_fp8_ac_op": {
        "compile": COMPILED,
        "activation_checkpoint": {"mode": "selective"},
        "float8": {"enable": True} | FP8_ALL_GATHER,
    },
}
UNCHANGED = [  # these change when and where things are computed, not what: bitwise equal
    "ac_full",
    "ac_op",
    "ac_every_2nd",
    "offload",
    "never_reshard",
    "always_reshard",
    "prefetch",
    "two_blocks_a_group",
    "one_group",
]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallelize")]


def run(variants: dict[str, Any], ranks: int) -> dict[str, Any]:
    return run_ranks(ranks, train_variants, variants)[0]


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, Any]]:
    """Results by number of ranks, then by variant."""
    hybrid = {"parallelism": {"data_parallel_replicate_degree": 2}}
    four = {"fp32": {}, "hsdp": hybrid, "tied": VARIANTS["tied"]}
    return {1: run(VARIANTS, 1), 2: run(VARIANTS, 2), 4: run(four, 4)}


def relative_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert relative_difference(one["losses"], other["losses"]) < 5e-6
    assert relative_difference(one["norms"], other["norms"]) < 2e-5


def test_same_weights_anywhere(results: dict[int, dict[str, Any]]) -> None:
    """Invariant 1: initial weights are bitwise the same on 1, 2 and 4 ranks, and for every way to run them."""
    untied = {r["initial"] for ranks in results.values() for name, r in ranks.items() if name not in ("tied", *BUILT)}
    tied = {ranks["tied"]["initial"] for ranks in results.values()}
    assert len(untied) == 1
    assert len(tied) == 1
    for name in BUILT:  # rounded to bf16: other bits, but the same ones on any number of ranks
        assert results[1][name]["initial"] == results[2][name]["initial"]
        assert results[1][name]["initial"] not in untied


@pytest.mark.parametrize(("name", "ranks"), [("fp32", 2), ("accumulate", 2), ("tied", 2), ("fp32", 4), ("tied", 4)])
def test_token_weighted_loss(results: dict[int, dict[str, Any]], name: str, ranks: int) -> None:
    """Invariant 3: with unequal masks in each row, ranks and microbatches give the single process's loss and norm."""
    # fp32 sums in another order differ by 1e-7; Adam turns that into up to 1e-6 after 8 steps.
    assert_close(results[1][name], results[ranks][name])


def test_hsdp_is_fsdp_and_accumulation_is_one_large_batch(results: dict[int, dict[str, Any]]) -> None:
    assert_close(results[1]["fp32"], results[4]["hsdp"])
    for ranks in (1, 2):
        assert_close(results[ranks]["fp32"], results[ranks]["accumulate"])


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_schedule_of_computation_changes_no_bit(results: dict[int, dict[str, Any]], ranks: int, name: str) -> None:
    reference, variant = results[ranks]["fp32"], results[ranks][name]
    assert variant["losses"] == reference["losses"]
    assert variant["norms"] == reference["norms"]
    assert variant["final"] == reference["final"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("fp32", "tied", *UNCHANGED)])
def test_trains_close_to_fp32(results: dict[int, dict[str, Any]], ranks: int, name: str) -> None:
    losses, reference = results[ranks][name]["losses"], results[ranks]["fp32"]["losses"]
    assert losses[-1] < losses[0] - 0.5
    # bf16 has 8 bits of mantissa, e4m3 has 4; over 8 steps that moves the loss by a percent at most.
    assert relative_difference(reference, losses) < 0.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_all_gather_changes_no_bit(results: dict[int, dict[str, Any]], ranks: int) -> None:
    """Casting before the all-gather with the global scale is casting after it."""
    assert results[ranks]["fp8_all_gather"]["losses"] == results[ranks]["fp8"]["losses"]
    assert results[ranks]["fp8_all_gather"]["final"] == results[ranks]["fp8"]["final"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "parameter", "computed", "gradient", "state"),
    [
        ("fp32", "float32", "float32", "float32", "float32"),
        ("bf16", "float32", "bfloat16", "float32", "float32"),
        ("built_in_bf16", "float32", "bfloat16", "float32", "float32"),
        ("pure_bf16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_mixed_precision_dtypes(
    results: dict[int, dict[str, Any]], ranks: int, name: str, parameter: str, computed: str, gradient: str, state: str
) -> None:
    """What is stored, all-gathered for computing, reduced into, and kept by the optimizer."""
    assert results[ranks][name]["dtypes"] == {
        "parameter": f"torch.{parameter}",
        "computed": f"torch.{computed}",
        "gradient": f"torch.{gradient}",
        "optimizer": f"torch.{state}",
    }


def test_float8_says_what_it_converted(results: dict[int, dict[str, Any]]) -> None:
    for name, said in (
        ("fp8", "21 linear layers converted"),
        ("fp8_filtered", "12 kept (3 attention.wq, 3 attention.wk"),
    ):
        (note,) = (note for note in results[1][name]["notes"] if "Float8" in note)
        assert said in note
        assert "emulated" in note


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_compiled_blocks_train_like_eager_ones(ranks: int) -> None:
    compiled = run(COMPILED_VARIANTS, ranks)
    reference = compiled.pop("fp32")["losses"]
    for name, result in compiled.items():
        # Fusion reorders fp32 arithmetic; FP8 has 4 bits of mantissa.
        tolerance = 0.01 if "fp8" in name else 1e-5
        assert relative_difference(reference, result["losses"]) < tolerance, name

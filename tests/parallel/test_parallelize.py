"""Every layout, precision and memory option of one model computes the same training steps."""

from typing import Any

import pytest
from ranks import run_ranks
from small_runs import job_tables
from train_variants import train_variants

BF16 = "training.mixed_precision_param = 'bfloat16'"
FP8 = "float8.enable = true"
FP8_ALL_GATHER = (
    f"{FP8} ; float8.enable_fsdp_float8_all_gather = true ; "
    "float8.precompute_float8_dynamic_scale_for_fsdp = true"
)
AC_OP = "activation_checkpoint.mode = 'selective'"
# These options change when and where tensors are computed, but no bit of the results.
UNCHANGED = {
    "ac_full": "activation_checkpoint.mode = 'full'",
    "ac_op": AC_OP,
    "ac_every_2nd": f"{AC_OP} ; activation_checkpoint.selective_ac_option = '2'",
    "offload": "training.enable_cpu_offload = true",
    "never_reshard": "parallelism.fsdp_reshard_after_forward = 'never'",
    "always_reshard": "parallelism.fsdp_reshard_after_forward = 'always'",
    "no_memory_savers": "parallelism.memory_savers = 'none'",
    "all_memory_savers": "parallelism.memory_savers = 'all'",
    "two_blocks_a_group": "parallelism.fsdp_min_num_params = 60_000",
    "one_group": "parallelism.fsdp_min_num_params = 1_000_000",
}
CLOSE = {
    "bf16": BF16,
    "built_in_bf16": f"{BF16} ; training.init_dtype = 'bfloat16'",
    "pure_bf16": f"{BF16} ; training.dtype = 'bfloat16'",
    "fp8": FP8,
    "fp8_all_gather": FP8_ALL_GATHER,
    "fp8_rowwise": f"{FP8} ; float8.recipe_name = 'rowwise'",
    "fp8_gw_hp": f"{FP8} ; float8.recipe_name = 'rowwise_with_gw_hp'",
    "fp8_filtered": f"{FP8} ; float8.filter_fqns = ['attention']",
}
VARIANTS = {"fp32": "", **UNCHANGED, **CLOSE}
BUILT = ("built_in_bf16", "pure_bf16")
ON_ONE_RANK = ("fp32", "ac_op", "offload", "bf16", *BUILT, "fp8", "fp8_all_gather")
NAMES = {1: ON_ONE_RANK, 2: tuple(VARIANTS)}  # by number of ranks
ONLY_LONG = ("ac_full", "ac_every_2nd", "always_reshard", "two_blocks_a_group", "fp8_gw_hp")
"""Variants that are trained only with --long."""
COMPILED = "compile.enable = true ; compile.components = ['model']"
COMPILED_VARIANTS = {
    "fp32": "",
    "compile": COMPILED,
    "compile_budget": f"{COMPILED} ; activation_checkpoint.mode = 'memory_budget' ; "
    "activation_checkpoint.memory_budget = 0.3",
    "compile_fp8_ac_op": f"{COMPILED} ; {AC_OP} ; {FP8_ALL_GATHER}",
}
Results = dict[int, dict[str, Any]]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallelize")]


def train(ranks: int, variants: dict[str, str]) -> dict[str, Any]:
    """Train variants, and return results by name."""
    jobs = {name: job_tables(options) for name, options in variants.items()}
    return run_ranks(ranks, train_variants, jobs)[0]


@pytest.fixture(scope="module")
def results(pytestconfig) -> Results:
    """Return results by number of ranks and variant."""
    left_out = () if pytestconfig.getoption("--long") else ONLY_LONG
    results = {}
    for ranks, names in NAMES.items():
        chosen = [name for name in names if name not in left_out]
        results[ranks] = train(ranks, {name: VARIANTS[name] for name in chosen})
    return results


def relative_difference(a: list[float], b: list[float]) -> float:
    pairs = zip(a, b, strict=True)
    return max(abs(x - y) / abs(x) for x, y in pairs)


def test_initial_weights_do_not_depend_on_ranks_and_options(results):
    """Only models that are built in bf16 round their initial weights."""
    unrounded = set()
    for variants in results.values():
        for name, result in variants.items():
            if name not in BUILT:
                unrounded.add(result["initial"])

    assert len(unrounded) == 1

    # Weights that are rounded to bf16 are equal on any number of ranks.
    for name in BUILT:
        assert results[1][name]["initial"] == results[2][name]["initial"]
        assert results[1][name]["initial"] not in unrounded


@pytest.mark.parametrize("ranks", [1, 2])
def test_options_that_only_move_computation_change_no_bit(results, ranks):
    for name in UNCHANGED.keys() & results[ranks].keys():
        for what in ("losses", "norms", "final"):
            assert results[ranks][name][what] == results[ranks]["fp32"][what], name
    # Casting before the all-gather with the global scale equals casting after it.
    for what in ("losses", "final"):
        assert results[ranks]["fp8_all_gather"][what] == results[ranks]["fp8"][what]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_in_bf16_and_fp8_are_close_to_those_in_fp32(results, ranks):
    for name in CLOSE.keys() & results[ranks].keys():
        losses = results[ranks][name]["losses"]
        reference = results[ranks]["fp32"]["losses"]
        assert losses[-1] < losses[0] - 0.5, name
        # Mantissas have 8 bits in bf16 and 4 in e4m3, which changes the loss after 8 steps by 1% at
        # most.
        assert relative_difference(reference, losses) < 0.01, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_computation_gradients_and_optimizer_use_the_configured_dtypes(results, ranks):

    single = "torch.float32"
    half = "torch.bfloat16"
    for name, stored, computed in (
        ("fp32", single, single),
        ("bf16", single, half),
        ("built_in_bf16", single, half),
        ("pure_bf16", half, half),
    ):
        expected = {
            "parameter": stored,
            "computed": computed,
            "gradient": stored,
            "optimizer": stored,
        }
        assert results[ranks][name]["dtypes"] == expected, name


def test_float8_logs_the_converted_layers(results):
    for name, output in (
        ("fp8", "converted 21 linear layers"),
        ("fp8_filtered", "kept 12 (3 attention.wq, 3 attent"),
    ):
        (note,) = (note for note in results[2][name]["notes"] if "Float8" in note)
        assert output in note
        assert "emulated" in note


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["fp32", "compile_fp8_ac_op"], id="sample"),
        pytest.param(["fp32", "compile", "compile_budget"], id="more", marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_train_like_eager_ones(names):
    compiled = train(2, {name: COMPILED_VARIANTS[name] for name in names})
    reference = compiled.pop("fp32")["losses"]
    for name, result in compiled.items():
        # Fusion reorders fp32 arithmetic; FP8 has 4 bits of mantissa.
        tolerance = 0.01 if "fp8" in name else 1e-5
        assert relative_difference(reference, result["losses"]) < tolerance, name

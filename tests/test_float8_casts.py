"""metrics.details = ["float8"]: what is counted is what FP8 does to the values, each of them once, on any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_process, run_ranks
from small_runs import SMALL
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.float8.config import CastConfig
from torchao.float8.float8_linear import Float8Linear
from train_variants import TINY, merge, train_variants

from titanlite.config.load import load_job
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.train.float8_casts import KINDS, counts_of, counts_of_cast
from titanlite.train.loop import Trainer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LINEAR = [*(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")), *(f"feed_forward.w{i}" for i in (1, 2, 3))]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_values_over_and_under_are_those_that_round_so(dtype: torch.dtype, of: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(dtype).double().abs()
    known = every[every.isfinite()].unique()  # 0, the smallest, ..., the largest
    known = torch.cat([known, known[-1:] * 2 - known[-2]])  # and what would come next
    smallest, largest, beyond = known[1].item(), known[-2].item(), known[-1].item()
    edges = [0.0, smallest / 2, smallest / 2 * 1.01, smallest, largest, (largest + beyond) / 2 * 0.99]
    x = torch.tensor([*edges, (largest + beyond) / 2, 2 * largest]).to(of)
    spread = torch.linspace(-25, 20, 5000).exp2().to(of)
    x = torch.cat([x, -x, spread, -spread])
    scale = torch.tensor(0.37)
    nearest = [(known - value).abs().argmin().item() for value in (x.abs().float() * scale).double()]  # ties to even
    over, under = sum(i == len(known) - 1 for i in nearest), sum(i == 0 for i in nearest) - 2  # without both zeros
    assert over > 100
    assert under > 100
    assert counts_of(x, x.abs().amax(), scale, dtype, 1).tolist() == [x.abs().max().item(), over, under, len(x)]
    halves = torch.tensor([smallest / 2, (largest + beyond) / 2, 0.0])
    assert counts_of(halves, halves[1], torch.tensor(1.0), dtype, 2).tolist()[1:] == [0.5, 0.5, 1.5]


def test_a_value_that_is_not_finite_takes_the_others_with_it() -> None:
    config, x = CastConfig(target_dtype=E4M3), torch.tensor([1.0, -2.0, 0.0, 4.0])
    assert counts_of_cast(x, config, False).tolist() == [4.0, 0, 0, 4]
    assert counts_of_cast(torch.cat([x, torch.tensor([torch.inf])]), config, False).tolist() == [torch.inf, 1, 3, 5]
    assert counts_of_cast(torch.cat([x, torch.tensor([torch.nan])]), config, False).tolist() == [torch.inf, 5, 0, 5]


def by_hand(part: str, tensors: list[Tensor], rowwise: bool) -> tuple[float, int, float]:
    """Largest absolute value, values that overflow, and the share of those that become zero, by real casts."""
    largest, over, under = 0.0, 0, 0
    dtype, limit = (E5M2, 57344) if part.endswith("grad_output") and not rowwise else (E4M3, 448)
    for x in (x.flatten(0, -2) for x in tensors):
        amax = x.abs().amax(dim=1, keepdim=True) if rowwise else x.abs().amax()
        scale = (limit / amax.double().clamp(min=1e-12)).float()  # a row may have zeros only
        scale = scale.log2().floor().exp2() if rowwise else scale
        cast = (x.float() * scale).clamp(-limit, limit).to(dtype).float()
        largest, over = max(largest, amax.max().item()), over + int((~cast.isfinite()).sum())
        under += int(((cast == 0) & (x != 0)).sum())
    return largest, over, under / sum(x.numel() for x in tensors)


def logged_and_by_hand(words: list[str], rowwise: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What two steps log, and the same from the tensors that their layers see."""
    found = []
    with Trainer(load_job(words)) as trainer:
        layers = {name: each for name, each in trainer.model.named_modules() if isinstance(each, Float8Linear)}
        seen: dict[str, list[Tensor]] = {}

        def watch(name: str, layer: Float8Linear) -> None:
            def after(_layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                seen.setdefault(f"{name}.input", []).append(inputs[0].detach().clone())
                output.register_hook(lambda grad: seen.setdefault(f"{name}.grad_output", []).append(grad.clone()))

            layer.register_forward_hook(after)

        for name, layer in layers.items():
            watch(name.split(".", 2)[2], layer)
        for _ in range(2):
            seen.clear()
            for name, layer in layers.items():
                weight = layer.weight
                assert isinstance(weight, DTensor)
                seen.setdefault(f"{name.split('.', 2)[2]}.weight", []).append(weight.full_tensor().detach().bfloat16())
            entry = trainer.step()
            assert entry is not None
            expected = {part: by_hand(part, tensors, rowwise) for part, tensors in seen.items()}
            numbers = entry.float8_amax, entry.float8_overflow, entry.float8_underflow
            found.append((dict(zip(("amax", "overflow", "underflow"), numbers, strict=True)), expected))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_is_what_real_casts_of_the_layers_tensors_give(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["--job.config_file", str(tmp_path / "small.toml"), "--job.dump_folder", str(tmp_path / "out")]
    words += ["--checkpoint.no-enable", "--training.mixed_precision_param", "bfloat16", "--metrics.details", "float8"]
    words += ["--float8.enable", "--float8.min_features", "0", "--float8.recipe_name", recipe]
    for logged, expected in run_process(logged_and_by_hand, words, recipe == "rowwise"):
        assert logged["amax"].keys() == {f"{name}.{kind}" for name in LINEAR for kind in KINDS}
        for number, key in enumerate(("amax", "overflow", "underflow")):
            assert logged[key] == {part: numbers[number] for part, numbers in expected.items()}
        assert sum(logged["underflow"].values()) > 0


ON = {"metrics": {"details": ["float8"]}}
FP8 = {"float8": {"enable": True}, "training": {"steps": 2}, "model": {"n_layers": 4}}
ROWWISE = {"float8": {"recipe_name": "rowwise"}}
ALL_GATHER = {"float8": {"enable_fsdp_float8_all_gather": True}}
PRECOMPUTED = merge(ALL_GATHER, {"float8": {"precompute_float8_dynamic_scale_for_fsdp": True}})
AC_FULL, AC_OP = ({"activation_checkpoint": {"mode": mode}} for mode in ("full", "selective"))
BF16 = {"training": {"mixed_precision_param": "bfloat16"}}
COMPILED = {"compile": {"enable": True, "components": ["model"]}}


def split(**degrees: Any) -> dict[str, Any]:
    return {"parallelism": {f"{name}_parallel_{what}": value for key, value in degrees.items()
                            for name, what in [key.split("_")]}}  # fmt: skip


TP, PP = split(tensor_degree=2), split(pipeline_degree=2)
ZERO_BUBBLE = split(pipeline_degree=2, pipeline_schedule="InterleavedZeroBubble")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Number of ranks -> name -> what differs from FP8. All but those of "off" and "every 2nd" count.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "off": {"metrics": {"details": []}},
        "on": {},
        "every 2nd": {"metrics": {"log_freq": 2}},
        "AC op, all-gather": merge(AC_OP, ALL_GATHER),
        "rowwise": ROWWISE,
        "microbatches, rowwise": merge(ROWWISE, {"training": {"local_batch_size": 1}}),
    },
    2: {
        "off": {"metrics": {"details": []}},
        "on": {},
        "all-gather, precomputed, AC op": merge(PRECOMPUTED, AC_OP),
        "context, rowwise": merge(ROWWISE, split(context_degree=2)),
        "tensor": TP,
        "tensor, all-gather": merge(TP, ALL_GATHER),
        "tensor, rowwise": merge(ROWWISE, TP),
        **({} if TORCH < (2, 13) else {"zero bubble": ZERO_BUBBLE}),  # refused by titanlite.config.parallelism_rules
    },
    4: {"pipeline, tensor, AC full": merge(PP, TP, AC_FULL)},
}


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, dict[str, Any]]]:
    return {
        ranks: run_ranks(ranks, train_variants, {name: merge(FP8, ON, own) for name, own in layouts.items()})[0]
        for ranks, layouts in LAYOUTS.items()
    }


@pytest.mark.slow
@pytest.mark.xdist_group("float8_casts")
class TestLayouts:
    def test_training_does_not_notice(self, results: dict[int, dict[str, Any]]) -> None:
        for ranks in (1, 2):
            off, on = (results[ranks][name] for name in ("off", "on"))
            assert (on["losses"], on["norms"], on["final"]) == (off["losses"], off["norms"], off["final"])
            assert not any(numbers for step in off["casts"] for numbers in step.values())
        off, on = (results[1][name] for name in ("every 2nd", "on"))
        assert (on["losses"], on["final"]) == (off["losses"], off["final"])
        assert off["casts"] == [{"amax": {}, "overflow": {}, "underflow": {}}, on["casts"][1]]

    def test_each_value_is_counted_once(self, results: dict[int, dict[str, Any]]) -> None:
        arch, tokens = Run(JobConfig.model_validate(merge(TINY, FP8))).arch, 8 * 32
        kv = arch.n_kv_heads * arch.head_dim
        sides = [(arch.dim, arch.dim), (arch.dim, kv), (arch.dim, kv), (arch.dim, arch.dim)]
        sides += [(arch.dim, arch.ffn_dim), (arch.ffn_dim, arch.dim), (arch.dim, arch.ffn_dim)]  # w1, w2, w3
        expected = arch.n_layers * [[inner * outer, tokens * inner, tokens * outer] for inner, outer in sides]
        for ranks, of_ranks in results.items():
            for name, result in of_ranks.items():
                assert result["cast_values"] == (None if name == "off" else expected), (ranks, name)

    def test_the_numbers_are_those_of_one_rank(self, results: dict[int, dict[str, Any]]) -> None:
        for ranks, of_ranks in results.items():
            for name, result in of_ranks.items():
                reference = results[1]["rowwise" if "rowwise" in name else "on"]
                if name not in ("off", "every 2nd"):
                    self.compare(result["casts"][0], reference["casts"][0], ranks, name)

    def compare(self, found: dict[str, Any], expected: dict[str, Any], ranks: int, name: str) -> None:
        same_weights = {part: value for part, value in found["amax"].items() if part.endswith("weight")}
        assert same_weights.items() <= expected["amax"].items()  # bitwise: they are the initial weights
        assert found["overflow"] == expected["overflow"] == dict.fromkeys(expected["overflow"], 0)
        if ranks == 1 and "rowwise" not in name:  # the same tensors with the same scales
            assert found == expected
            return
        # One scale for the values of a rank or of a microbatch is another scale than one for all. FP8 then rounds each
        # product otherwise, by up to 2**-4. A row's scale is the same anywhere; sums in fp32 have another order.
        own_scale = "rowwise" not in name and ("tensor" not in name or "all-gather" in name) and "pipeline" not in name
        assert found["amax"] == pytest.approx(expected["amax"], rel=0.05 if own_scale else 1e-4), (ranks, name)
        # A value at the limit of what becomes zero falls on either side. The first query of a row sees one key, so its
        # gradient is zero but for rounding; that is a 32nd of the values, and attention over several ranks rounds them
        # otherwise.
        within = 2e-3 if own_scale or "context" in name else 2e-4
        assert found["underflow"] == pytest.approx(expected["underflow"], abs=within), (ranks, name)


@pytest.mark.slow
def test_compiled_blocks_count_what_eager_ones_do() -> None:
    """In steps that count and in steps that do not, which are two graphs."""
    compiled = merge(BF16, COMPILED, AC_OP, {"metrics": {"log_freq": 2}})
    variants = {"eager": merge(FP8, ON, BF16), "compiled": merge(FP8, ON, compiled)}
    eager, found = run_ranks(1, train_variants, variants)[0].values()
    assert found["cast_values"] == eager["cast_values"]
    assert found["casts"][0]["amax"] == {}
    numbers, expected = found["casts"][1], eager["casts"][1]
    assert numbers["overflow"] == expected["overflow"]
    # The compiler rounds less often to bfloat16, which has 8 bits, so that FP8, which has 4, rounds otherwise, too.
    assert numbers["amax"] == pytest.approx(expected["amax"], rel=0.05)
    assert numbers["underflow"] == pytest.approx(expected["underflow"], abs=2e-3)
    assert found["losses"] == pytest.approx(eager["losses"], rel=1e-3)

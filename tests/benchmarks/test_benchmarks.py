"""Each benchmark runs at small sizes, and generated pages match the committed results."""

import json
import re
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import mup
import performance_page
import planner
import published
import pytest
import runs
import tomli
from packaging.requirements import Requirement
from small_runs import ROOT, run_program
from torch.nn import functional as F

from titanlite.plan.training_time import RATIO_HIGH, RATIO_LOW

BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *options: object) -> str:
    return run_program(sys.executable, BENCHMARKS / script, *options, folder=ROOT).stdout


def test_the_performance_page_matches_the_committed_results():
    assert performance_page.PAGE.read_text() == performance_page.page(runs.RESULTS)


def test_the_offline_instructions_list_all_required_packages():
    """Wheels are copied without their dependencies, so the lists must contain them."""
    readme = (BENCHMARKS / "README.md").read_text()
    section = readme.partition("### GPU benchmarks without a network")[2].lower()
    named = set(re.findall(r"[a-z][a-z0-9-]*", section))
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    copied = section.partition("manylinux2014_x86_64")[2].partition("```")[0]
    needed = [Requirement(line) for line in project]
    for package in re.findall(r"[a-z][a-z0-9-]*", copied):
        with suppress(PackageNotFoundError):  # a version, or torchtitan
            needed += map(Requirement, requires(package) or [])

    for requirement in needed:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert re.sub(r"[-_.]+", "-", requirement.name.lower()) in named


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Prepare a small text."""
    folder = tmp_path_factory.mktemp("shards")
    sentence = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "
    (folder / "text.txt").write_text(sentence * 4000)
    source = f"--dataset.source text --dataset.path {folder}/text.txt"
    options = f"{sys.executable} -m titanlite prepare {source} --out {folder}/shards --workers 1"
    run_program(*options.split(), folder=ROOT)
    return folder / "shards"


def test_mup_keeps_coordinates_the_same_in_a_wider_model():
    """Without muP, a model that is four times wider changes its logits more than twice as much."""
    growth = {}
    for with_mup in (True, False):
        narrow, wide = (mup.measure_coordinates(width, with_mup) for width in (64, 256))
        growth[with_mup] = {name: wide[name] / narrow[name] for name in narrow}

    assert all(1 / mup.MAX_DRIFT < ratio < mup.MAX_DRIFT for ratio in growth[True].values())
    assert growth[False]["logits"] > mup.MAX_DRIFT


TINY = runs.Workload(32, 1, 2, 1, 64, seq_len=32, batch_size=4, steps=5, threads=1)


@pytest.mark.slow
@pytest.mark.long
def test_both_sides_train_the_same_model_on_the_same_tokens(shards, tmp_path):
    ours, theirs = (run(TINY, shards, tmp_path) for run in (runs.run_titanlite, runs.run_plain))
    # The initial weights differ, but both losses are near the entropy of a uniform guess.
    assert ours.loss == pytest.approx(theirs.loss, rel=0.1)

    for side in (ours, theirs):
        assert min(side.peak_rss, side.tokens_per_second, side.first_step) > 0


@pytest.mark.long
def test_loss_variants_agree_with_float64(tmp_path):
    variants = ["materialized", "fused"]
    if hasattr(F, "linear_cross_entropy"):
        variants.append("F.linear_cross_entropy")
    sizes = "--dim 16 --tokens 64 --vocabulary 300 --calls 1 --dtype fp32"
    run("loss.py", "--only", *variants, *sizes.split(), "--out", tmp_path)
    (part,) = json.loads((tmp_path / "loss.json").read_text()).values()
    for variant in variants:
        # The loss adds 300 terms in fp32.
        assert max(part["variants"][variant]["errors"]) < 1e-5


@pytest.mark.long
def test_growth_prints_the_table_of_its_measurements(tmp_path):
    options = "--only layers --points 1 --repeats 1 --steps 5"
    printed = run("growth.py", *options.split(), "--out", tmp_path)
    assert "| layers | ms/step | expected |" in printed


@pytest.mark.long
@pytest.mark.parametrize("case", ["tiny model, 2 ranks", "bf16 compiled"])
def test_cpu_prints_the_table_of_its_comparison(case, tmp_path):
    printed = run("cpu.py", "--only", case, "--pairs", 1, "--steps", 5, "--out", tmp_path)
    assert f"| {case} |" in printed
    assert "at least" in printed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_torchtitan_trains_the_same_model_on_a_cpu(ranks, tmp_path):
    for package in ("triton", "torchtitan"):
        pytest.importorskip(package, reason="needs torchtitan 0.2.2 and triton")
    text = runs.write_text(tmp_path)
    work = replace(TINY, ranks=ranks)
    ours, theirs = (run(work, text, tmp_path) for run in (runs.run_titanlite, runs.run_torchtitan))

    assert theirs.loss == pytest.approx(ours.loss, rel=0.1)  # as above
    assert min(theirs.peak_rss, theirs.tokens_per_second, theirs.first_step) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small, FSDP", "small, fp32"])
@pytest.mark.long
def test_planned_memory_is_within_five_percent_of_the_allocated_memory(name):
    result = planner.compare_on_cpu(name)
    assert result.error_without_kept == pytest.approx(0, abs=0.05)  # oneDNN's scratch is kept
    assert "commit " in result.about


def test_the_page_has_each_case_and_the_largest_error():
    known = [
        planner.Result(name, 1, 97, 100, 0, about="2 cores, commit 123") for name in planner.CASES
    ]
    text = planner.cpu_page([planner.Result("small", 1, 105, 100, 0), *known[1:]])

    sentences = " ".join(text.split())
    assert re.search(r"largest error is 5\.00%.*median error is 3\.00%", sentences)
    assert text.count("| -3.00% | 0.00 |") == len(planner.CASES) - 1
    assert "commit 123" in text


def test_the_interval_comes_from_the_published_table_and_covers_rows_left_out():
    page = (ROOT / "docs/internals/planner.md").read_text()
    table = page.partition("| plan / published |\n")[2].partition("\n\n")[0]
    # The first line separates the header from the rows.
    _, *rows = table.splitlines()
    ratios = [float(row.split("|")[-2]) for row in rows]

    assert published.ratio_interval(ratios) == pytest.approx((RATIO_LOW, RATIO_HIGH), rel=1e-12)

    num_covered = 0
    for index, ratio in enumerate(ratios):
        low, high = published.ratio_interval(ratios[:index] + ratios[index + 1 :])
        num_covered += low <= ratio <= high

    assert 0.8 <= num_covered / len(ratios) <= 0.97

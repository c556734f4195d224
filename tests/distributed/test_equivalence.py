"""`titanlite prove` finds that every layout computes what one process computes.

These are the layouts of the equivalence tables in docs/internals/equivalence.md. The tests in
tests/mutants check that wrong layouts are found.
"""

from typing import Any

import pytest
from equivalence_rows import (
    COMBINED,
    FEATURES,
    LAYOUTS,
    MODEL,
    REJECTED,
    Row,
    all_rows,
    merge_features,
)
from ranks import titanlite
from small_runs import job_tables
from train_variants import TINY, merge

from titanlite.config.load import dump_config
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.rules import check_layout

SAMPLE = (
    "fsdp2 x tp2",
    "pp2 1F1B",
    "pp2 ZBVZeroBubble",
    "cp2, documents",
    "fsdp2, CPU offload, accumulation 4, each reduced",
)


def job_of_row(row: Row) -> str:
    """Return the job file of a row of the equivalence tables."""
    # Starting data workers would take as long as the training steps.
    overrides = merge(row.overrides, job_tables("dataset.num_workers = 0"))
    if overrides.pop("documents", False):
        overrides = merge(overrides, job_tables("dataset.document_mask = true"))
    if row.ranks == 1:
        overrides = merge(overrides, job_tables("parallelism.data_parallel_shard_degree = 1"))
    return dump_config(JobConfig.model_validate(merge(TINY, {"model": MODEL}, overrides)))


def rows_to_prove() -> list[Any]:
    """Return all rows. Mark rows outside of the sample as long."""
    rows = []
    for row in all_rows():
        marks = () if row.name in SAMPLE else pytest.mark.long
        rows.append(pytest.param(row, id=row.name, marks=marks))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_to_prove())
def test_a_layout_computes_what_one_process_computes(row, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(job_of_row(row))
    command = ("prove", "--job.config_file", job, "--job.dump_folder", tmp_path / "out")
    assert "Proven" in titanlite(*command, ranks=row.ranks)


@pytest.mark.parametrize("layout", COMBINED)
def test_rules_accept_exactly_the_compared_combinations(layout):
    ranks, overrides = LAYOUTS[layout]
    base = job_tables("training.global_batch_size = 8 ; activation_checkpoint.mode = 'none'")
    for feature in FEATURES:
        feature_options = merge_features(feature.split(", "))
        job = JobConfig.model_validate(merge({"model": MODEL}, base, overrides, feature_options))
        problems = list(check_layout(Run(job, ranks)))
        is_rejected = (layout, feature) in REJECTED
        assert bool(problems) == is_rejected, feature

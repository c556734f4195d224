"""What a job means for a world of ranks."""

from pathlib import Path
from typing import Any

import pytest

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig


def run(ranks: int = 1, **sections: Any) -> Run:
    return Run(JobConfig.model_validate(sections), ranks)


def test_a_global_batch_that_is_left_out_is_one_microbatch_of_each_data_parallel_rank() -> None:
    layout = {"tensor_parallel_degree": 2}
    assert run(8, parallelism=layout, training={"local_batch_size": 3}).global_batch_size == 12
    assert run(8, parallelism=layout, training={"local_batch_size": 3}).microbatches == 1
    batches = {"local_batch_size": 3, "global_batch_size": 48}
    assert run(8, parallelism=layout, training=batches).global_batch_size == 48
    assert run(8, parallelism=layout, training=batches).microbatches == 4


def test_the_ranks_that_are_left_share_the_weights() -> None:
    degrees = run(16, parallelism={"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}).degrees
    assert (degrees.shard, degrees.data, degrees.world) == (4, 8, 16)


def test_without_a_pipeline_one_stage_has_all_blocks() -> None:
    assert run().stages == [range(6)]
    assert run(2, parallelism={"pipeline_parallel_degree": 2}).stages == [range(3), range(3, 6)]


@pytest.mark.parametrize(
    ("sections", "data", "validation"),
    [
        ({}, 7, 7),
        ({"dataset": {"seed": 1}}, 1, 7),
        ({"dataset": {"seed": 1}, "validation": {"holdout": 0.1}}, 1, 1),  # chosen among the training data
        ({"dataset": {"seed": 1}, "validation": {"seed": 0}}, 1, 0),
    ],
)
def test_a_seed_of_the_data_wins_over_that_of_training(sections: dict[str, Any], data: int, validation: int) -> None:
    found = run(training={"seed": 7}, **sections)
    assert (found.data_seed, found.validation_seed) == (data, validation)


def test_a_component_is_compiled_where_it_is_listed_and_compiling_is_on() -> None:
    listed = {"components": ["loss"]}
    assert run(compile=listed | {"enable": True}).compiles("loss")
    assert not run(compile=listed | {"enable": True}).compiles("model")
    assert not run(compile=listed).compiles("loss")


def test_moments_have_the_dtype_of_the_weights_unless_they_are_given_one() -> None:
    assert run(training={"dtype": "bfloat16"}).state_dtype == "bfloat16"
    assert run(training={"dtype": "bfloat16"}, optimizer={"state_dtype": "float32"}).state_dtype == "float32"


def test_folders() -> None:
    found = run(job={"dump_folder": "out"}, checkpoint={"folder": "saves"})
    assert (found.dump_folder, found.checkpoint_folder) == (Path("out"), Path("out/saves"))
    assert found.tokenizer_path.exists()  # the default comes with the package

"""FLOPs, parameters and bytes of state equal numbers that were computed by hand."""

from dataclasses import replace

import pytest
from small_runs import job_tables

from titanlite.config.flavors import Architecture
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.flops import flops_per_token, num_params, state_bytes

TINY = Architecture(
    dim=8,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=20,
    vocab_size=50,
)


def test_flops_of_a_tiny_model_equal_a_count_by_hand():
    # A block has the matrices query, key, value and output, and three of the feed-forward network.
    block = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 20
    assert num_params(TINY) == 3 * (block + 2 * 8) + 8 + 2 * 50 * 8

    matmuls = 6 * (3 * block + 50 * 8)
    assert flops_per_token(TINY, seq_len=10) == matmuls + 3 * 6 * 10 * 8

    # With the window, queries attend to 3.75 keys on average instead of 5.
    windowed = replace(TINY, sliding_window=5)
    assert flops_per_token(windowed, seq_len=10) == matmuls + 3 * 6 * 7.5 * 8

    # The second block attends to all tokens.
    mixed = replace(windowed, full_attention_interval=3)
    assert flops_per_token(mixed, seq_len=10) == matmuls + 12 * (2 * 3.75 + 5) * 8
    assert flops_per_token(TINY, seq_len=10, is_causal=False) == matmuls + 3 * 12 * 10 * 8
    assert flops_per_token(windowed, seq_len=10, is_causal=False) == matmuls + 3 * 12 * 5 * 8


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        ("", 1, 16),
        ("", 4, 4),
        # Two of the four ranks hold the same shard.
        ("parallelism.data_parallel_replicate_degree = 2", 4, 8),
        (
            "parallelism.tensor_parallel_degree = 2 ; parallelism.pipeline_parallel_degree = 2",
            8,
            2,
        ),
        ("training.dtype = 'bfloat16'", 1, 8),
        ("optimizer.state_dtype = 'bfloat16'", 1, 12),
    ],
)
def test_bytes_of_state_per_parameter_depend_on_dtypes_and_optimizer(options, world_size, expected):
    run = Run(JobConfig.model_validate(job_tables(options)), world_size)
    assert state_bytes(run) == num_params(run.arch) * expected

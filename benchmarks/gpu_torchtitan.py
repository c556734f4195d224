"""Model sizes that torchtitan 0.2.2 lacks, for its option `experimental.custom_import`."""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args  # pyright: ignore[reportMissingImports]

# Llama 3.2 1B but for its tied embeddings, which the torchtitan Llama 3 does not have.
llama3_args["1B"] = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=1024,
    rope_theta=500000,
)

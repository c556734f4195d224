"""Model sizes that torchtitan 0.2.2 lacks, for its option `experimental.custom_import`."""

from torchtitan.models.llama3 import (  # pyright: ignore[reportMissingImports]
    TransformerModelArgs,
    llama3_args,
)

# Llama 3.2 1B with untied embeddings, because the Llama 3 of torchtitan cannot tie them.
llama3_args["1B"] = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=1024,
    rope_theta=500000,
)

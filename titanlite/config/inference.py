"""The settings of `generate` and of `eval`, for Python and the command line. They are here because a command reads and
explains them before torch is imported."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from titanlite.config.options import Options


class Generation(Options):
    """How texts are completed."""

    max_new_tokens: PositiveInt = 100
    """Longest completion, in tokens. It ends earlier if the model ends the document or reaches its max_seq_len."""
    temperature: NonNegativeFloat = 0.8
    """0: take the most likely token each time. 1: sample from the model's probabilities. Higher: more random."""
    top_k: NonNegativeInt = 50
    """Sample from the k most likely tokens only. 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this. 1: from all that top_k leaves."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Texts that end a completion. They are not a part of it."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of the sampling. It is that of each prompt, so a completion does not depend on the other prompts."""
    batch_size: PositiveInt = 8
    """Prompts that are completed at once."""


class Scoring(Options):
    """How a text is scored."""

    window: Annotated[int, Field(ge=2)] | None = None
    """Tokens that the model sees at once. Left out: training.seq_len of its job."""
    stride: PositiveInt | None = None
    """Tokens from the beginning of one window to that of the next, less than a window. A token has at least window -
    stride tokens before it. Left out: half a window."""
    batch_size: PositiveInt = 8
    """Windows per forward pass of a rank."""
    text_column: str = "text"
    """Name of the field that holds the text, in .jsonl and .parquet."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and computation. Left out: float32 on a CPU, and that of the training on a GPU."""

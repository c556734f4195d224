"""The loss of a checkpoint on any text: what `titanlite eval` and `titanlite.evaluate_text` call.

Invariant: the score is that of the exported model under transformers. Every layout of ranks scores the same tokens with
the same tokens before them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.find import known_job, use_newest
from titanlite.checkpoint.folder import Ranks
from titanlite.checkpoint.resume import check_tokenizer, load_checked_weights
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.mistakes import WrongJob
from titanlite.config.options import Scoring
from titanlite.config.run import Run, sequence_divisor
from titanlite.config.schema import JobConfig, Parallelism
from titanlite.data.sources.files import open_source, source_of_file
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.validation import TextWindows, window_batches
from titanlite.load_run import layout_rules, mistake_of, world_size
from titanlite.parallel.forward_backward import build_forward_backward
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.runtime.world import process_group

_SAY_EVERY = 30.0  # seconds


@dataclass(frozen=True)
class Score:
    """How well a model predicts tokens."""

    loss: float
    """Mean cross entropy, in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Cross entropy in bits per byte of text, which is comparable between tokenizers."""

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  perplexity {self.perplexity:,.2f}  bits/byte {self.bits_per_byte:.4f}"


@dataclass(frozen=True)
class TextScore(Score):
    """How well a checkpoint predicts a text."""

    checkpoint: str
    """The step folder that the weights were read from."""
    documents: int
    tokens: int
    """Tokens that were scored: all of each document. The token that begins a document is not among them."""
    bytes: int
    """UTF-8 bytes of the documents."""
    window: int
    stride: int


def evaluate_text(
    checkpoint: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]],
    *,
    parallelism: Parallelism | None = None,
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> TextScore:
    """Score a checkpoint on files: .jsonl (also .gz and .zst), .parquet, any other is text. Under torchrun all ranks
    call it, and all get the score. It starts the world of ranks and ends it.

    Args:
        checkpoint: The folder of one step, the folder of all steps, or the output folder of a run.
        parallelism: The layout of the ranks. None: the weights are sharded over all of them.
        log: Is called with a line of text now and then.
        settings: Those of `config.options.Scoring`: window, stride, batch_size, text_column, dtype, ema.

    Raises:
        UserError: a value is not allowed, a file is missing, or a record cannot be read.
        CheckpointError: there is no good checkpoint, or the model's output is not finite.
    """
    if not data or isinstance(data, str):
        raise UserError("data: a list of files is needed, with one at least.")
    options, files, saved = Scoring(**settings), [Path(file) for file in data], known_job(Path(checkpoint))
    window = options.window or saved.training.seq_len
    stride = options.stride or max(1, window // 2)
    if stride >= window:
        raise UserError(f"--stride {stride}: must be less than the window of {window} tokens, or some are not scored.")
    try:
        sources = [open_source(source_of_file(file, options.text_column)) for file in files]
    except UserError as error:
        raise UserError(str(error).replace("dataset.path =", "--data")) from None
    run = _run_for(saved, options, window, parallelism or Parallelism())
    texts = TextWindows(sources, load_tokenizer(run.tokenizer_path, run.job), window, stride)
    folder, total = _sum_of_losses(run, Path(checkpoint), texts, options.ema, log)
    if not texts.tokens:
        raise UserError(f"--data {files[0]}: there is no text to score.")
    if not math.isfinite(total):
        raise CheckpointError(f"{folder}: the model's output is not finite. Take an older checkpoint.")
    score = vars(make_score(total, texts.tokens, texts.num_bytes))
    counts = {"documents": texts.documents, "tokens": texts.tokens, "bytes": texts.num_bytes}
    return TextScore(**score, **counts, checkpoint=str(folder), window=window, stride=stride)


def make_score(total: float, tokens: int, num_bytes: int) -> Score:
    """The score of `total` nats over so many tokens, which stand for so many bytes."""
    mean = total / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf  # beyond, a float overflows
    return Score(mean, perplexity, total / num_bytes / math.log(2))


def _run_for(saved: JobConfig, options: Scoring, window: int, parallelism: Parallelism) -> Run:
    """The run that scores: the saved model on these ranks, without what only training needs.

    Raises:
        UserError: the window is longer than the model has positions, or the layout does not fit.
    """
    if window > (most := Run(saved).arch.max_seq_len):
        raise UserError(f"--window {window}: the model has {most} positions (model.max_seq_len). Name a smaller one.")
    own = saved.training.mixed_precision_param if torch.cuda.is_available() else "float32"
    dtype, layout = options.dtype or own, Run(JobConfig(parallelism=parallelism), world_size()).degrees
    training = {
        "seq_len": -(-window // sequence_divisor(layout)) * sequence_divisor(layout),
        "local_batch_size": options.batch_size,
        "global_batch_size": options.batch_size * layout.data * layout.pipeline,
        "mixed_precision_param": dtype,
        "dtype": dtype,
        "num_threads": saved.training.num_threads,
    }
    own = {saved.model.architecture, saved.tokenizer.name or ""}  # tables of plugins
    job = saved.model_dump(include={"job", "model", "tokenizer", "comm", *own})
    job |= {"parallelism": parallelism, "training": training, "activation_checkpoint": {"mode": "none"}}
    run = Run(JobConfig.model_validate(job), world_size())
    if problems := list(layout_rules(run)):
        raise WrongJob([mistake_of(run, *problem) for problem in problems], "eval")
    return run


def _sum_of_losses(
    run: Run, checkpoint: Path, texts: TextWindows, averaged: bool, log: Callable[[str], None]
) -> tuple[Path, float]:
    """The step folder that was scored, and its cross entropy summed over all tokens of `texts`, in nats. All ranks call
    it together, and each gets the sum. It starts the world of ranks and ends it.

    Args:
        run: The model and the layout of the ranks. Its rows have at least the length of a window.

    Raises:
        UserError: no such folder, or a record that cannot be read.
        CheckpointError: no good checkpoint, or one of another model or tokenizer.
    """
    with process_group(run.job) as device:
        mesh = build_mesh(run.degrees, device.type)
        sharded = build_model(run, mesh, device, log)
        forward_backward = build_forward_backward(sharded, mesh, run, device)
        ranks = Ranks(run.job.checkpoint.timeout_seconds)

        def load(step_folder: Path) -> Path:
            load_checked_weights(step_folder, sharded.whole, ranks, averaged)
            check_tokenizer(step_folder, texts.tokenizer, run.job.tokenizer.path, run.arch.vocab_size)
            return step_folder

        folder = use_newest(checkpoint, load, check=ranks.check, look=ranks.on_rank0, log=log)
        log(f"{folder}: {run.job.model.flavor}, {run.job.training.dtype} on {run.world_size} x {device.type}")
        total, said = torch.zeros((), dtype=torch.float64, device=device), time.monotonic()
        for batch, _ in window_batches(texts, run, mesh.data_rank, device):
            total += forward_backward.evaluate(batch)
            if time.monotonic() - said > _SAY_EVERY:
                said = time.monotonic()
                log(f"{texts.documents:,} documents, {texts.tokens:,} tokens")
        dist.all_reduce(total, group=mesh.loss_group)
        ranks.close()
        return folder, total.item()

"""Evaluate a checkpoint on text, for `titanlite eval` and `titanlite.evaluate_text`.

Invariant: the exported model gets the same score in transformers. Every parallelism layout scores
the same tokens with the same context.
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

from titanlite.checkpoint.find import find_checkpoints, load_newest_of, read_newest_job
from titanlite.checkpoint.load import check_tokenizer, load_weights, verify_on_all_ranks
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.mistakes import ConfigError
from titanlite.config.options import Scoring
from titanlite.config.run import Degrees, Run, compute_degrees, sequence_divisor
from titanlite.config.schema import SECTIONS, JobConfig, Parallelism
from titanlite.data.sources.files import describe_file, open_source
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.validation import TextWindows, window_batches
from titanlite.load_run import read_world_size
from titanlite.observe.flops import num_params
from titanlite.parallel.forward_backward import build_forward_backward
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.rules import check_layout, make_mistake
from titanlite.runtime.rank_group import RankGroup
from titanlite.runtime.world import process_group

_LOG_SECONDS = 30.0  # seconds between progress messages


@dataclass(frozen=True)
class Score:
    """Metrics of how well a model predicts tokens. Lower is better for all of them."""

    loss: float
    """Mean cross entropy in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Cross entropy in bits per byte of text, which is comparable between tokenizers."""

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}  perplexity {self.perplexity:,.2f}  bits/byte "
            f"{self.bits_per_byte:.4f}"
        )


@dataclass(frozen=True)
class TextScore(Score):
    """Score of a checkpoint on a text, the size of the text, and the settings of the evaluation."""

    checkpoint: str
    """Path of the step folder that the weights were loaded from."""
    documents: int
    """Number of documents."""
    tokens: int
    """Number of scored tokens. The first token of each document is context and is not scored."""
    bytes: int
    """Number of bytes of the documents in UTF-8."""
    window: int
    """Number of tokens per sequence."""
    stride: int
    """Number of tokens between the starts of consecutive windows."""


def evaluate_text(
    checkpoint: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]],
    *,
    parallelism: Parallelism | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> TextScore:
    """Evaluate a checkpoint on text files and return the loss, perplexity and bits per byte.

    Long documents are scored in overlapping windows. Under torchrun, call this function on all
    ranks. It creates and destroys the process group.

    Args:
        checkpoint: Step folder, checkpoint folder, or output folder of a run. The newest undamaged
            checkpoint is used.
        data: Files to score: .jsonl (also compressed as .gz or .zst) and .parquet. Other files are
            read as plain text.
        parallelism: Layout of the ranks. By default, parameters are sharded over all ranks.
        tokenizer: Tokenizer file. Defaults to the tokenizer of the checkpoint.
        log: Called with one line of text for each progress message.
        settings: Fields of `config.options.Scoring`: window, stride, batch_size, text_column,
            dtype, ema.

    Raises:
        UserError: If a setting is invalid, a file is missing, or a record cannot be read.
        CheckpointError: If there is no usable checkpoint, or the output of the model is not finite.
    """
    if not data or isinstance(data, str):
        raise UserError("data must be a list of at least one file.")
    options = Scoring(**settings)
    tokenizer_path = None if tokenizer is None else Path(tokenizer)
    saved_job = read_newest_job(Path(checkpoint), tokenizer_path)
    window = options.window or saved_job.training.seq_len
    stride = options.stride or max(1, window // 2)
    if stride >= window:
        raise UserError(f"--stride {stride}: must be less than the window of {window} tokens.")

    files = [Path(file) for file in data]
    try:
        sources = [open_source(describe_file(file, options.text_column)) for file in files]
    except UserError as error:  # the message starts with "dataset.path = 'a.txt'"
        raise UserError(str(error).replace("dataset.path =", "--data")) from None

    run = _build_run(saved_job, options, window, parallelism or Parallelism())
    texts = TextWindows(sources, load_tokenizer(run.tokenizer_path, run.job), window, stride)
    folder, total_loss = _sum_losses(run, Path(checkpoint), texts, options.ema, log)
    if not texts.tokens:
        raise UserError(f"--data {files[0]}: has no text to score.")
    if not math.isfinite(total_loss):
        problem = "the output of the model is not finite. Use an older checkpoint."
        raise CheckpointError(f"{folder}: {problem}")

    score = make_score(total_loss, texts.tokens, texts.num_bytes)
    return TextScore(
        **vars(score),
        checkpoint=str(folder),
        documents=texts.documents,
        tokens=texts.tokens,
        bytes=texts.num_bytes,
        window=window,
        stride=stride,
    )


def make_score(total: float, tokens: int, num_bytes: int) -> Score:
    """Compute the loss, perplexity and bits per byte of a model on a text.

    Args:
        total: Cross entropy in nats, summed over all tokens.
        tokens: Number of scored tokens.
        num_bytes: Number of bytes of the text in UTF-8.
    """
    mean = total / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf  # larger values overflow
    return Score(mean, perplexity, total / num_bytes / math.log(2))


def _build_run(
    saved_job: JobConfig, options: Scoring, window: int, parallelism: Parallelism
) -> Run:
    """Build the run that evaluates a saved model on all ranks, and check its options.

    Args:
        saved_job: Job of the checkpoint.
        options: Options of the evaluation.
        window: Number of tokens per sequence.
        parallelism: Layout of the ranks.

    Raises:
        UserError: If the window exceeds the maximum sequence length of the model, or the layout is
            invalid.
    """
    max_window = Run(saved_job).arch.max_seq_len
    if window > max_window:
        raise UserError(f"--window {window}: must be at most model.max_seq_len = {max_window}.")

    world_size = read_world_size()
    degrees = compute_degrees(parallelism, world_size)
    training = _make_training_section(saved_job, options, window, degrees)
    run = Run(_make_job(saved_job, parallelism, training), world_size)
    problems = list(check_layout(run))
    if problems:
        raise ConfigError([make_mistake(run, problem) for problem in problems], "eval")
    return run


def _make_job(
    saved_job: JobConfig, parallelism: Parallelism, training: dict[str, Any]
) -> JobConfig:
    """Create the job of an evaluation from the job that trained the model.

    Args:
        saved_job: Job that trained the model.
        parallelism: Layout of the ranks.
        training: Section [training] of the evaluation.
    """
    # A plugin architecture or tokenizer has its options in a section with its name. A built-in one
    # has no such section.
    names = {saved_job.model.architecture, saved_job.tokenizer.name}
    plugin_sections = SECTIONS.keys() & names

    # Keep these sections of the saved job. [comm] contains the timeouts of collectives.
    sections = saved_job.model_dump(include={"job", "tokenizer", "comm", *plugin_sections})

    # The evaluation may run on hardware that does not support the attention backend of training.
    sections["model"] = saved_job.model.model_copy(update={"attention_backend": "auto"})
    sections["parallelism"] = parallelism
    sections["activation_checkpoint"] = {"mode": "none"}
    sections["training"] = training
    return JobConfig.model_validate(sections)


def _make_training_section(
    saved_job: JobConfig, options: Scoring, window: int, degrees: Degrees
) -> dict[str, Any]:
    """Create the section [training] for an evaluation: sequence length, batch sizes and dtype.

    Args:
        saved_job: Job that trained the model.
        options: Options of the evaluation.
        window: Number of tokens per sequence. It is rounded up if the layout requires it.
        degrees: Parallelism degrees of the evaluation.
    """
    # Context and tensor parallel ranks divide each sequence, so round up its length.
    divisor = sequence_divisor(degrees)
    sequence_length = math.ceil(window / divisor) * divisor

    # A data-parallel rank scores one batch at a time. With a pipeline, it scores one batch per
    # pipeline rank at a time, to keep all pipeline ranks busy.
    global_batch_size = options.batch_size * degrees.data * degrees.pipeline

    dtype = options.dtype or _default_dtype(saved_job)
    return {
        "seq_len": sequence_length,
        "local_batch_size": options.batch_size,
        "global_batch_size": global_batch_size,
        "mixed_precision_param": dtype,
        "dtype": dtype,
        "num_threads": saved_job.training.num_threads,
    }


def _default_dtype(saved_job: JobConfig) -> str:
    """Return the default dtype of an evaluation.

    On a CPU, this is float32. On a GPU, it is the compute dtype of the training job.
    """
    if not torch.cuda.is_available():
        return "float32"
    trained_run = Run(saved_job).resolve_compute_dtype(on_gpu=True)
    return trained_run.job.training.mixed_precision_param


def _sum_losses(
    run: Run, checkpoint: Path, texts: TextWindows, use_ema: bool, log: Callable[[str], None]
) -> tuple[Path, float]:
    """Load a checkpoint and sum the cross entropy of its model over all tokens of `texts`.

    Call this on all ranks.

    Args:
        run: Run that determines the model and the layout of the ranks.
        checkpoint: Folder to search for the newest undamaged checkpoint.
        texts: Windows of text to score. This also updates its counters, such as `texts.tokens`.
        use_ema: Whether to use the exponential moving average of the weights.
        log: Called with one line of text for each progress message.

    Returns:
        Step folder that the weights were loaded from, and the summed cross entropy in nats.

    Raises:
        UserError: If the folder does not exist, or a record cannot be read.
        CheckpointError: If there is no usable checkpoint of this model and tokenizer.
    """
    with process_group(run.job) as device:
        mesh = build_mesh(run.degrees, device.type)
        sharded = build_model(run, mesh, device, log)
        forward_backward = build_forward_backward(sharded, mesh, run, device)
        ranks = RankGroup(run.job.checkpoint.timeout_seconds)

        # `load_newest_of` calls this for the newest step and, if that is damaged, for older steps.
        def load_step(step_folder: Path) -> Path:
            verify_on_all_ranks(step_folder, ranks)
            load_weights(step_folder, sharded.whole, ranks, use_ema)
            tokenizer_name = run.job.tokenizer.path
            check_tokenizer(step_folder, texts.tokenizer, tokenizer_name, run.arch.vocab_size)
            return step_folder

        step_folders = ranks.run_on_rank0(lambda: find_checkpoints(checkpoint))
        folder = load_newest_of(step_folders, load_step, log)
        size = num_params(run.arch)
        devices = f"{run.world_size} x {device.type}"
        log(f"{folder}: {size:,} parameters, {run.job.training.dtype} on {devices}")

        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        last_log = time.monotonic()
        for batches in window_batches(texts, run, mesh.data_rank, device):
            total_loss += forward_backward.evaluate([batch.microbatch for batch in batches])
            if time.monotonic() - last_log > _LOG_SECONDS:
                last_log = time.monotonic()
                log(f"{texts.documents:,} documents, {texts.tokens:,} tokens")
        dist.all_reduce(total_loss, group=mesh.loss_group)
        ranks.close()
        return folder, total_loss.item()

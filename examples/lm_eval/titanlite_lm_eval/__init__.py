"""Run tasks of lm-evaluation-harness during training.

See https://github.com/EleutherAI/lm-evaluation-harness. The sharded model of the run is evaluated
on all ranks: each rank sends the same requests in the same order, computes its share of the
sequences, and receives all results. Evaluation does not change the training state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager, get_task_dict  # pyright: ignore[reportMissingImports]
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from titanlite import Trainer, register
from titanlite.config.errors import UserError
from titanlite.config.schema import ListOf, PathText, Section
from titanlite.data.batch import Window
from titanlite.data.validation import TextWindows, window_batches
from titanlite.hooks.hook import Hook
from titanlite.hooks.samples import LogitsChunk, process_logits


class Evaluation(Section):
    """Options of the evaluation hook."""

    on_resume: ClassVar = "compatible"

    freq: PositiveInt = 1000
    """Steps between evaluations, a multiple of metrics.log_freq. The last step always counts."""
    tasks: ListOf[str] = Field(default=(), min_length=1)
    """Tasks or groups, such as ["hellaswag", "my_text"], that score given answers or texts.

    Tasks that require generated text are rejected.
    """
    include_path: PathText | None = None
    """Folder with additional task files."""
    limit: NonNegativeInt = 0
    """Maximum number of requests per task. 0 means all."""


@register("hook", "evaluation", Evaluation)
class Benchmarks(Hook):
    """Evaluates the tasks every `evaluation.freq` steps and adds the scores to the metrics.

    Raises:
        UserError: If a task is unknown, its data cannot be read, or it requires generated text.
    """

    observes_only = True

    def __init__(self, config: Evaluation) -> None:
        self._config = config

    def built(self, trainer: Trainer) -> None:
        """Load the tasks."""
        self._trainer = trainer
        self._last_step = trainer.job.training.steps
        log_freq = trainer.job.metrics.log_freq
        if self._config.freq % log_freq != 0 or not self._config.tasks:
            raise UserError(
                "[evaluation] needs tasks, and a freq that is a multiple of metrics.log_freq = "
                f"{log_freq}."
            )
        self._model = _HarnessModel(trainer)
        self._tasks = _load_tasks(self._config)

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Return the scores after an evaluation step."""
        if step % self._config.freq != 0 and step != self._last_step:
            return {}
        with self._trainer.evaluation_mode():
            report: Any = evaluate(
                self._model,
                self._tasks,
                self._config.limit or None,
                bootstrap_iters=0,
                log_samples=False,
            )
        # The harness returns the report only on the first rank of a node.
        results = report["results"] if report else {}
        return {"benchmarks": _name_scores(results)}


def _load_tasks(config: Evaluation) -> Mapping[Any, Any]:
    """Load the tasks and their data.

    Raises:
        UserError: If a task is unknown, its data cannot be read, or it requires generated text.
    """
    try:
        manager = TaskManager(include_path=config.include_path)
        tasks = get_task_dict([*config.tasks], manager)
    except Exception as error:  # the harness raises any kind of error
        raise UserError(f"evaluation.tasks: {type(error).__name__}: {error}") from error

    for task in _flatten_groups(tasks):
        task.set_fewshot_seed(seed=1234)  # the default of the lm_eval command
        if task.OUTPUT_TYPE == "generate_until":
            raise UserError(
                f"evaluation.tasks: {task.config.task} requires generated text. Leave it out, and "
                "run it on an exported checkpoint (`titanlite export`)."
            )
    return tasks


def _flatten_groups(tasks: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield all tasks, including the tasks in groups."""
    for task in tasks.values():
        if isinstance(task, dict):
            yield from _flatten_groups(task)
        else:
            yield task


def _name_scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return all scores with names such as "hellaswag/acc", without their standard errors.

    Args:
        results: Task -> key -> value. The key of a score is its name, a comma and its filter.
    """
    scores = {}
    for task, values in results.items():
        for key, value in values.items():
            if "," in key and "_stderr" not in key:
                name = f"{task}/{key}"
                scores[name.removesuffix(",none")] = value
    return scores


class _HarnessModel(LM):
    """Computes log-likelihoods for the harness.

    Each text starts with the token that starts a document.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer
        self._tokenizer = trainer.tokenizer
        self._seq_len = trainer.job.training.seq_len

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Score the answer of each request, given its context."""
        windows = []
        for request in requests:
            context, answer = request.args
            windows.append(self._make_window(context, answer))
        return self._score_windows(windows)

    def _make_window(self, context: str, answer: str) -> Window:
        """Tokenize a context and an answer, and leave out the start of a text that is too long."""
        first_id = self._tokenizer.bos_id
        if first_id is None:
            first_id = self._tokenizer.eos_id
        # Tokenizers join a space with the word after it, so the answer begins with the space.
        context_ids = self._tokenizer.encode(context.rstrip())
        text_ids = self._tokenizer.encode(context + answer)
        window_ids = [first_id, *text_ids][-(self._seq_len + 1) :]
        num_scored = min(len(text_ids) - len(context_ids), len(window_ids) - 1)
        return Window(np.array(window_ids), num_scored)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Score whole texts with the same windows as `titanlite eval`."""
        windows: list[Window] = []
        window_counts = []
        for request in requests:
            text = cast(Any, [request.args])
            stride = self._seq_len // 2
            text_windows = list(TextWindows(text, self._tokenizer, self._seq_len, stride))
            windows += text_windows
            window_counts.append(len(text_windows))

        scores = iter(self._score_windows(windows))
        totals = []
        for count in window_counts:
            total = 0.0
            for score, _ in islice(scores, count):
                total += score
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Reject requests for generated text, which `_load_tasks` excludes."""
        raise AssertionError("tasks that require generated text are rejected at the start")

    def _score_windows(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Score windows on all ranks.

        Returns:
            For each window the sum of the log-probabilities of its scored tokens, and whether each
            of them is the most likely token.
        """
        trainer = self._trainer
        device = trainer.device
        log_probs = torch.zeros(len(windows), dtype=torch.float64, device=device)
        num_wrong = torch.zeros(len(windows), dtype=torch.float64, device=device)
        # For each microbatch, the indices of its windows.
        window_indices: list[Tensor] = []

        def add_scores(chunk: LogitsChunk) -> None:
            indices = window_indices[chunk.microbatch][chunk.sequences]
            scores = chunk.logits.log_softmax(dim=1)
            label_scores = scores.gather(1, chunk.labels[:, None])[:, 0]
            log_probs.index_add_(0, indices, label_scores.double())
            num_wrong.index_add_(0, indices, (scores.argmax(dim=1) != chunk.labels).double())

        for batches in window_batches(windows, trainer.run, trainer.mesh.data_rank, device):
            window_indices.clear()
            for batch in batches:
                indices = torch.tensor(batch.window_indices, dtype=torch.int64, device=device)
                window_indices.append(indices)
            process_logits(trainer, [batch.microbatch for batch in batches], add_scores)
            trainer.report_progress()

        totals = torch.stack((log_probs, num_wrong))
        dist.all_reduce(totals, group=trainer.mesh.loss_group)
        return [(log_prob, wrong == 0) for log_prob, wrong in totals.T.tolist()]

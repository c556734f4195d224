"""Run tasks of lm-evaluation-harness during training.

See https://github.com/EleutherAI/lm-evaluation-harness. The sharded model of the run is evaluated
on all ranks: each rank sends the same requests in the same order, computes its share of the
sequences, and receives all results. Evaluation does not change the training state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from titanlite.hooks.samples import use_logits


class Evaluation(Section):
    """Options of the evaluation hook."""

    on_resume: ClassVar = "compatible"

    freq: PositiveInt = 1000
    """Steps between evaluations, a multiple of metrics.log_freq. The last step is evaluated too."""
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

    def __init__(self, keys: Evaluation) -> None:
        self._config = keys

    def built(self, trainer: Trainer) -> None:
        self._steps, log_freq = trainer.job.training.steps, trainer.job.metrics.log_freq
        if self._config.freq % log_freq or not self._config.tasks:
            raise UserError(
                "[evaluation] needs tasks, and a freq that is a multiple of metrics.log_freq = "
                f"{log_freq}."
            )
        self._trainer = trainer
        self._model = _Model(trainer)
        try:
            self._tasks = get_task_dict(
                [*self._config.tasks], TaskManager(include_path=self._config.include_path)
            )
        except Exception as error:  # the harness raises any kind of error
            raise UserError(f"evaluation.tasks: {type(error).__name__}: {error}") from error
        for task in _leaves(self._tasks):
            task.set_fewshot_seed(seed=1234)  # as its own program does
            if task.OUTPUT_TYPE == "generate_until":
                remedy = "Leave it out, and run it on an exported checkpoint (`titanlite export`)."
                raise UserError(
                    f"evaluation.tasks: {task.config.task} asks the model to write. {remedy}"
                )

    def numbers(self, step: int) -> Mapping[str, Any]:
        if step % self._config.freq and step != self._steps:
            return {}
        with self._trainer.evaluation_mode():
            found: Any = evaluate(
                self._model,
                self._tasks,
                self._config.limit or None,
                bootstrap_iters=0,
                log_samples=False,
            )
        results = found["results"] if found else {}  # the first rank of a machine has them
        scores = (
            (f"{task}/{key}", value)
            for task, values in results.items()
            for key, value in values.items()
        )
        return {
            "benchmarks": {
                k.removesuffix(",none"): v for k, v in scores if "," in k and "_stderr" not in k
            }
        }


def _leaves(tasks: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield all tasks, including the tasks in groups."""
    for task in tasks.values():
        yield from _leaves(task) if isinstance(task, dict) else (task,)


class _Model(LM):
    """Computes log-likelihoods for the harness.

    Each text starts with the token that starts a document.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer, self._tokenizer = trainer, trainer.tokenizer
        self._length = trainer.job.training.seq_len

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        begin, encode = self._tokenizer.bos_id, self._tokenizer.encode
        windows = []
        for context, answer in (request.args for request in requests):
            head, whole = (
                encode(context.rstrip()),
                encode(context + answer),
            )  # a space belongs to the word after it
            tokens = [self._tokenizer.eos_id if begin is None else begin, *whole][
                -(self._length + 1) :
            ]
            windows.append(Window(np.array(tokens), min(len(whole) - len(head), len(tokens) - 1)))
        return self._scores(windows)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Score whole texts with the same windows as `titanlite eval`."""
        windows, owners, sums = list[Window](), list[int](), np.zeros(len(requests))
        for i, request in enumerate(requests):
            windows += TextWindows(
                cast(Any, [request.args]), self._tokenizer, self._length, self._length // 2
            )
            owners += [i] * (len(windows) - len(owners))
        np.add.at(sums, owners, [score for score, _ in self._scores(windows)])
        return sums.tolist()

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        raise AssertionError("refused before the start")

    def _scores(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Score windows.

        Returns:
            For each window the sum of the log-probabilities of its scored tokens, and whether each
            of them is the most likely token.
        """
        trainer, device, places = self._trainer, self._trainer.device, list[Tensor]()
        sums = torch.zeros(
            2, len(windows), dtype=torch.float64, device=device
        )  # and how many tokens are not

        def add(number: int, row: Tensor, labels: Tensor, logits: Tensor) -> None:
            window, scores = places[number][row], logits.log_softmax(dim=1)
            sums[0].index_add_(0, window, scores.gather(1, labels[:, None])[:, 0].double())
            sums[1].index_add_(0, window, (scores.argmax(dim=1) != labels).double())

        for microbatches, numbers in window_batches(
            windows, trainer.run, trainer.mesh.data_rank, device
        ):
            places[:] = [torch.tensor(each, dtype=torch.int64, device=device) for each in numbers]
            use_logits(trainer, microbatches, add)
            self._trainer.report_progress()
        dist.all_reduce(sums, group=trainer.mesh.loss_group)
        return [(score, not others) for score, others in sums.T.tolist()]

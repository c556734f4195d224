"""[evaluation]: tasks of lm-evaluation-harness while the model trains (https://github.com/EleutherAI/lm-evaluation-harness).

Invariant: the sharded model of the run answers, with all ranks taking part. Each rank asks the same questions in the
same order, computes its share of the rows and gets all answers. Training does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports] - of the extra `eval`
from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager, get_task_dict  # pyright: ignore[reportMissingImports]
from torch import Tensor

from titanlite.config.errors import UserError
from titanlite.data.batch import Window
from titanlite.data.validation import TextWindows, window_batches
from titanlite.hooks.hook import Hook, Training
from titanlite.hooks.samples import use_logits


class Benchmarks(Hook):
    """Runs the tasks every evaluation.freq steps and at the end, and adds their numbers to the metrics of that step.

    Args:
        alive: Is called now and then, because a time can take longer than a step may.

    Raises:
        UserError: A task is unknown, its data cannot be read, or it asks the model to write.
    """

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive = alive

    def built(self, training: Training) -> None:
        self._config, self._steps = training.run.job.evaluation, training.run.job.training.steps
        self._model = _Model(training, self._alive)
        try:
            self._tasks = get_task_dict([*self._config.tasks], TaskManager(include_path=self._config.include_path))
        except Exception as error:  # the harness raises any kind of error
            raise UserError(f"evaluation.tasks: {type(error).__name__}: {error}") from error
        for task in _leaves(self._tasks):
            task.set_fewshot_seed(seed=1234)  # as its own program does
            if task.OUTPUT_TYPE == "generate_until":
                remedy = "Leave it out, and run it on an exported checkpoint (`titanlite export`)."
                raise UserError(f"evaluation.tasks: {task.config.task} asks the model to write. {remedy}")

    def numbers(self, step: int) -> Mapping[str, Any]:
        if step % self._config.freq and step != self._steps:
            return {}
        found: Any = evaluate(self._model, self._tasks, self._config.limit, bootstrap_iters=0, log_samples=False)
        results = found["results"] if found else {}  # the first rank of a machine has them
        scores = ((f"{task}/{key}", value) for task, values in results.items() for key, value in values.items())
        return {"benchmarks": {k.removesuffix(",none"): v for k, v in scores if "," in k and "_stderr" not in k}}


def _leaves(tasks: Mapping[Any, Any]) -> Iterator[Any]:
    """The tasks, also those of groups."""
    for task in tasks.values():
        yield from _leaves(task) if isinstance(task, dict) else (task,)


class _Model(LM):
    """What the harness asks: log-likelihoods. A text begins with the token that begins a document, as in training."""

    def __init__(self, training: Training, alive: Callable[[], None]) -> None:
        super().__init__()
        self._training, self._alive, self._tokenizer = training, alive, training.tokenizer
        self._length = training.run.job.training.seq_len

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        begin, encode = self._tokenizer.bos_id, self._tokenizer.encode
        windows = []
        for context, answer in (request.args for request in requests):
            head, whole = encode(context.rstrip()), encode(context + answer)  # a space belongs to the word after it
            tokens = [self._tokenizer.eos_id if begin is None else begin, *whole][-(self._length + 1) :]
            windows.append(Window(np.array(tokens), min(len(whole) - len(head), len(tokens) - 1)))
        return self._scores(windows)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The windows are those of `titanlite eval`."""
        windows, owners, sums = list[Window](), list[int](), np.zeros(len(requests))
        for i, request in enumerate(requests):
            windows += TextWindows(cast(Any, [request.args]), self._tokenizer, self._length, self._length // 2)
            owners += [i] * (len(windows) - len(owners))
        np.add.at(sums, owners, [score for score, _ in self._scores(windows)])
        return sums.tolist()

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        raise AssertionError("refused before the start")

    def _scores(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Of each window: the sum of the log-probabilities of its scored tokens, and whether each is the likeliest."""
        training, device, places = self._training, self._training.device, list[Tensor]()
        sums = torch.zeros(2, len(windows), dtype=torch.float64, device=device)  # and how many tokens are not

        def add(number: int, row: Tensor, labels: Tensor, logits: Tensor) -> None:
            window, scores = places[number][row], logits.log_softmax(dim=1)
            sums[0].index_add_(0, window, scores.gather(1, labels[:, None])[:, 0].double())
            sums[1].index_add_(0, window, (scores.argmax(dim=1) != labels).double())

        for microbatches, numbers in window_batches(windows, training.run, training.mesh.data_rank, device):
            places[:] = [torch.tensor(each, dtype=torch.int64, device=device) for each in numbers]
            use_logits(training, microbatches, add)
            self._alive()
        dist.all_reduce(sums, group=training.mesh.loss_group)
        return [(score, not others) for score, others in sums.T.tolist()]

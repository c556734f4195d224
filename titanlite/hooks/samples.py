"""[samples]: prompts that the model completes while it trains, to be read by a person.

Invariant: training does not notice. The sharded model of the run completes them itself, with all ranks taking part, and
every layout of ranks gives the same logits up to the order of sums.

There is no key-value cache, because no layout has one: each token costs a forward pass over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titanlite.completion import Completion, Decoding, choose
from titanlite.data.batch import IGNORED, Window, padded_length, padded_microbatch
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.optim.loss import fp32_logits


class Samples(Hook):
    """Completes the prompts every samples.freq steps.

    Args:
        alive: Is called after each token, because all of them can take longer than a step may.
    """

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive = alive

    def built(self, training: Training) -> None:
        self._training, self._run, self._tokenizer = training, training.run, training.tokenizer
        self._config, self._mesh, self._device = training.run.job.samples, training.mesh, training.device
        self._seq_len = training.run.job.training.seq_len

    def started(self, step: int) -> None:
        self._done = step  # the last one that needs no samples any more

    def act(self, step: int, asked: Request) -> None:
        if step == self._done or step % self._config.freq:
            return
        self._done = step
        completions = self.complete()
        self._training.tell(Hook.sampled, step, [asdict(completion) for completion in completions])
        for completion in completions:
            self._training.log(f"sample after step {step}: {completion.prompt}{completion.completion}")

    def complete(self) -> list[Completion]:
        """The completions, in the order of the prompts. There are none if the logits are not finite, because a guard
        stops such a run."""
        config, tokenizer = self._config, self._tokenizer
        decodings = [Decoding(text, tokenizer, config.max_new_tokens, self._seq_len) for text in config.prompts]
        generators = [torch.Generator().manual_seed(config.seed) for _ in decodings]
        while going_on := [i for i, decoding in enumerate(decodings) if decoding.goes_on]:
            logits = self._next_logits([decodings[i].ids for i in going_on])[:, : tokenizer.vocab_size]
            if not logits.isfinite().all():
                return []
            for i, of_row in zip(going_on, logits, strict=True):
                decodings[i].push(choose(of_row, config.temperature, config.top_k, generators[i]))
            self._alive()
        return [decoding.completion() for decoding in decodings]

    def _next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits (N, V) of the tokens after N rows, in fp32 on the CPU of every rank.

        Every data-parallel rank computes all rows. The logits of a row are on the ranks that have the row's last token
        and a part of the vocabulary, so the largest value over all ranks is the logit.
        """
        size, length = self._run.job.training.local_batch_size, padded_length(self._run, max(map(len, rows)))
        windows = [Window(np.append(row, 0), 1) for row in rows]  # a label where the next token is asked for
        parts = [windows[i : i + size] for i in range(0, len(rows), size)]
        microbatches = [padded_microbatch(part, size, length, self._device) for part in parts]
        logits = torch.full((len(parts) * size, self._run.arch.vocab_size), -torch.inf, device=self._device)
        blocks = iter(logits.split(size))

        def keep(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
            if (block := next(blocks, None)) is not None:  # a pipeline's schedule adds microbatches at the end
                self._fill(block, hidden, weight, labels)
            return torch.zeros_like(scale)

        self._training.forward_backward.evaluate(microbatches, keep)
        dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=self._mesh.world_group)
        return logits[: len(rows)].cpu()

    def _fill(self, logits: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        """Write into `logits` (B, V) those at the labels that this rank has, of the classes that it has."""
        first_class = 0
        if self._mesh.tensor is not None:
            assert isinstance(hidden, DTensor)
            assert isinstance(weight, DTensor)
            first_class = -(-weight.shape[0] // self._mesh.tensor.size()) * self._mesh.tensor.get_local_rank()
            hidden, weight = hidden.redistribute(placements=[Replicate()]).to_local(), weight.to_local()
        row, place = (labels != IGNORED).nonzero(as_tuple=True)
        if len(row):
            logits[row, first_class : first_class + len(weight)] = fp32_logits(hidden[row, place], weight)

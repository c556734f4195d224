"""[samples]: prompts that the model completes while it trains, to be read by a person.

Invariant: training does not notice. The sharded model of the run completes them itself, with all ranks taking part, and
every layout of ranks gives the same logits up to the order of sums.

There is no key-value cache, because no layout has one: each token costs a forward pass over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.completion import Completion, Decoding, choose
from titanlite.data.batch import IGNORED, Window, padded_length, padded_microbatch
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.optim.loss import fp32_logits
from titanlite.parallel.forward_backward import Microbatch


class Samples(Hook):
    """Completes the prompts every samples.freq steps."""

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
            self._training.alive()
        return [decoding.completion() for decoding in decodings]

    def _next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits (N, V) of the tokens after N rows, in fp32 on the CPU of every rank.

        Every data-parallel rank computes all rows. The logits of a row are on the ranks that have the row's last token,
        so the largest value over all ranks is the logit.
        """
        size, length = self._run.job.training.local_batch_size, padded_length(self._run, max(map(len, rows)))
        windows = [Window(np.append(row, 0), 1) for row in rows]  # a label where the next token is asked for
        parts = [windows[i : i + size] for i in range(0, len(rows), size)]
        microbatches = [padded_microbatch(part, size, length, self._device) for part in parts]
        logits = torch.full((len(parts), size, self._run.arch.vocab_size), -torch.inf, device=self._device)

        def fill(number: int, row: Tensor, labels: Tensor, found: Tensor) -> None:
            logits[number, row] = found

        use_logits(self._training, microbatches, fill)
        dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=self._mesh.world_group)
        return logits.flatten(0, 1)[: len(rows)].cpu()


def use_logits(
    training: Training, microbatches: Sequence[Microbatch], use: Callable[[int, Tensor, Tensor, Tensor], None]
) -> None:
    """Run the model forward, and hand over the logits of the tokens with a label, at most 256 at once.

    Args:
        use: Gets the number of the microbatch, and of n tokens their rows (n,), labels (n,) and logits (n, V) in fp32,
            on the ranks that have the token. All tensor ranks have it.
    """
    mesh, numbers = training.mesh.tensor, iter(range(len(microbatches)))

    def keep(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        number, classes = next(numbers, None), weight.shape[0]
        if mesh is not None:
            hidden = cast(DTensor, hidden).redistribute(placements=[Replicate()]).to_local()
            weight = cast(DTensor, weight).to_local()
        tokens = torch.stack((labels != IGNORED).nonzero(as_tuple=True))
        for at in tokens.split(256, dim=1) if number is not None else ():  # a pipeline's schedule adds microbatches
            logits = fp32_logits(hidden[*at], weight)
            if mesh is not None:
                whole = torch.Size((len(logits), classes)), (classes, 1)
                logits = DTensor.from_local(logits, mesh, [Shard(1)], shape=whole[0], stride=whole[1]).full_tensor()
            use(cast(int, number), at[0], labels[*at], logits)
        return torch.zeros_like(scale)

    training.forward_backward.evaluate(microbatches, keep)

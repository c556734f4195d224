"""Complete prompts with the current weights during training, so that a person can read the result.

Invariant: Sampling does not affect training. The ranks compute the completions together with their
sharded model, and every layout gives the same logits up to the order of sums.

There is no key-value cache, because the training layouts do not support one. Each new token costs a
forward pass over the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.completion import Completion, Decoding, sample_token
from titanlite.data.batch import Window, padded_length, padded_microbatch
from titanlite.hooks.hook import Hook, Request
from titanlite.model.llama import soft_cap
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch
from titanlite.optim.losses import fp32_logits

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer


class Samples(Hook):
    """Generates text for the prompts of the job every `samples.freq` steps, and logs it."""

    def built(self, trainer: Trainer) -> None:
        """Keep references to the parts of the trainer that generate text."""
        self._trainer = trainer
        self._run = trainer.run
        self._tokenizer = trainer.tokenizer
        self._config = trainer.job.samples
        self._device = trainer.device

    def started(self, step: int) -> None:
        """Do not sample the step of the loaded checkpoint again."""
        self._sampled_step = step

    def act(self, step: int, request: Request) -> None:
        """Every `samples.freq` steps, complete the prompts, log the texts and notify all hooks."""
        is_due = step % self._config.freq == 0
        if not is_due or step == self._sampled_step:
            return

        self._sampled_step = step
        with self._trainer.evaluation_mode():
            completions = self.complete()
        samples = [asdict(completion) for completion in completions]
        if self._trainer.records is not None:
            self._trainer.records.log_samples(step, samples)
        for hook in self._trainer.hooks:
            hook.sampled(step, samples)
        for completion in completions:
            self._trainer.log(
                f"sample after step {step}: {completion.prompt}{completion.completion}"
            )

    def complete(self) -> list[Completion]:
        """Generate a completion for each prompt with the current weights.

        All ranks must call this together. They compute the same completions.

        Returns:
            The completions, in the order of the prompts. Empty if the logits are not finite.
        """
        config = self._config
        seq_len = self._run.job.training.seq_len
        decodings = [
            Decoding(prompt, self._tokenizer, config.max_new_tokens, seq_len)
            for prompt in config.prompts
        ]
        # One generator per prompt, so that a completion does not depend on the other prompts.
        generators = [torch.Generator().manual_seed(config.seed) for _ in decodings]

        unfinished = list(zip(decodings, generators, strict=True))
        while unfinished:
            logits = self._next_logits([decoding.ids for decoding, _ in unfinished])
            if not logits.isfinite().all():
                return []  # a guard stops the run

            for (decoding, generator), token_logits in zip(unfinished, logits, strict=True):
                token = sample_token(token_logits, config.temperature, config.top_k, generator)
                decoding.push(token)
            unfinished = [pair for pair in unfinished if pair[0].is_unfinished]
            self._trainer.report_progress()
        return [decoding.completion() for decoding in decodings]

    def _next_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Compute the logits of the token that follows each sequence.

        All ranks must call this together. Each data-parallel rank computes all sequences.

        Args:
            sequences: Token ids of N sequences, which may have different lengths.

        Returns:
            Logits, shape (N, V), in fp32 on the CPU of every rank.
        """
        microbatches = self._pad(sequences)
        # Each rank computes some of the logits, or none, and leaves the others at -inf.
        batch_size = self._run.job.training.local_batch_size
        shape = (len(microbatches), batch_size, self._run.arch.vocab_size)
        logits = torch.full(shape, -torch.inf, device=self._device)
        unfilled = iter(logits)

        def store_logits(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
            """Store the logits of the next microbatch, and return a loss of 0."""
            microbatch_logits = next(unfilled, None)
            if microbatch_logits is not None:  # a pipeline schedule adds empty microbatches
                self._compute_logits(hidden, weight, labels, out=microbatch_logits)
            return torch.zeros_like(scale)

        # This calls the function in place of the loss function, once for each microbatch in order.
        self._trainer.forward_backward.evaluate(microbatches, store_logits)
        dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=self._trainer.mesh.world_group)
        return logits.flatten(0, 1)[: len(sequences), : self._tokenizer.vocab_size].cpu()

    def _pad(self, sequences: Sequence[Sequence[int]]) -> list[Microbatch]:
        """Pad sequences to microbatches in which only the last token of each has a label."""
        windows = [Window(np.append(ids, 0), num_scored=1) for ids in sequences]  # 0 is the label
        batch_size = self._run.job.training.local_batch_size
        length = padded_length(self._run, max(len(ids) for ids in sequences))
        microbatches = []
        for start in range(0, len(windows), batch_size):
            chunk = windows[start : start + batch_size]
            microbatches.append(padded_microbatch(chunk, batch_size, length, self._device))
        return microbatches

    def _compute_logits(self, hidden: Tensor, weight: Tensor, labels: Tensor, out: Tensor) -> None:
        """Compute the logits of the labeled tokens that this rank holds.

        Args:
            hidden: Hidden states of a microbatch, shape (B, T, C). With tensor parallelism, a
                DTensor.
            weight: Output matrix, shape (V, C). With tensor parallelism, a DTensor.
            labels: Labels, shape (B, T), with at most one label per sequence.
            out: Receives the logits, shape (B, V).
        """
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(placements=[Replicate()]).to_local()
        sequences, positions = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
        logits = _whole_logits(hidden[sequences, positions], weight)
        out[sequences] = soft_cap(logits, self._run.arch.logit_softcap)


def _whole_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of the full vocabulary in fp32, shape (n, V).

    Args:
        hidden: Hidden states, shape (n, C).
        weight: Output matrix, shape (V, C). With tensor parallelism, a DTensor sharded along V.
    """
    if not isinstance(weight, DTensor):
        return fp32_logits(hidden, weight)

    # Each rank computes a part of the vocabulary, and an all-gather combines the parts.
    local_logits = fp32_logits(hidden, weight.to_local())  # (n, V / ranks)
    num_classes = weight.shape[0]
    logits = DTensor.from_local(
        local_logits,
        weight.device_mesh,
        [Shard(1)],
        shape=torch.Size((len(hidden), num_classes)),
        stride=(num_classes, 1),
    )
    return logits.full_tensor()

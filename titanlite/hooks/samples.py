"""Complete prompts with the current weights during training, so that users can read the result.

Invariant: Sampling does not affect training. The ranks compute the completions together with the
sharded model. All layouts give the same logits up to the order of floating-point sums.

There is no key-value cache, because the training layouts do not support one. Each new token
requires a forward pass over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titanlite.completion import Completion, Decoding, sample_token
from titanlite.data.batch import Window, padded_length, padded_microbatch
from titanlite.hooks.hook import Hook, Request
from titanlite.model.llama import soft_cap
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch
from titanlite.optim.losses import fp32_logits, gather_logits

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer

LOGITS_CHUNK = 256
"""Number of tokens whose logits are computed at once, to limit memory."""


class LogitsChunk(NamedTuple):
    """Logits of at most `LOGITS_CHUNK` labeled tokens of one microbatch.

    n is the number of tokens, and V is the size of the vocabulary.

    Attributes:
        microbatch: Index of the microbatch.
        sequences: Index of each token's sequence in the microbatch, shape (n,).
        labels: Label of each token, shape (n,).
        logits: Logits in fp32, shape (n, V).
    """

    microbatch: int
    sequences: Tensor
    labels: Tensor
    logits: Tensor


class Samples(Hook):
    """Generates text for the prompts of the job every `samples.freq` steps and logs it."""

    def built(self, trainer: Trainer) -> None:
        """Store the parts of the trainer that are needed to generate text."""
        self._trainer = trainer
        self._run = trainer.run
        self._tokenizer = trainer.tokenizer
        self._config = trainer.job.samples

    def started(self, step: int) -> None:
        """Check whether samples.jsonl already has samples of the loaded step.

        If not, `before_step` generates them if they are due. Step 0 is never sampled.
        """
        is_recorded = self._trainer.has_recorded("samples.jsonl")
        self._sampled_step = step if step == 0 or is_recorded else -1

    def before_step(self, step: int) -> None:
        """Sample the previous step if its samples are due but missing.

        This can happen in the first step after a resume, when the previous step is the loaded one.
        """
        self._sample_if_due(step - 1)

    def act(self, step: int, request: Request) -> None:
        """Sample `step` if this is due. The argument `request` is ignored."""
        self._sample_if_due(step)

    def _sample_if_due(self, step: int) -> None:
        """Complete the prompts in [samples] and log the texts, if this is due after `step`.

        This is due every `samples.freq` steps, unless `step` was already sampled. Also pass the
        texts to all hooks.
        """
        is_due = step % self._config.freq == 0
        if not is_due or step == self._sampled_step:
            return

        self._sampled_step = step
        with self._trainer.evaluation_mode():
            completions = self.complete()
        samples = [asdict(completion) for completion in completions]
        for hook in self._trainer.hooks:
            hook.sampled(step, samples)
        for completion in completions:
            self._trainer.log(
                f"Sample after step {step}: {completion.prompt}{completion.completion}"
            )

    def complete(self) -> list[Completion]:
        """Generate a completion for each prompt with the current weights.

        All ranks must call this together. They compute the same completions.

        Returns:
            The completions, in the order of the prompts. If any logits are not finite, [].
        """
        config = self._config
        seq_len = self._run.job.training.seq_len
        decodings = [
            Decoding(prompt, self._tokenizer, config.max_new_tokens, seq_len)
            for prompt in config.prompts
        ]
        # One generator per prompt, so that a completion does not depend on the other prompts.
        generators = [torch.Generator().manual_seed(config.seed) for _ in decodings]

        while True:
            unfinished = [
                index for index, decoding in enumerate(decodings) if decoding.is_unfinished
            ]
            if not unfinished:
                return [decoding.result() for decoding in decodings]

            logits = self._next_logits([decodings[index].ids for index in unfinished])
            # The model can have more tokens than the tokenizer. Never sample the extra tokens.
            logits = logits[:, : self._tokenizer.vocab_size]
            if not logits.isfinite().all():
                return []  # the weights are broken; the guards report this

            # Sample the next token of each unfinished completion.
            for index, token_logits in zip(unfinished, logits, strict=True):
                generator = generators[index]
                token = sample_token(token_logits, config.temperature, config.top_k, generator)
                decodings[index].push(token)
            self._trainer.report_progress()

    def _next_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Compute the logits of the token that follows each sequence.

        All ranks must call this together. Each data-parallel rank computes all sequences.

        Args:
            sequences: Token IDs of N sequences, which may have different lengths.

        Returns:
            Logits, shape (N, V), in fp32 on the CPU of every rank.
        """
        microbatches = self._create_microbatches(sequences)
        batch_size = self._run.job.training.local_batch_size
        shape = (len(microbatches), batch_size, self._run.arch.vocab_size)
        all_logits = torch.full(shape, -torch.inf, device=self._trainer.device)

        # Each rank fills in the sequences whose last token it holds.
        def fill_in(chunk: LogitsChunk) -> None:
            # A chunk has one row per sequence, because only last tokens have a label.
            all_logits[chunk.microbatch, chunk.sequences] = chunk.logits

        process_logits(self._trainer, microbatches, fill_in)

        # All other sequences are still -inf, so the maximum over the ranks contains all logits.
        dist.all_reduce(all_logits, op=dist.ReduceOp.MAX)

        # Remove the empty sequences that may pad the last microbatch.
        logits = all_logits.flatten(0, 1)[: len(sequences)]
        return logits.cpu()

    def _create_microbatches(self, sequences: Sequence[Sequence[int]]) -> list[Microbatch]:
        """Create padded microbatches with a label only for the last token of each sequence.

        The label requests the logits of this token.
        """
        # Logits are computed only for tokens with a label. The value of the label does not matter.
        windows = [Window(np.append(ids, 0), num_scored=1) for ids in sequences]
        batch_size = self._run.job.training.local_batch_size
        length = padded_length(self._run, max(len(ids) for ids in sequences))
        return [
            padded_microbatch(windows[i : i + batch_size], batch_size, length, self._trainer.device)
            for i in range(0, len(windows), batch_size)
        ]


def process_logits(
    trainer: Trainer,
    microbatches: Sequence[Microbatch],
    process: Callable[[LogitsChunk], None],
) -> None:
    """Run forward passes and call `process` with the logits of all tokens that have a label.

    To limit memory, `process` gets only a few tokens at once. It is called on the ranks that hold
    these tokens, including all tensor-parallel ranks.

    Args:
        trainer: Trainer whose model computes the logits.
        microbatches: Microbatches of this rank. Tokens whose label is IGNORE_INDEX are skipped.
        process: Called with each chunk of logits during the forward passes.
    """
    # Only the loss function can compute logits, because FSDP gathers the output matrix for it. So
    # pass a loss function that calls `process`. The loss that it returns, 0, is not needed.
    loss_fn = _LogitsLoss(trainer, len(microbatches), process)
    trainer.forward_backward.evaluate(microbatches, loss_fn)


@dataclass(eq=False)
class _LogitsLoss:
    """Loss function that calls `process` with the logits of a microbatch and returns a loss of 0.

    FSDP gathers the output matrix only while the model computes a loss, so this is the only place
    to compute logits. The model calls the loss function once per microbatch, in order.

    Attributes:
        trainer: Trainer whose model computes the logits.
        num_microbatches: Number of microbatches to process. Pipeline schedules append padding
            microbatches to them.
        process: Function to call; see `process_logits`.
        num_calls: Number of calls so far, which is the index of the next microbatch.
    """

    trainer: Trainer
    num_microbatches: int
    process: Callable[[LogitsChunk], None]
    num_calls: int = 0

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """Process the logits of the next microbatch, unless it is padding."""
        index = self.num_calls
        self.num_calls += 1
        if index < self.num_microbatches:
            for chunk in _split_logits(self.trainer, index, hidden, weight, labels):
                self.process(chunk)
        return torch.zeros_like(scale)


def _split_logits(
    trainer: Trainer, microbatch: int, hidden: Tensor, weight: Tensor, labels: Tensor
) -> Iterator[LogitsChunk]:
    """Compute the logits of all tokens in a microbatch that have a label, a few tokens at a time.

    Args:
        trainer: Trainer whose model computed the hidden states.
        microbatch: Index of the microbatch.
        hidden: Hidden states, shape (B, T, C). With tensor parallelism, a DTensor.
        weight: Output matrix, shape (V, C). With tensor parallelism, a DTensor sharded along V.
        labels: Labels, shape (B, T).
    """
    if trainer.mesh.tensor is not None:
        # Each tensor-parallel rank needs the hidden states of all tokens.
        hidden = cast(DTensor, hidden).redistribute(placements=[Replicate()]).to_local()
    # Each row holds the index of a sequence and the position of a token in it.
    indices = (labels != IGNORE_INDEX).nonzero()
    for chunk in indices.split(LOGITS_CHUNK):
        sequences, positions = chunk.unbind(dim=1)
        logits = _compute_logits_of_full_vocabulary(hidden[sequences, positions], weight)
        logits = soft_cap(logits, trainer.run.arch.logit_softcap)
        yield LogitsChunk(microbatch, sequences, labels[sequences, positions], logits)


def _compute_logits_of_full_vocabulary(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of the full vocabulary in fp32, shape (n, V).

    Args:
        hidden: Hidden states, shape (n, C).
        weight: Output matrix, shape (V, C). With tensor parallelism, a DTensor sharded along V.
    """
    if not isinstance(weight, DTensor):
        return fp32_logits(hidden, weight)

    # Each rank computes the logits of a part of the vocabulary. An all-gather combines the parts.
    return gather_logits(fp32_logits(hidden, weight.to_local()), weight)

"""Let a checkpoint complete texts: what `titanlite generate` and `titanlite.generate` call.

Invariant: the same checkpoint, prompt, settings and seed give the same text. The key-value cache makes a token cheaper
(one position is computed instead of all) and does not change it. There is one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.checkpoint.find import job_of, use_newest
from titanlite.checkpoint.resume import check_tokenizer, load_checked_weights
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.options import Generation
from titanlite.config.registry import resolved
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.model.attention import LayerCache
from titanlite.model.llama import Llama
from titanlite.runtime.logging import note

# Prompt tokens per forward pass. It limits the memory of the logits, of which only the last row is used.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A trained model with its tokenizer and its job."""

    folder: Path
    """The step folder that the weights were read from."""
    job: JobConfig
    """The job that trained it."""
    tokenizer: Tokenizer
    model: Llama


def load_checkpoint(
    folder: str | os.PathLike[str], device: torch.device | str | None = None, *, ema: bool = False
) -> LoadedCheckpoint:
    """Load a checkpoint of titanlite to generate text. The dtype is float32 on a CPU, and that of the training on a
    GPU.

    Args:
        folder: the folder of one step, the folder of all steps, or the output folder of a run. Of several steps, the
            newest good one is used.
        device: None: the GPU, if there is one.
        ema: take the average of the weights.

    Raises:
        UserError: there is no such folder, no tokenizer at the job's path, no average, or the weights are of another
            model.
        CheckpointError: no good checkpoint, or its tokenizer has changed since.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def load(step_folder: Path) -> LoadedCheckpoint:
        job = job_of(step_folder)
        run = Run(job)
        tokenizer = load_tokenizer(run.tokenizer_path, run.job)
        with torch.device("meta"):
            model: Llama = resolved(run.arch.model)(run.arch)
        if device.type == "cuda":
            model.to(getattr(torch, job.training.mixed_precision_param))
        model.to_empty(device=device)
        load_checked_weights(step_folder, model, averaged=ema)
        check_tokenizer(step_folder, tokenizer, job.tokenizer.path, run.arch.vocab_size)
        return LoadedCheckpoint(step_folder, job, tokenizer, model)

    return use_newest(Path(folder), load, log=note)


@dataclass(frozen=True)
class Completion:
    """How a prompt goes on."""

    prompt: str
    completion: str
    tokens: int
    """Number of tokens that the model has chosen, without the one that ends a document."""
    end: Literal["document", "length"]
    """Why it ended: the model ended the document, or max_new_tokens or the model's max_seq_len."""


def generate(
    checkpoint: LoadedCheckpoint, prompt: str = "", max_new_tokens: int = 100, **settings: Any
) -> Iterator[str]:
    """Complete a text. Yields a piece of text per token, which may be empty, and at the end the rest.

    Args:
        settings: Those of `config.options.Generation`: temperature, top_k, seed.

    Raises:
        UserError: a value is not allowed, or the prompt does not fit the model.
        CheckpointError: raised while it generates: the model's output is not finite.
    """
    options = Generation(max_new_tokens=max_new_tokens, **settings)
    decoding = Decoding(prompt, checkpoint.tokenizer, max_new_tokens, checkpoint.model.arch.max_seq_len)

    def pieces() -> Iterator[str]:
        shown = 0
        for _ in _complete(checkpoint, [decoding], options):
            text = decoding.completion().completion.rstrip("\ufffd")  # the last character may need another token
            yield text[shown:]
            shown = len(text)
        yield decoding.completion().completion[shown:]

    return pieces()


def generate_many(
    checkpoint: LoadedCheckpoint, prompts: Sequence[str], max_new_tokens: int = 100, **settings: Any
) -> Iterator[Completion]:
    """Complete several texts, `batch_size` of them at once. Yields their completions in the order of the prompts.

    A completion does not depend on the other prompts, up to rounding: the sums of a matmul with more rows can be in
    another order, so two tokens that are equally likely to the last bit can change places.

    Args, raises: as `generate`, and the setting batch_size.
    """
    options = Generation(max_new_tokens=max_new_tokens, **settings)
    most = max_new_tokens, checkpoint.model.arch.max_seq_len
    decodings = [Decoding(prompt, checkpoint.tokenizer, *most) for prompt in prompts]

    def completions() -> Iterator[Completion]:
        for start in range(0, len(decodings), options.batch_size):
            batch = decodings[start : start + options.batch_size]
            for _ in _complete(checkpoint, batch, options):
                pass
            yield from (decoding.completion() for decoding in batch)

    return completions()


class Decoding:
    """A prompt, and the tokens that complete it so far.

    Attributes:
        ids: of the prompt, as training would have it at the beginning of a document, and of its completion.
        limit: the length that `ids` can reach.

    Raises:
        UserError: the prompt leaves no room, or it is empty and the tokenizer has no token that begins a document.
    """

    def __init__(self, prompt: str, tokenizer: Tokenizer, max_new_tokens: int, max_seq_len: int) -> None:
        self._prompt, self._tokenizer, self._document_ended = prompt, tokenizer, False
        self.ids = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)
        self._prompt_size = len(self.ids)
        if not self.ids:
            raise UserError('--prompt "": no token of this tokenizer begins a document; give at least a character.')
        if len(self.ids) >= max_seq_len:
            raise UserError(f"--prompt has {len(self.ids)} tokens, but at most {max_seq_len - 1} fit into the model.")
        self.limit = min(len(self.ids) + max_new_tokens, max_seq_len)

    @property
    def goes_on(self) -> bool:
        """Whether another token is needed."""
        return not self._document_ended and len(self.ids) < self.limit

    def push(self, token: int) -> None:
        """Add the token that the model has chosen."""
        if token == self._tokenizer.eos_id:
            self._document_ended = True
        else:
            self.ids.append(token)

    def completion(self) -> Completion:
        """What there is so far. An incomplete character at its end is U+FFFD."""
        size, decode = self._prompt_size, self._tokenizer.decode
        # The text of a token can depend on the one before it.
        text = decode(self.ids[size - 1 :])[len(decode(self.ids[size - 1 : size])) :]
        return Completion(self._prompt, text, len(self.ids) - size, "document" if self._document_ended else "length")


def _complete(checkpoint: LoadedCheckpoint, decodings: Sequence[Decoding], options: Generation) -> Iterator[None]:
    """Add tokens to all of them together. Yields after each token.

    Shorter prompts are filled up at their front with positions that no token sees.
    """
    model, arch = checkpoint.model, checkpoint.model.arch
    weight = model.get_parameter("tok_embeddings.weight")
    generators = [torch.Generator().manual_seed(options.seed) for _ in decodings]  # on the CPU, for any device
    longest = max(len(decoding.ids) for decoding in decodings)
    new = max(decoding.limit - len(decoding.ids) for decoding in decodings)
    shape = (len(decodings), arch.n_kv_heads, longest + new, arch.head_dim)
    cache = [LayerCache(shape, weight.dtype, weight.device) for _ in range(arch.n_layers)]
    filled = torch.tensor([longest - len(decoding.ids) for decoding in decodings], device=weight.device)
    rows = [[0] * (longest - len(decoding.ids)) + decoding.ids for decoding in decodings]
    while any(decoding.goes_on for decoding in decodings):
        # An embedding can have more rows than its tokenizer has ids.
        logits = _next_logits(model, rows, cache, filled)[:, : checkpoint.tokenizer.vocab_size]
        rows = [[0] for _ in decodings]
        for row, decoding in enumerate(decodings):
            if decoding.goes_on:
                rows[row] = [choose(logits[row], options.temperature, options.top_k, generators[row])]
                decoding.push(*rows[row])
        yield


def _next_logits(model: Llama, rows: list[list[int]], cache: Sequence[LayerCache], filled: Tensor) -> Tensor:
    """Logits (B, V) of the tokens after `rows`, in fp32 on the CPU. `rows` come after the tokens in `cache`.

    Args:
        rows: B prompts of equal length.
        filled: (B,): so many positions at the front of a prompt are no part of it.
    """
    tokens = torch.tensor(rows, device=filled.device)  # (B, T)
    # Without cuDNN's kernel, because it makes a new plan for each length of the cache.
    kernels = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with torch.inference_mode(), kernels:
        for chunk in tokens.split(max(1, PREFILL_CHUNK // len(rows)), dim=1):
            index = torch.arange(cache[0].length + chunk.shape[1], device=filled.device)
            own = index[cache[0].length :]
            past = own[:, None] - index
            seen = (past >= 0) & (index >= filled[:, None, None])  # (B, T, S)
            seen &= past < (model.arch.sliding_window or len(index))
            mask = seen | (own[:, None] == index)  # a filled position too, because a softmax over nothing would be NaN
            logits = model(chunk, (own - filled[:, None]).clamp(min=0), mask[:, None], cache)  # (B, T, V)
    return logits[:, -1].float().cpu()


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    """Sample a token id from logits (V,), or take the most likely one at temperature 0.

    Raises:
        CheckpointError: the logits are not finite.
    """
    if not logits.isfinite().all():
        raise CheckpointError("The model's output is not finite: its weights are useless. Take an older checkpoint.")
    if temperature == 0:
        return int(logits.argmax())
    candidates = torch.arange(len(logits))
    if 0 < top_k < len(logits):
        logits, candidates = logits.topk(top_k)
    # In fp64 and relative to the maximum, so that no temperature overflows.
    probabilities = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])

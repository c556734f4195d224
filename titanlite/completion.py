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


def load_checkpoint(folder: str | os.PathLike[str], device: torch.device | str | None = None) -> LoadedCheckpoint:
    """Load a checkpoint of titanlite to generate text. The dtype is float32 on a CPU, and that of the training on a
    GPU.

    Args:
        folder: the folder of one step, the folder of all steps, or the output folder of a run. Of several steps, the
            newest good one is used.
        device: None: the GPU, if there is one.

    Raises:
        UserError: there is no such folder, no tokenizer at the job's path, or the weights are of another model.
        CheckpointError: no good checkpoint, or its tokenizer has changed since.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def load(step_folder: Path) -> LoadedCheckpoint:
        job = job_of(step_folder)
        run = Run(job)
        tokenizer = load_tokenizer(run.tokenizer_path)
        with torch.device("meta"):
            model = Llama(run.arch)
        if device.type == "cuda":
            model.to(getattr(torch, job.training.mixed_precision_param))
        model.to_empty(device=device)
        info = load_checked_weights(step_folder, model)
        check_tokenizer(step_folder, info, tokenizer, job.tokenizer.path, run.arch.vocab_size)
        return LoadedCheckpoint(step_folder, job, tokenizer, model)

    return use_newest(Path(folder), load, log=note)


@dataclass(frozen=True)
class Completion:
    """How a prompt goes on."""

    prompt: str
    completion: str
    tokens: int
    """Number of tokens that the model has chosen, without the one that ends a document."""
    end: Literal["document", "stop", "length"]
    """Why it ended: the model ended the document, a stop text, or max_new_tokens or the model's max_seq_len."""


def generate(
    checkpoint: LoadedCheckpoint, prompt: str = "", max_new_tokens: int = 100, **settings: Any
) -> Iterator[str]:
    """Complete a text. Yields a piece of text per token, which may be empty, and at the end the rest.

    Args:
        settings: Those of `config.options.Generation`: temperature, top_k, top_p, stop, seed.

    Raises:
        UserError: a value is not allowed, or the prompt does not fit the model.
        CheckpointError: raised while it generates: the model's output is not finite.
    """
    options = Generation(max_new_tokens=max_new_tokens, **settings)
    ids = encode_prompt(prompt, checkpoint.tokenizer, checkpoint.model.arch.max_seq_len)
    stream = TextStream(checkpoint.tokenizer, ids[-1:], options.stop)
    return (piece for _, piece in _pieces(checkpoint, [ids], [stream], options))


def generate_many(
    checkpoint: LoadedCheckpoint, prompts: Sequence[str], max_new_tokens: int = 100, **settings: Any
) -> Iterator[Completion]:
    """Complete several texts, `batch_size` of them at once. Yields their completions in the order of the prompts.

    A completion does not depend on the other prompts, up to rounding: the sums of a matmul with more rows can be in
    another order, so two tokens that are equally likely to the last bit can change places.

    Args, raises: as `generate`, and the setting batch_size.
    """
    options = Generation(max_new_tokens=max_new_tokens, **settings)
    ids = [encode_prompt(prompt, checkpoint.tokenizer, checkpoint.model.arch.max_seq_len) for prompt in prompts]

    def complete() -> Iterator[Completion]:
        for start in range(0, len(prompts), options.batch_size):
            part = ids[start : start + options.batch_size]
            streams = [TextStream(checkpoint.tokenizer, of_prompt[-1:], options.stop) for of_prompt in part]
            texts = [""] * len(part)
            for row, piece in _pieces(checkpoint, part, streams, options):
                texts[row] += piece
            for prompt, text, stream in zip(prompts[start:], texts, streams, strict=False):
                yield Completion(prompt, text, stream.tokens, stream.end)

    return complete()


def encode_prompt(prompt: str, tokenizer: Tokenizer, max_seq_len: int) -> list[int]:
    """Token ids of the prompt, as training would have them at the beginning of a document.

    Raises:
        UserError: the prompt leaves no room, or it is empty and the tokenizer has no token that begins a document.
    """
    ids = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    if not ids:
        raise UserError('--prompt "": this tokenizer has no token that begins a document; give at least a character.')
    if len(ids) >= max_seq_len:
        raise UserError(f"--prompt has {len(ids)} tokens, but at most {max_seq_len - 1} fit into the model.")
    return ids


def _pieces(
    checkpoint: LoadedCheckpoint, prompts: list[list[int]], streams: list[TextStream], options: Generation
) -> Iterator[tuple[int, str]]:
    """Pieces of the completions as they come, each with the number of its prompt.

    Shorter prompts are filled up at their front with positions that no token sees.
    """
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    arch, weight = model.arch, model.get_parameter("tok_embeddings.weight")
    generators = [torch.Generator().manual_seed(options.seed) for _ in prompts]  # on the CPU, for any device
    longest = max(map(len, prompts))
    new = [min(options.max_new_tokens, arch.max_seq_len - len(prompt)) for prompt in prompts]
    shape = (len(prompts), arch.n_kv_heads, longest + max(new), arch.head_dim)
    cache = [LayerCache(shape, weight.dtype, weight.device) for _ in range(arch.n_layers)]
    filled = torch.tensor([longest - len(prompt) for prompt in prompts], device=weight.device)
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    for done in range(max(new)):
        going_on = [row for row, stream in enumerate(streams) if stream.end == "length" and done < new[row]]
        if not going_on:
            break
        # An embedding can have more rows than its tokenizer has ids.
        logits = _next_logits(model, rows, cache, filled)[:, : tokenizer.vocab_size]
        rows = [[0] for _ in prompts]
        for row in going_on:
            token = choose(logits[row], options.temperature, options.top_k, generators[row], options.top_p)
            rows[row] = [token]
            if token == tokenizer.eos_id:
                streams[row].end = "document"
            else:
                yield row, streams[row].push(token)
    for row, stream in enumerate(streams):
        yield row, stream.rest()


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
            seen = (own[:, None] >= index) & (index >= filled[:, None, None])  # (B, T, S)
            mask = seen | (own[:, None] == index)  # a filled position too, because a softmax over nothing would be NaN
            logits = model(chunk, (own - filled[:, None]).clamp(min=0), mask[:, None], cache)  # (B, T, V)
    return logits[:, -1].float().cpu()


def choose(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None, top_p: float = 1.0
) -> int:
    """Sample a token id from logits (V,), or take the most likely one at temperature 0.

    Raises:
        CheckpointError: the logits are not finite.
    """
    if not logits.isfinite().all():
        raise CheckpointError("The model's output is not finite: its weights are useless. Take an older checkpoint.")
    if temperature == 0:
        return int(logits.argmax())
    assert generator is not None
    candidates = torch.arange(len(logits))
    if 0 < top_k < len(logits):
        logits, candidates = logits.topk(top_k)
    # In fp64 and relative to the maximum, so that no temperature overflows.
    probabilities = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        likely = ordered.cumsum(0) - ordered < top_p  # up to the one that reaches top_p
        probabilities, candidates = ordered[likely], candidates[order[likely]]
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


class TextStream:
    """Turns tokens into text as soon as whole characters are complete, up to a stop text.

    A character can consist of several tokens, and the text of a token can depend on the one before it. So the last
    piece is decoded again together with the new tokens, and the new text is what comes after the text of that piece.

    Args:
        before: ids whose text was shown already. The last one is enough.
        stop: texts that end the stream.

    Attributes:
        tokens: number of tokens so far.
        end: why the stream has ended; "length" as long as it has not.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._before, self._ids = list(before), list[int]()  # of the piece before, and of the next one so far
        self._held = ""  # text that can be the beginning of a stop text
        self.tokens = 0
        self.end: Literal["document", "stop", "length"] = "length"

    def push(self, token: int) -> str:
        """The text that `token` completes. Empty in the middle of a character, and of what can be a stop text."""
        self._ids.append(token)
        self.tokens += 1
        return self._next(last=False)

    def rest(self) -> str:
        """The rest at the end: an incomplete character becomes U+FFFD."""
        return "" if self.end == "stop" else self._next(last=True)

    def _next(self, last: bool) -> str:
        text = self._tokenizer.decode(self._before + self._ids)[len(self._tokenizer.decode(self._before)) :]
        if text.endswith("\ufffd") and not last:  # the character may be incomplete
            return ""
        text, self._before, self._ids = self._held + text, self._ids, []
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.end = "stop"
            return text[: min(found)]
        beginnings = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        shown = len(text) - (0 if last else max(beginnings, default=0))
        self._held = text[shown:]
        return text[:shown]

"""Let a checkpoint complete a text: what `titanlite generate` and `titanlite.generate` call.

Invariant: the same checkpoint, prompt, settings and seed give the same text. The key-value cache makes a token cheaper
(one position is computed instead of all) and does not change it. There is one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.checkpoint.dcp import SafeReader
from titanlite.checkpoint.find import job_of, use_newest
from titanlite.checkpoint.load_weights import check_tokenizer, load_checked_weights
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.options import OptionPath, Options
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.model.attention import LayerCache
from titanlite.model.llama import Llama
from titanlite.runtime.logging import note

# Prompt tokens per forward pass. It limits the memory of the logits, of which only the last row is used.
PREFILL_CHUNK = 512


class Generate(Options):
    """Let a checkpoint complete a text. Prompt and completion go to standard output, all else to standard error."""

    checkpoint: OptionPath
    """The folder of one step (.../step-00000100), the folder of all steps, or the output folder of a run. Of several
    steps, the newest good one is used."""
    prompt: str = ""
    """Text to complete. Empty: the beginning of a new document."""
    max_new_tokens: PositiveInt = 100
    """Longest completion, in tokens. It ends earlier if the model ends the document or reaches its max_seq_len."""
    temperature: NonNegativeFloat = 0.8
    """0: take the most likely token each time. 1: sample from the model's probabilities. Higher: more random."""
    top_k: NonNegativeInt = 50
    """Sample from the k most likely tokens only. 0: from all."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of the sampling."""


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
        UserError: there is no such folder, or no tokenizer at the job's path.
        CheckpointError: no good checkpoint.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return use_newest(Path(folder), lambda step_folder: _load_step(step_folder, device), log=note)


def _load_step(step_folder: Path, device: torch.device) -> LoadedCheckpoint:
    job = job_of(step_folder)
    tokenizer = load_tokenizer(Run(job).tokenizer_path)
    return LoadedCheckpoint(step_folder, job, tokenizer, load_model(step_folder, job, tokenizer, device))


def generate(
    checkpoint: LoadedCheckpoint,
    prompt: str = "",
    max_new_tokens: int = 100,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Complete a text. Yields a piece of text per token, which may be empty, and at the end the rest.

    The arguments are those of `Generate`.

    Raises:
        UserError: a value is not allowed, or the prompt does not fit the model.
        CheckpointError: raised while it generates: the model's output is not finite.
    """
    asked = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    Generate(checkpoint=checkpoint.folder, prompt=prompt, **asked)  # pyright: ignore[reportArgumentType]
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    ids = encode_prompt(prompt, tokenizer, model.arch.max_seq_len)
    tokens = generate_tokens(
        model,
        ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
    )
    return _in_text(tokens, TextStream(tokenizer, ids[-1:]))


def _in_text(tokens: Iterator[int], stream: TextStream) -> Iterator[str]:
    for token in tokens:
        yield stream.push(token)
    yield stream.rest()


def load_model(step_folder: Path, job: JobConfig, tokenizer: Tokenizer, device: torch.device) -> Llama:
    """The model with the weights of a checkpoint whose checksums are good.

    The dtype is float32 on a CPU, and that of the training on a GPU.

    Raises:
        Damage: weights are missing, although the checksums are good.
        CheckpointError: the weights are of another model, or the tokenizer has changed since.
    """
    arch = Run(job).arch
    SafeReader(step_folder).check_model(arch)
    with torch.device("meta"):
        model = Llama(arch)
    if device.type == "cuda":
        model.to(getattr(torch, job.training.mixed_precision_param))
    model.to_empty(device=device)
    info = load_checked_weights(step_folder, model)
    check_tokenizer(step_folder, info, tokenizer, job.tokenizer.path, arch.vocab_size)
    return model


def encode_prompt(prompt: str, tokenizer: Tokenizer, max_seq_len: int) -> list[int]:
    """Token ids of the prompt, as training would have them at the beginning of a document.

    Raises:
        UserError: the prompt leaves no room, or it is empty and the tokenizer has no token that begins a document.
    """
    ids = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    if not ids:
        raise UserError('--prompt "": this tokenizer has no token that begins a document; give at least a character.')
    if len(ids) >= max_seq_len:
        raise UserError(
            f"--prompt has {len(ids)} tokens, but at most {max_seq_len - 1} fit into the model. Shorten it."
        )
    return ids


def generate_tokens(
    model: Llama,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    eos_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield new token ids, one at a time, as they are chosen.

    Args:
        prompt: ids to continue, at least one and fewer than the model's max_seq_len.
        generator: random generator on the CPU, for any device of the model. Needed unless temperature is 0.
        eos_id: id that ends the completion. It is not yielded.
        vocab_size: only ids below it are chosen, because an embedding can have more rows than its tokenizer has ids.
            None: all rows.

    Raises:
        CheckpointError: the model's output is not finite.
    """
    arch, weight = model.arch, model.get_parameter("tok_embeddings.weight")
    length = min(len(prompt) + max_new_tokens, arch.max_seq_len)
    shape = (1, arch.n_kv_heads, length, arch.head_dim)
    cache = [LayerCache(shape, weight.dtype, weight.device) for _ in range(arch.n_layers)]
    ids = list(prompt)
    for _ in range(length - len(prompt)):
        logits = next_logits(model, ids, cache)[:vocab_size]
        token = choose(logits, temperature, top_k, generator)
        if token == eos_id:
            return
        yield token
        ids = [token]


def next_logits(model: Llama, ids: Sequence[int], cache: Sequence[LayerCache] | None) -> Tensor:
    """Logits (V,) of the token after `ids`, in fp32 on the CPU. `ids` come after the tokens in `cache`."""
    tokens = torch.tensor([list(ids)], device=model.get_parameter("tok_embeddings.weight").device)  # (1, T)
    chunks = tokens.split(PREFILL_CHUNK, dim=1) if cache is not None else [tokens]
    # Without cuDNN's kernel, because it makes a new plan for each length of the cache.
    kernels = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with torch.inference_mode(), kernels:
        for chunk in chunks:
            logits = model(chunk, cache=cache)  # (1, T, V)
    return logits[0, -1].float().cpu()


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
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
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


class TextStream:
    """Turns tokens into text as soon as whole characters are complete.

    A character can consist of several tokens, and the text of a token can depend on the one before it. So the last
    piece is decoded again together with the new tokens, and the new text is what comes after the text of that piece.

    Args:
        before: ids whose text was shown already. The last one is enough.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._shown = len(self._ids)  # the text of this many ids was shown

    def push(self, token: int) -> str:
        """The text that `token` completes. Empty in the middle of a character."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith("\ufffd"):  # the character may be incomplete
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text

    def rest(self) -> str:
        """The rest at the end: an incomplete character becomes U+FFFD."""
        return self._new_text()

    def _new_text(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._shown])) :]

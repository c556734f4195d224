"""Generate text with a checkpoint, in one process.

Invariant: the same checkpoint, prompt, settings and seed always produce the same text. The
key-value cache saves computation, but does not change the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from titanlite.checkpoint.find import load_newest, read_job
from titanlite.checkpoint.load import check_tokenizer, load_weights
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.options import Generation
from titanlite.config.registry import resolve
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.model.attention import LayerCache
from titanlite.model.llama import Llama
from titanlite.runtime.logging import note

# Prompt tokens per forward pass. This limits the memory of the logits.
PREFILL_CHUNK = 512
# This list omits the cuDNN kernel, which builds a new execution plan for each cache length.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A trained model, its tokenizer, and the job (the configuration) that trained it."""

    folder: Path
    """Step folder that the weights were loaded from."""
    job: JobConfig
    """Job that trained the model."""
    tokenizer: Tokenizer
    model: Llama


def load_checkpoint(
    folder: str | os.PathLike[str],
    device: torch.device | str | None = None,
    *,
    ema: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
) -> LoadedCheckpoint:
    """Load the model and the tokenizer of a checkpoint to generate text.

    The weights are converted to float32 on a CPU, and to the compute dtype of training on a GPU.

    Args:
        folder: Step folder, checkpoint folder, or output folder of a run. The newest undamaged
            checkpoint is used.
        device: Device for the model. Defaults to the GPU if there is one, otherwise to the CPU.
        ema: Whether to use the exponential moving average of the weights.
        tokenizer: Tokenizer file. Defaults to the tokenizer of the checkpoint.

    Raises:
        UserError: If the folder, the tokenizer or the moving average does not exist, or the weights
            belong to another model.
        CheckpointError: If there is no undamaged checkpoint, or its tokenizer has changed.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer_path = None if tokenizer is None else Path(tokenizer)

    # Load the newest checkpoint or, if it is damaged, the one before it.
    load = partial(_load_step, torch.device(device), ema, tokenizer_path)
    return load_newest(Path(folder), load, skip_tensor_checksums=True, log=note)


def _load_step(
    device: torch.device, ema: bool, tokenizer_path: Path | None, step_folder: Path
) -> LoadedCheckpoint:
    """Load the model and the tokenizer from one step folder.

    Args:
        device: Device for the model.
        ema: Whether to use the exponential moving average of the weights.
        tokenizer_path: Tokenizer file, or None to use the tokenizer of the checkpoint.
        step_folder: A step folder that has passed `check_checkpoint`.
    """
    job = read_job(step_folder, tokenizer_path)
    run = Run(job)
    tokenizer = load_tokenizer(run.tokenizer_path, job)
    model = _create_model(run, device)
    load_weights(step_folder, model, averaged=ema)
    check_tokenizer(step_folder, tokenizer, job.tokenizer.path, run.arch.vocab_size)
    return LoadedCheckpoint(step_folder, job, tokenizer, model.eval())


def _create_model(run: Run, device: torch.device) -> Llama:
    """Create a model with uninitialized weights.

    The weights are float32 on a CPU, and have the compute dtype of training on a GPU.
    """
    with torch.device("meta"):  # allocates no memory before the dtype is final
        model: Llama = resolve(run.arch.model)(run.arch)
    if device.type == "cuda":
        training = run.resolve_compute_dtype(on_gpu=True).job.training
        model.to(getattr(torch, training.mixed_precision_param))  # such as torch.bfloat16
    return model.to_empty(device=device)


@dataclass(frozen=True)
class Completion:
    """The text that a model generated for a prompt."""

    prompt: str
    completion: str
    tokens: int
    """Number of generated tokens, not counting the token that ends the document."""
    end: Literal["document", "length"]
    """Why generation stopped.

    "document": the model generated the token that ends a document. "length": the completion reached
    max_new_tokens, or the maximum sequence length of the model.
    """


def generate(
    checkpoint: LoadedCheckpoint, prompt: str = "", max_new_tokens: int = 100, **settings: Any
) -> Iterator[str]:
    """Complete a prompt and yield the text piece by piece as it is generated.

    Args:
        checkpoint: Model and tokenizer.
        prompt: Text to complete. If it is empty, the model generates a new document.
        max_new_tokens: Maximum number of tokens to generate.
        settings: Fields of `config.options.Generation`: temperature, top_k, seed.

    Yields:
        Text of each token, or an empty string if the token does not complete a character. The last
        item is the rest of the text. Joined together, the items form the completion.

    Raises:
        UserError: If a setting is invalid, the prompt is too long for the model, or it is empty and
            the tokenizer has no token that begins a document.
        CheckpointError: If the output of the model is not finite.
    """
    options = Generation(max_new_tokens=max_new_tokens, **settings)
    max_seq_len = checkpoint.model.arch.max_seq_len
    decoding = Decoding(prompt, checkpoint.tokenizer, max_new_tokens, max_seq_len)
    # This function contains no `yield`, so that invalid arguments raise an error immediately.
    return _generate_pieces(checkpoint, decoding, options)


def _generate_pieces(
    checkpoint: LoadedCheckpoint, decoding: Decoding, options: Generation
) -> Iterator[str]:
    """Generate a completion and yield the text of each token as soon as it is generated.

    After the last token, yield the rest of the text, such as an incomplete character.

    Args:
        checkpoint: Model and tokenizer.
        decoding: The prompt. The generated tokens are added to it.
        options: Sampling options.
    """
    num_yielded = 0  # characters
    for _ in _generate_tokens(checkpoint, [decoding], options):  # each step updates `decoding`
        # The text of a token depends on the tokens before it, so decode them again each time.
        text = decoding.result().completion
        # Hold back an incomplete character, which is decoded as U+FFFD, until its next token.
        complete_text = text.rstrip("\ufffd")
        yield complete_text[num_yielded:]
        num_yielded = len(complete_text)

    # Yield what was held back.
    final_text = decoding.result().completion
    yield final_text[num_yielded:]


def generate_many(
    checkpoint: LoadedCheckpoint, prompts: Sequence[str], max_new_tokens: int = 100, **settings: Any
) -> Iterator[Completion]:
    """Complete several prompts in batches.

    This raises the same errors as `generate`. A completion does not depend on the other prompts,
    except for rounding: the batch size can change the summation order in a matmul, and thus the
    choice between two almost equally likely tokens.

    Args:
        checkpoint: Model and tokenizer.
        prompts: Texts to complete.
        max_new_tokens: Maximum number of tokens to generate for each prompt.
        settings: Fields of `config.options.Generation`: temperature, top_k, seed, batch_size.

    Yields:
        Completions in the order of the prompts.
    """
    options = Generation(max_new_tokens=max_new_tokens, **settings)
    max_seq_len = checkpoint.model.arch.max_seq_len
    decodings = [
        Decoding(prompt, checkpoint.tokenizer, max_new_tokens, max_seq_len) for prompt in prompts
    ]
    # This function contains no `yield`, so that invalid arguments raise an error immediately.
    return _generate_completions(checkpoint, decodings, options)


def _generate_completions(
    checkpoint: LoadedCheckpoint, decodings: Sequence[Decoding], options: Generation
) -> Iterator[Completion]:
    """Complete prompts in batches and yield the completions in the order of the prompts.

    Args:
        checkpoint: Model and tokenizer.
        decodings: The prompts. The generated tokens are added to them.
        options: Sampling options, such as the batch size.
    """
    for start in range(0, len(decodings), options.batch_size):
        batch = decodings[start : start + options.batch_size]
        for _ in _generate_tokens(checkpoint, batch, options):
            pass  # each step updates the decodings
        for decoding in batch:
            yield decoding.result()


class Decoding:
    """A prompt and the tokens that have been generated for it so far.

    Args:
        prompt: Text to complete.
        tokenizer: Tokenizer of the model.
        max_new_tokens: Maximum number of tokens to generate.
        max_seq_len: Maximum sequence length of the model.

    Attributes:
        ids: Token IDs of the prompt and the completion. If the tokenizer has a token that begins a
            document (BOS), it comes first.
        limit: Length of `ids` at which generation stops.

    Raises:
        UserError: If the prompt is too long, or if it is empty and the tokenizer has no BOS token.
    """

    def __init__(
        self, prompt: str, tokenizer: Tokenizer, max_new_tokens: int, max_seq_len: int
    ) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._document_ended = False
        self.ids = tokenizer.encode(prompt)
        if tokenizer.bos_id is not None:
            self.ids.insert(0, tokenizer.bos_id)
        self._prompt_size = len(self.ids)

        if not self.ids:
            raise UserError(
                '--prompt "": this tokenizer has no token that begins a document, so the prompt '
                "needs at least one character."
            )
        if len(self.ids) >= max_seq_len:
            raise UserError(
                f"--prompt has {len(self.ids)} tokens, but the model takes at most "
                f"{max_seq_len - 1}."
            )
        self.limit = min(len(self.ids) + max_new_tokens, max_seq_len)

    @property
    def num_remaining(self) -> int:
        """Number of tokens that can still be appended to `ids`."""
        return self.limit - len(self.ids)

    @property
    def is_unfinished(self) -> bool:
        """Whether generation continues: the document has not ended, and `limit` is not reached."""
        return not self._document_ended and self.num_remaining > 0

    def push(self, token: int) -> None:
        """Append a generated token, or end the completion if the token ends the document."""
        if token == self._tokenizer.eos_id:
            self._document_ended = True
        else:
            self.ids.append(token)

    def result(self) -> Completion:
        """Return the completion so far. An incomplete character at the end becomes U+FFFD."""
        # The text of a token can depend on the token before it. So also decode the last token of
        # the prompt, and then cut off its text.
        new_ids = self.ids[self._prompt_size :]
        last_id = self.ids[self._prompt_size - 1]
        last_text = self._tokenizer.decode([last_id])
        text = self._tokenizer.decode([last_id, *new_ids])[len(last_text) :]
        end = "document" if self._document_ended else "length"
        return Completion(self._prompt, text, len(new_ids), end)


def _generate_tokens(
    checkpoint: LoadedCheckpoint, decodings: Sequence[Decoding], options: Generation
) -> Iterator[None]:
    """Complete a batch of prompts, one token per prompt and step.

    Each step samples a token for each unfinished completion in `decodings` and then yields None, so
    that the caller can read the text so far. Finished completions stay unchanged.
    """
    model = checkpoint.model
    vocab_size = checkpoint.tokenizer.vocab_size

    # Create a cache with room for the longest prompt and for all generated tokens.
    prompts_BT, padding_B = _pad_prompts(decodings)
    prompt_length = prompts_BT.shape[1]
    max_steps = max(decoding.num_remaining for decoding in decodings)
    cache = _create_cache(model, len(decodings), prompt_length + max_steps)

    # Each prompt has a separate generator, so that its completion does not depend on the others.
    # Sample on the CPU, so that a seed gives the same random numbers for any device.
    generators = [torch.Generator().manual_seed(options.seed) for _ in decodings]

    # The first step processes all tokens of the prompts, and the other steps one token each.
    next_inputs_BT = prompts_BT
    while any(decoding.is_unfinished for decoding in decodings):
        logits_BV = _next_logits(model, next_inputs_BT, cache, padding_B)
        # The model can have more tokens than the tokenizer. Never sample the extra tokens.
        logits_BV = logits_BV[:, :vocab_size]
        next_inputs_BT = _append_sampled_tokens(decodings, logits_BV, options, generators)
        yield


def _pad_prompts(decodings: Sequence[Decoding]) -> tuple[Tensor, Tensor]:
    """Pad prompts at the front to the same length.

    For example, the prompts [7, 8, 9] and [5] become [7, 8, 9] and [0, 0, 5]. No token attends to
    the padding.

    Returns:
        Token IDs, shape (B, T), and the number of padding positions of each prompt, shape (B,).
    """
    prompts = [torch.tensor(decoding.ids) for decoding in decodings]
    prompts_BT = pad_sequence(prompts, batch_first=True, padding_side="left")
    max_length = prompts_BT.shape[1]
    padding_B = torch.tensor([max_length - len(prompt) for prompt in prompts])
    return prompts_BT, padding_B


def _append_sampled_tokens(
    decodings: Sequence[Decoding],
    logits: Tensor,
    options: Generation,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Sample the next token of each unfinished completion and append it to the completion.

    Args:
        decodings: The completions. Some may already be finished.
        logits: Logits of the next token, shape (B, V).
        options: Sampling options.
        generators: Random number generator of each completion.

    Returns:
        Input of the model in the next step, shape (B, 1): the new token of each completion, or 0,
        which is ignored, if the completion is finished.
    """
    new_tokens = []
    for index, decoding in enumerate(decodings):
        token = 0
        if decoding.is_unfinished:
            token = sample_token(
                logits[index], options.temperature, options.top_k, generators[index]
            )
            decoding.push(token)
        new_tokens.append([token])
    return torch.tensor(new_tokens)


def _create_cache(model: Llama, batch_size: int, max_length: int) -> list[LayerCache]:
    """Create an empty key-value cache for each layer of a model."""
    arch = model.arch
    weight = model.get_parameter("tok_embeddings.weight")
    shape = (batch_size, arch.n_kv_heads, max_length, arch.head_dim)
    return [LayerCache(shape, weight.dtype, weight.device) for _ in range(arch.n_layers)]


def _next_logits(
    model: Llama, tokens_BT: Tensor, cache: Sequence[LayerCache], padding_B: Tensor
) -> Tensor:
    """Run the model on new tokens and return the logits of the token that follows them.

    The keys and values of the new tokens are added to the cache.

    Args:
        model: Model.
        tokens_BT: New token IDs of each sequence.
        cache: Key-value cache of each layer, with the earlier tokens of the same sequences.
        padding_B: Number of padding positions at the front of each sequence.

    Returns:
        Logits, shape (B, V), in fp32 on the CPU.
    """
    device = model.get_parameter("tok_embeddings.weight").device
    tokens_BT = tokens_BT.to(device)
    padding_B = padding_B.to(device)

    # Process long prompts in chunks to limit the memory of the logits. Only the logits of the last
    # token are used.
    chunk_length = max(1, PREFILL_CHUNK // len(tokens_BT))
    with torch.inference_mode(), sdpa_kernel(_KERNELS):
        for chunk_BT in tokens_BT.split(chunk_length, dim=1):
            logits_BTV = _forward(model, chunk_BT, cache, padding_B)
    return logits_BTV[:, -1].float().cpu()


def _forward(
    model: Llama, tokens_BT: Tensor, cache: Sequence[LayerCache], padding_B: Tensor
) -> Tensor:
    """Run the model on new tokens and add their keys and values to the cache.

    Args:
        model: Model.
        tokens_BT: New token IDs of each sequence.
        cache: Key-value cache of each layer, with the earlier tokens of the same sequences.
        padding_B: Number of padding positions at the front of each sequence.

    Returns:
        Logits of all new tokens, shape (B, T, V).
    """
    # For example, 2 new tokens (T) after 3 cached ones have the indices [3, 4]. They attend to all
    # tokens (S), which have the indices [0, 1, 2, 3, 4].
    num_cached = cache[0].length
    index_S = torch.arange(num_cached + tokens_BT.shape[1], device=tokens_BT.device)
    index_T = index_S[num_cached:]
    positions_BT = _rope_positions(index_T, padding_B)

    # In some architectures, only some layers have a sliding window. The others use `full_mask`.
    window_mask = _attention_mask(index_T, index_S, padding_B, model.arch.sliding_window)
    full_mask = _attention_mask(index_T, index_S, padding_B, sliding_window=0)
    return model(tokens_BT, positions_BT, window_mask, cache, full_mask=full_mask)


def _rope_positions(index_T: Tensor, padding_B: Tensor) -> Tensor:
    """Return the RoPE positions of tokens, shape (B, T), counted from the first prompt token.

    For example, with 2 padding positions, the tokens with the indices [0, 1, 2, 3] have the
    positions [0, 0, 0, 1]. No token attends to padding, so its positions do not matter.
    """
    return (index_T - padding_B[:, None]).clamp(min=0)


def _attention_mask(
    index_T: Tensor, index_S: Tensor, padding_B: Tensor, sliding_window: int
) -> Tensor:
    """Return a boolean mask of the keys that each query attends to, shape (B, 1, T, S).

    Args:
        index_T: Index of each query from the start of the padded sequence, shape (T,).
        index_S: Index of each key from the start of the padded sequence, shape (S,).
        padding_B: Number of padding positions at the front of each sequence, shape (B,).
        sliding_window: Number of most recent positions that a query attends to. 0 means all.
    """
    # Attend to the token itself and to earlier ones, but not to padding.
    distance_TS = index_T[:, None] - index_S
    is_padding_BS = index_S < padding_B[:, None]
    mask_BTS = (distance_TS >= 0) & ~is_padding_BS[:, None]
    if sliding_window:
        mask_BTS &= distance_TS < sliding_window
    # Padding attends to itself, because a softmax over no keys is NaN.
    mask_BTS |= distance_TS == 0
    return mask_BTS[:, None]  # the same for all heads


def sample_token(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> int:
    """Sample a token ID from the logits of one position.

    Args:
        logits: Logits, shape (V,).
        temperature: Sampling temperature. 0 selects the most likely token.
        top_k: Number of most likely tokens to sample from. 0 means all tokens.
        generator: Random number generator on the CPU, or None for the default torch generator.

    Raises:
        CheckpointError: If the logits are not finite.
    """
    if not logits.isfinite().all():
        raise CheckpointError("The output of the model is not finite. Use an older checkpoint.")
    if temperature == 0:
        return int(logits.argmax())

    token_ids = torch.arange(len(logits))
    if 0 < top_k < len(logits):
        logits, token_ids = logits.topk(top_k)
    # Divide in fp64, and relative to the maximum logit, so that low temperatures do not overflow.
    scaled_logits = (logits.double() - logits.max()) / temperature
    probabilities = torch.softmax(scaled_logits, dim=-1)
    index = torch.multinomial(probabilities, 1, generator=generator)
    return int(token_ids[index])

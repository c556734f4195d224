"""The weights of a checkpoint, and nothing else of it, into a model.

Invariant: each parameter of the model gets the tensor of its own name and shape, and no tensor of a model in the
checkpoint is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.dcp import SafeReader, load_tensors
from titanlite.checkpoint.find import use_newest
from titanlite.checkpoint.index import Index
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.rank_agreement import Ranks
from titanlite.config.errors import CheckpointError, UserError


def load_model_weights(
    path: Path, model: nn.Module, log: Callable[[str], None] = lambda line: None, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Load the weights, nothing else, into a model in place; works without a process group, too.

    Args:
        path: a step folder, the folder of all, or a run's output folder; of several the newest good one is taken.
        log: told which.
        ranks: those that hold the model together, if there are several; all of them call this.

    Returns:
        The JSON value of the manifest: train_state, job, layout.

    Raises:
        UserError: there is no such folder, or it holds another model.
        CheckpointError: no checkpoint, or a damaged one.
    """

    def use(step_folder: Path) -> dict[str, Any]:
        info = load_checked_weights(step_folder, model, ranks)
        log(f"starting from the weights in {step_folder}")
        return info

    together = {} if ranks is None else {"check": ranks.check, "look": ranks.on_rank0}
    return use_newest(path, use, **together, log=log)


def load_checked_weights(path: Path, model: nn.Module, ranks: Ranks | None = None) -> dict[str, Any]:
    """`load_model_weights` from a step folder that was checked, without reading it twice.

    Raises:
        Damage: it holds no such tensors, whatever its checksums say. The model may have a part of them.
        UserError: it holds another model.
    """
    tensors = LiveState(model).tensors()
    reader = SafeReader(path)

    def read() -> tuple[Index, dict[str, Any]]:
        return reader.read_index(), step_folders.read_manifest(path)["info"]

    index, info = read() if ranks is None else ranks.together(read)
    check_fit(path, tensors, index, ranks)
    load_tensors(reader, tensors, None if ranks is None else ranks.group)
    return info


class Ids(Protocol):
    """What a tokenizer is to a checkpoint."""

    vocab_size: int

    def is_known_as(self, fingerprint: str) -> bool: ...


def check_tokenizer(path: Path, info: dict[str, Any], tokenizer: Ids, name: object, rows: int) -> None:
    """Refuse a tokenizer with other ids than the one that the checkpoint at `path` was trained with.

    Args:
        info: What `load_checked_weights` returned.
        name: What to call the tokenizer.
        rows: Those of the embedding.

    Raises:
        CheckpointError: it has other ids, or more than the embedding has rows.
    """
    known = (info["train_state"].get("data") or {}).get("tokenizer")
    if (known is not None and not tokenizer.is_known_as(known)) or tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{path} was trained with another tokenizer than {name} is now: its tokens would stand for other text. "
            "Put the original file back."
        )


def check_fit(path: Path, wanted: dict[str, Tensor], saved: Index, ranks: Ranks | None) -> None:
    """Compare names and shapes of the live tensors of all ranks with those of a checkpoint.

    Raises:
        UserError: on all ranks: they differ; with the differences.
    """
    lines = []
    for name, tensor in wanted.items():
        if name not in saved:
            lines.append(f"{name}: not in the checkpoint")
        elif saved[name].size != tuple(tensor.shape):
            lines.append(f"{name}: shape {saved[name].size} saved, {tuple(tensor.shape)} now")
    own = {"lines": lines, "names": sorted(wanted)}
    of_ranks = [own] if ranks is None else ranks.distinct(own)  # with pipeline stages a rank knows some names only
    known = {name for value in of_ranks for name in value["names"]}
    extra = sorted(name for name in saved if name.startswith("model.") and name not in known)
    misfits = sorted({line for value in of_ranks for line in value["lines"]}) + [f"{n}: only in it" for n in extra]
    if misfits:
        raise UserError(f"{path} does not fit this model:\n  {abridged(misfits)}\nSet [model] as it was.")


def abridged(lines: list[str], limit: int = 8) -> str:
    """The first lines of a list for a message."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n  ".join([*lines[:limit], *more])

"""Temporarily replace functions that a traced step calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def override(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a module, class or instance, and restore them when the context ends.

    For example, `with override(torch, compile=imitation):` replaces `torch.compile`.
    """
    originals = {name: vars(owner)[name] for name in replacements if name in vars(owner)}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name in replacements:
            if name in originals:
                setattr(owner, name, originals[name])
            else:
                delattr(owner, name)  # the original is inherited

"""titanlite: pretrain Llama-style language models, from one laptop CPU up to thousands of GPUs.

A Python program needs the names below only; docs/python.md shows how. Each is imported when it is first used, so that
`import titanlite` takes no time.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] or (sys.argv[:1] and sys.argv[0].endswith("/titanlite")):
    import signal  # the command, whose first line this is: from here on Ctrl-C gives no traceback

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib

from titanlite.runtime.process import use_expandable_segments, use_own_caches

TYPE_CHECKING = False  # as in typing, which is not imported because that takes longer than the start of Python
if TYPE_CHECKING:
    from typing import Any

    from titanlite.completion import Completion as Completion
    from titanlite.completion import LoadedCheckpoint as LoadedCheckpoint
    from titanlite.completion import generate as generate
    from titanlite.completion import generate_many as generate_many
    from titanlite.completion import load_checkpoint as load_checkpoint
    from titanlite.config.errors import UserError as UserError
    from titanlite.config.flavors import FLAVORS as FLAVORS
    from titanlite.config.flavors import Architecture as Architecture
    from titanlite.config.load import load_job as load_job
    from titanlite.config.schema import JobConfig as JobConfig
    from titanlite.data.loader import Loader as Loader
    from titanlite.data.tokenizer import load_tokenizer as load_tokenizer
    from titanlite.hooks.profiler import StepProfile as StepProfile
    from titanlite.model.llama import Llama as Llama
    from titanlite.score import TextScore as TextScore
    from titanlite.score import evaluate_text as evaluate_text
    from titanlite.train.loop import Trainer as Trainer
    from titanlite.train.profile_steps import profile_steps as profile_steps

__version__ = "0.2.0"

_HOMES = {
    "titanlite.completion": ("Completion", "LoadedCheckpoint", "generate", "generate_many", "load_checkpoint"),
    "titanlite.config.errors": ("UserError",),
    "titanlite.config.load": ("load_job",),
    "titanlite.config.schema": ("JobConfig",),
    "titanlite.data.loader": ("Loader",),
    "titanlite.data.tokenizer": ("load_tokenizer",),
    "titanlite.config.flavors": ("FLAVORS", "Architecture"),
    "titanlite.model.llama": ("Llama",),
    "titanlite.hooks.profiler": ("StepProfile",),
    "titanlite.train.loop": ("Trainer",),
    "titanlite.train.profile_steps": ("profile_steps",),
    "titanlite.score": ("TextScore", "evaluate_text"),
}


__all__ = [name for names in _HOMES.values() for name in names]  # pyright: ignore[reportUnsupportedDunderAll]

use_own_caches()
use_expandable_segments()


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

"""titanlite: pretrain Llama-style language models, from one laptop CPU up to thousands of GPUs.

A Python program needs the names below only; docs/python.md shows how. Each is imported when it is first used, so that
`import titanlite` takes no time.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] or (sys.argv[:1] and sys.argv[0].endswith("/titanlite")):
    # The command, whose first line this is: from here on Ctrl-C gives no traceback. No file is read for it.
    import _signal  # pyright: ignore[reportMissingImports]

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import importlib

from titanlite.runtime.process import set_up_torch

TYPE_CHECKING = False  # as in typing, which is not imported because that takes longer than the start of Python
if TYPE_CHECKING:
    from titanlite.completion import Completion, LoadedCheckpoint, generate, generate_many, load_checkpoint
    from titanlite.config.errors import UserError
    from titanlite.config.flavors import FLAVORS, Architecture
    from titanlite.config.load import load_job
    from titanlite.config.registry import load_plugins, register
    from titanlite.config.schema import JobConfig
    from titanlite.data.loader import Loader
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.hooks.profiler import StepProfile
    from titanlite.model.llama import Llama
    from titanlite.score import TextScore, evaluate_text
    from titanlite.train.loop import Trainer
    from titanlite.train.profile_steps import profile_steps

__version__ = "0.2.0"
__all__ = [
    "FLAVORS", "Architecture", "Completion", "JobConfig", "Llama", "LoadedCheckpoint", "Loader", "StepProfile",
    "TextScore", "Trainer", "UserError", "evaluate_text", "generate", "generate_many", "load_checkpoint", "load_job",
    "load_plugins", "load_tokenizer", "profile_steps", "register",
]  # fmt: skip
# What has the names: modules without torch first, each of which does without those after it.
_HOMES = (
    "config.errors", "config.flavors", "config.registry", "config.schema", "config.load", "data.tokenizer",
    "model.llama", "data.loader", "completion", "score", "hooks.profiler", "train.loop", "train.profile_steps",
)  # fmt: skip

set_up_torch()


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"titanlite.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")

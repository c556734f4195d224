"""titanlite: pretrain Llama-style language models, from one laptop CPU up to thousands of GPUs.

The names in `__all__` are the Python API; see docs/reference/python.md for examples. They are
imported when you access them, so `import titanlite` is fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than starting Python
if TYPE_CHECKING:
    from titanlite.completion import (
        Completion,
        LoadedCheckpoint,
        generate,
        generate_many,
        load_checkpoint,
    )
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
    from titanlite.train.profile_steps import profile_steps
    from titanlite.train.trainer import Trainer

__version__ = "0.3.0"
__all__ = [
    "FLAVORS", "Architecture", "Completion", "JobConfig", "Llama", "LoadedCheckpoint", "Loader",
    "StepProfile", "TextScore", "Trainer", "UserError", "evaluate_text", "generate",
    "generate_many", "load_checkpoint", "load_job", "load_plugins", "load_tokenizer",
    "profile_steps", "register",
]  # fmt: skip
# Modules that define the names in `__all__`. Modules that do not import torch come first.
_MODULES = (
    "config.errors", "config.flavors", "config.registry", "config.schema", "config.load",
    "data.tokenizer", "model.llama", "data.loader", "completion", "score", "hooks.profiler",
    "train.trainer", "train.profile_steps",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a name of the public API, such as `titanlite.Trainer`, when it is accessed.

    This keeps `import titanlite` fast, because torch is only imported for names that need it.
    """
    import importlib

    modules = _MODULES if name in __all__ else ()
    for module_name in modules:
        module = importlib.import_module(f"titanlite.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")

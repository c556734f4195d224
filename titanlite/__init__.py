"""titanlite: pretrain Llama-style language models, from one laptop CPU up to thousands of GPUs.

The names below are the Python API; docs/reference/python.md has examples. Each name is imported
when it is first used, so that `import titanlite` takes no time.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would take longer than the start of Python
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
# Modules that define the names. Modules without torch come first.
_MODULES = (
    "config.errors", "config.flavors", "config.registry", "config.schema", "config.load",
    "data.tokenizer", "model.llama", "data.loader", "completion", "score", "hooks.profiler",
    "train.trainer", "train.profile_steps",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a name of the Python API when it is first used.

    This keeps `import titanlite` fast, because torch is imported only for names that need it.
    """
    import importlib

    modules = _MODULES if name in __all__ else ()
    for module_name in modules:
        module = importlib.import_module(f"titanlite.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")

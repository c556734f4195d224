"""What a job can name: one registry of each kind, for titanlite's own things and for those of plugins.

Invariant: titanlite's own things stand here by the place where they are, "module:name", and are imported when they are
first used. So a job is checked without torch. A plugin is imported only if the job's owner names it: in a job file, on
the command line, or by `load_plugins`. What a checkpoint or a model folder says never causes an import.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic_core import core_schema

from titanlite.config.errors import UserError, one_line
from titanlite.config.mistakes import shown

if TYPE_CHECKING:
    from titanlite.config.schema import Section

T = TypeVar("T")
Kind = Literal["architecture", "optimizer", "schedule", "source", "tokenizer", "writer", "hook"]
ENTRY_POINTS = "titanlite.plugins"
"""The group in which an installed package offers plugins: name -> module."""


class Registry:
    """Name -> thing. As the annotation of a text, such as `Annotated[str, SOURCES]`, it refuses other names.

    Args:
        own: titanlite's things.
    """

    def __init__(self, **own: str) -> None:
        self._things: dict[str, Any] = dict(own)
        self._sections: set[str] = set()  # names of things with keys of their own, which are those of their tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __getitem__(self, name: str) -> Any:
        return resolved(self._things[name])

    def make(self, name: str, tables: object, *inputs: Any) -> Any:
        """Call the thing, with its table of the job behind the other inputs if it has one."""
        return self[name](*inputs, *([getattr(tables, name)] if name in self._sections else ()))

    def add(self, name: str, thing: Any, section: type[Section] | None) -> None:
        """Raises ValueError: the name, or that of its table, is taken."""
        from titanlite.config.schema import add_section  # which has registries in it

        if name in self._things:
            raise ValueError(f"{name} is registered already: {self._things[name]}")
        if section is not None:
            add_section(name, section)
            self._sections.add(name)
        self._things[name] = thing

    def known(self, name: str) -> str:
        """The name. Raises ValueError: there is no such thing."""
        if name not in self._things:
            there = f"must be one of {', '.join(self)}" if self._things else "must be the name of a registered one"
            raise ValueError(f"{there}; a plugin (job.plugins) can bring others")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.known, handler(source))


_FILES = "titanlite.data.sources.files:"
REGISTRIES: dict[Kind, Registry] = {
    "architecture": Registry(llama="titanlite.config.flavors:Architecture"),
    "optimizer": Registry(
        **{name: f"titanlite.optim.build:{name.lower()}" for name in ("AdamW", "Muon", "AdamW8bit", "Lion", "SGD")}
    ),
    "schedule": Registry(wsd="titanlite.optim.schedule:learning_rate"),
    "source": Registry(
        **dict.fromkeys(("python_stdlib", "jsonl", "text"), f"{_FILES}FileSpans"),
        **{"parquet": f"{_FILES}Parquet", "shards": "titanlite.data.sources.shards:Shards"},
        **dict.fromkeys(("arrow", "huggingface", "c4"), f"{_FILES}open_datasets"),
    ),
    "tokenizer": Registry(
        tiktoken="titanlite.data.tokenizer:TiktokenTokenizer",
        huggingface="titanlite.data.tokenizer:HuggingFaceTokenizer",
    ),
    "writer": Registry(json="titanlite.observe.writers:JsonLines", tensorboard="titanlite.observe.writers:TensorBoard"),
    "hook": Registry(),
}
ARCHITECTURES, OPTIMIZERS, SCHEDULES, SOURCES, TOKENIZERS, WRITERS, HOOKS = REGISTRIES.values()
_loaded: set[str] = set()


def resolved(thing: Any) -> Any:
    """What stands at a place such as "module:name"; anything else is the thing itself."""
    return pkgutil.resolve_name(thing) if isinstance(thing, str) else thing


def register(kind: Kind, name: str, section: type[Section] | None = None) -> Callable[[T], T]:
    """A decorator for what a plugin brings. docs/extending.md says what a thing of each kind must be.

    Args:
        name: what a job calls it.
        section: keys of its own, which stand in the table [name] of a job. The thing gets it as its last input.

    Raises:
        ValueError: the name, or that of its table, is taken, or there is no such kind.
    """
    if kind not in REGISTRIES:
        raise ValueError(f"kind = {kind!r} must be one of {', '.join(REGISTRIES)}")

    def add(thing: T) -> T:
        REGISTRIES[kind].add(name, thing, section)
        return thing

    return add


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins, each by the name of its module or of an entry point of the group titanlite.plugins. They register
    what they have. Raises UserError: one is not there, or cannot be imported."""
    for name in names:
        if name in _loaded:
            continue
        offered = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
        path, given = [*sys.path], [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        try:
            # `python -m titanlite` would search the current folder, which can be anybody's.
            sys.path[:] = [each for each in path if os.path.abspath(each) != os.getcwd() or os.getcwd() in given]
            importlib.import_module(offered.get(name, name))
        except (Exception, SystemExit) as error:  # it runs code of the plugin
            why, there = one_line(str(error) or repr(error)).rstrip("."), ", ".join(offered) or "none"
            raise UserError(
                f"job.plugins: the plugin {shown(name)} cannot be imported: {why}. It must be a module on Python's "
                f"path (PYTHONPATH, or an installed package), or a name that installed packages offer: {there}."
            ) from error
        finally:
            sys.path[:] = path
        _loaded.add(name)


def require_plugins(names: Iterable[str], what: object) -> None:
    """Raises UserError unless the owner of this command has named these plugins, which `what` says it needs."""
    if missing := [name for name in names if name not in _loaded]:
        raise UserError(
            f"{what} needs the plugin{'s' * (len(missing) > 1)} {', '.join(missing)}, and no checkpoint or folder may "
            f"cause an import. If you trust them, add --job.plugins {' '.join(missing)} (in Python: load_plugins)."
        )

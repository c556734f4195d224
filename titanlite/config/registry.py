"""Registries of the components that a job can select by name.

These are architectures, optimizers, learning rate schedules, losses, data sources, tokenizers,
metrics loggers and hooks. Plugins can register more of each.

Invariant: built-in entries are registered as "module:name" and imported on first use, so that a job
can be validated without torch. Plugins are loaded only if the user asks for it: in the job file, on
the command line, or with `load_plugins`. The content of a checkpoint or model folder never causes
an import.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from pydantic_core import core_schema

from titanlite.config.errors import UserError, one_line
from titanlite.config.models import Section

T = TypeVar("T")
Kind = Literal[
    "architecture", "optimizer", "schedule", "loss", "source", "tokenizer", "metrics_logger", "hook"
]
RENAMED_KINDS: dict[str, Kind] = {"writer": "metrics_logger"}
"""Current name of each renamed kind of entry. Plugins can still use the former name."""
ENTRY_POINTS = "titanlite.plugins"
"""Entry point group in which installed packages declare their plugins."""
SECTIONS: dict[str, type[Section]] = {}
"""Pydantic model of each job section. `titanlite.config.schema` adds the built-in sections, and
`register` adds the sections of plugins.
"""
_loaded: set[str] = set()


class Registry:
    """Maps names that users write in a job, such as "AdamW", to classes or functions of one kind.

    A pydantic field of type `Annotated[str, REGISTRY]` accepts only names in the registry.

    Args:
        built_in: Location ("module:name") of each built-in entry, by its name.
    """

    def __init__(self, **built_in: str) -> None:
        self._entries: dict[str, Any] = dict(built_in)
        self._names_with_section: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the registered names."""
        return iter(self._entries)

    def __getitem__(self, name: str) -> Any:
        """Return the entry called `name`, importing it on first use."""
        return resolve(self._entries[name])

    def make(self, name: str, *inputs: Any, job: Any) -> Any:
        """Call the class or function that is registered as `name`, and return the result.

        Args:
            name: Name of the entry.
            inputs: Positional arguments for the class or function.
            job: The job. If the entry was registered with a section, this section of the job is
                passed as the last argument.
        """
        if name in self._names_with_section:
            # Do not use getattr: the job may have a method of this name, such as `copy`.
            inputs = (*inputs, dict(job)[name])
        return self[name](*inputs)

    def make_instance(self, result_type: type[T], name: str, *inputs: Any, job: Any) -> T:
        """Call `make`, and check that the result is an instance of `result_type`.

        Raises:
            UserError: If the result has another type.
        """
        result = self.make(name, *inputs, job=job)
        if not isinstance(result, result_type):
            raise UserError(
                f"The class or function that a plugin registered as {name!r} returned {result!r}. "
                f"It must return an instance of {result_type.__module__}.{result_type.__name__}."
            )
        return result

    def add(self, name: str, entry: Any, section: type[Section] | None) -> None:
        """Register a class or function.

        Args:
            name: Name by which a job selects the entry.
            entry: The class or function, or "module:name" to import it on first use.
            section: Model of the section [name] that a job can contain for this entry, or None.

        Raises:
            ValueError: If the name, or the section of that name, is already registered, or if
                `section` is invalid.
        """
        if name in self._entries:
            raise ValueError(f"{name} is registered already: {self._entries[name]}")
        if section is not None:
            _add_section(name, section)
            self._names_with_section.add(name)
        self._entries[name] = entry

    def check_name(self, name: str) -> str:
        """Check that a name is registered, and return it.

        Raises:
            ValueError: If the name is not registered. The message lists the registered names.
        """
        if name not in self._entries:
            names = f"one of {', '.join(self)}" if self._entries else "a registered name"
            raise ValueError(f"must be {names}. Plugins (job.plugins) can register more")
        return name

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Any]
    ) -> core_schema.CoreSchema:
        """Make pydantic accept only registered names in fields annotated with this registry."""
        return core_schema.no_info_after_validator_function(self.check_name, handler(source))


def _add_section(name: str, section: type[Section]) -> None:
    """Add a section to the schema of a job.

    Raises:
        ValueError: If there is a section of this name, the name is not an identifier, or `section`
            is not a subclass of `Section`.
    """
    if name in SECTIONS:
        raise ValueError(f"[{name}] is a table of a job already")
    if not name.isidentifier():
        raise ValueError(f"[{name}] is not a valid name of a table")
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise ValueError(
            f"[{name}]: {section} must be a subclass of titanlite.config.schema.Section"
        )
    SECTIONS[name] = section


ARCHITECTURES = Registry(llama="titanlite.config.flavors:Architecture")
OPTIMIZERS = Registry(
    AdamW="titanlite.optim.build:adamw",
    Muon="titanlite.optim.build:muon",
    AdamW8bit="titanlite.optim.adamw8bit:AdamW8bit",
    Lion="titanlite.optim.adamw:Lion",
    SGD="titanlite.optim.adamw:SGD",
)
SCHEDULES = Registry(wsd="titanlite.optim.schedule:wsd_learning_rate")
LOSSES = Registry(
    cross_entropy="titanlite.optim.losses:CrossEntropy",
    reference="titanlite.optim.losses:Reference",
)
SOURCES = Registry(
    python_stdlib="titanlite.data.sources.files:FileSpans",
    jsonl="titanlite.data.sources.files:FileSpans",
    text="titanlite.data.sources.files:FileSpans",
    parquet="titanlite.data.sources.files:Parquet",
    shards="titanlite.data.sources.shards:Shards",
    tokens="titanlite.data.sources.token_files:TokenFiles",
    arrow="titanlite.data.sources.files:open_datasets",
    huggingface="titanlite.data.sources.files:open_datasets",
    c4="titanlite.data.sources.files:open_datasets",
)
TOKENIZERS = Registry(
    tiktoken="titanlite.data.tokenizer:TiktokenTokenizer",
    huggingface="titanlite.data.tokenizer:HuggingFaceTokenizer",
)
METRICS_LOGGERS = Registry(
    json="titanlite.observe.metrics_loggers:JsonLines",
    tensorboard="titanlite.observe.metrics_loggers:TensorBoard",
)
HOOKS = Registry()
REGISTRIES: dict[Kind, Registry] = {
    "architecture": ARCHITECTURES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "loss": LOSSES,
    "source": SOURCES,
    "tokenizer": TOKENIZERS,
    "metrics_logger": METRICS_LOGGERS,
    "hook": HOOKS,
}


def resolve(entry: Any) -> Any:
    """Import an entry given as "module:name". Return any other entry unchanged."""
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


def register(kind: Kind, name: str, section: type[Section] | None = None) -> Callable[[T], T]:
    """Return a decorator that registers a class or function of a plugin.

    docs/reference/plugins.md describes the interface of each kind.

    Args:
        kind: Kind of entry, such as "optimizer" or "hook".
        name: Name by which a job selects the entry.
        section: Model of the section [name] that a job can contain to configure the entry. When the
            entry is called, it gets the section as the last argument.

    Raises:
        ValueError: If `kind` is unknown. The decorator also raises it if `name` is already
            registered or `section` is invalid.
    """
    kind = RENAMED_KINDS.get(kind, kind)
    if kind not in REGISTRIES:
        known_kinds = ", ".join(REGISTRIES)
        raise ValueError(f"kind = {kind!r} must be one of {known_kinds}")
    registry = REGISTRIES[kind]

    def decorate(entry: T) -> T:
        registry.add(name, entry, section)
        return entry

    return decorate


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins that are not loaded yet. When imported, they register classes and functions.

    Args:
        names: Names of modules, or of entry points in the group "titanlite.plugins".

    Raises:
        UserError: If a plugin does not exist or its import fails.
    """
    for name in names:
        if name not in _loaded:
            _import_plugin(name)
            _loaded.add(name)


def _import_plugin(name: str) -> None:
    """Import a plugin, given the name of a module or of an entry point.

    Raises:
        UserError: If the plugin does not exist or its import fails.
    """
    module = find_plugin_module(name)
    try:
        with _without_current_folder():
            importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the import runs the code of the plugin
        reason = one_line(str(error) or repr(error)).rstrip(".")
        raise UserError(
            f'job.plugins: cannot import the plugin "{name}": {reason}. '
            f"{_locate_import_error(error, module)}"
        ) from error


def _locate_import_error(error: BaseException, module: str) -> str:
    """Describe where the import of a plugin failed, or which plugins exist if it was not found.

    Args:
        error: Exception that the import raised.
        module: Name of the plugin module.
    """
    failing_line = _find_failing_line(error, module)
    if failing_line:
        return f"The import failed at {failing_line}."

    entry_point_names = sorted(_list_plugin_modules())
    return (
        "It must be a module on PYTHONPATH or in an installed package, or one of the names that "
        f"installed packages offer: {', '.join(entry_point_names) or 'none'}."
    )


def _find_failing_line(error: BaseException, module: str) -> str | None:
    """Return the line of a plugin at which its import failed, such as "/home/me/my_plugin.py:14".

    Return None if the plugin was not found, so that none of its lines ran.

    Args:
        error: Exception that the import raised.
        module: Name of the plugin module.
    """
    # Find the innermost call inside the package of the plugin.
    package = _get_package(module)
    failing_line: str | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):  # from the outermost call inward
        file = frame.f_code.co_filename
        frame_module = frame.f_globals.get("__name__", "")
        is_in_package = _get_package(frame_module) == package
        is_this_file = file == __file__  # in the package if the plugin is a part of titanlite
        if is_in_package and not is_this_file:
            failing_line = f"{file}:{line}"
    if failing_line is not None:
        return failing_line

    # A file with a syntax error never runs, so the traceback does not contain it.
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    return None


def _get_package(module: str) -> str:
    """Return the top-level package of a module, such as "titanlite" for "titanlite.cli"."""
    return module.partition(".")[0]


def find_plugin_module(name: str) -> str:
    """Return the module name of a plugin, given its module name or its entry point name."""
    return _list_plugin_modules().get(name, name)


def _list_plugin_modules() -> dict[str, str]:
    """Return the plugin modules that installed packages declare, by name of the entry point."""
    with _without_current_folder():  # it may contain metadata of a package of another user
        # The value is "module" or "module:object". `EntryPoint.module` would raise an error for
        # an invalid value, such as "my-package.module".
        return {
            entry.name: entry.value.partition(":")[0].strip()
            for entry in entry_points(group=ENTRY_POINTS)
        }


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Remove the current folder from the Python module search path during the `with` block.

    By default, `python -m` imports modules from the current folder, which may contain files of
    other users. A folder in PYTHONPATH is trusted and kept.
    """
    trusted = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    is_trusted = os.getcwd() in map(os.path.abspath, trusted)
    original_path = list(sys.path)
    if not is_trusted:
        sys.path[:] = [folder for folder in original_path if os.path.abspath(folder) != os.getcwd()]
    try:
        yield
    finally:
        sys.path[:] = original_path


def require_plugins(names: Iterable[str], source: object) -> None:
    """Check that the user has loaded the plugins that a checkpoint or job file needs.

    This never imports a plugin, because the content of a checkpoint must not run code.

    Args:
        names: Names of the plugins.
        source: Path of the checkpoint or job file, for the error message.

    Raises:
        UserError: If a plugin has not been loaded.
    """
    missing = [name for name in names if name not in _loaded]
    if missing:
        raise UserError(
            f"{source} needs plugins, but titanlite does not import them on its own, because that "
            "would run their code. If you trust them, add "
            f"--job.plugins {' '.join(missing)} (in Python: load_plugins)."
        )

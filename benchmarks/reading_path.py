"""Count the files and lines that a reader follows in one training step and in one save.

    python benchmarks/reading_path.py

The script runs the debug model on a CPU and records which functions of titanlite a step and a save
call. docs/internals/architecture.md explains the rules and compares the counts with other
frameworks.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from runs import ROOT, table

from titanlite.load_run import load_run
from titanlite.train.trainer import Trainer

PACKAGE = ROOT / "titanlite"
SHORT = 8
"""Lines of code in the body of a short function. A reader rarely has to open it."""

# Modules that the counts leave out, by the beginning of their path in the package.
EXCLUDED = {
    "step": (
        # Hooks, and requests of other ranks.
        "hooks/checkpoints.py",
        "hooks/garbage.py",
        "hooks/guards.py",
        "hooks/hang_report.py",
        "hooks/hook.py",
        "checkpoint/",
        # Background workers read the text.
        "data/documents.py",
        "data/packing.py",
        "data/worker.py",
        # Metrics loggers and the log.
        "observe/metrics_loggers.py",
        "runtime/logging.py",
    ),
    "save": (
        # The state of hooks and data, and the removal of old checkpoints.
        "hooks/guards.py",
        "hooks/hook.py",
        "hooks/hook_state.py",
        "data/",
        "observe/",
        "checkpoint/saved_folders.py",
        "runtime/logging.py",
    ),
}


class Function(NamedTuple):
    """A function of titanlite that was called.

    Attributes:
        path: Its module, relative to the package.
        num_lines: Lines with decorators and docstring.
        num_code_lines: Lines of code in the body, without docstring, comments and empty lines.
    """

    path: str
    num_lines: int
    num_code_lines: int


def record_calls(action: Callable[[], Any]) -> list[Function]:
    """Run `action`, and return the functions of titanlite that it calls, in order of first call."""
    called: dict[tuple[str, int], None] = {}

    def record(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            called.setdefault((code.co_filename, code.co_firstlineno))

    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
    functions = (find_function(Path(path), line) for path, line in called)
    return [function for function in functions if function is not None]


def find_function(path: Path, first_line: int) -> Function | None:
    """Return the function that starts at a line of a module, or None for a lambda or a module."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and find_first_line(node) == first_line:
            end = node.end_lineno or first_line
            num_code_lines = len(code_lines(node, source.splitlines()))
            module = str(path.relative_to(PACKAGE))
            return Function(module, end - first_line + 1, num_code_lines)
    return None


def find_first_line(node: ast.FunctionDef) -> int:
    """Return the first line of a function, including its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def code_lines(node: ast.FunctionDef, lines: list[str]) -> set[int]:
    """Return the numbers of the code lines in the body of a function."""
    body = node.body[1:] if ast.get_docstring(node) else node.body

    def numbers() -> Iterator[int]:
        for statement in body:
            yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)

    return {number for number in numbers() if not is_empty(lines[number - 1])}


def is_empty(line: str) -> bool:
    """Return whether a line has no code, but at most a comment."""
    return not line.strip() or line.strip().startswith("#")


def count_jumps_back(functions: list[Function]) -> int:
    """Count how often the path returns to a module after it has visited another one."""
    visited: set[str] = set()
    num_jumps = 0
    last = ""
    for function in functions:
        if function.path != last and function.path in visited:
            num_jumps += 1
        visited.add(function.path)
        last = function.path
    return num_jumps


def summarize(name: str, functions: list[Function]) -> list[str]:
    """Return the table row of a path: its name, files, lines and jumps without short functions.

    The last two values are the files and lines with short functions.
    """
    path = [function for function in functions if not function.path.startswith(EXCLUDED[name])]
    long_functions = [function for function in path if function.num_code_lines > SHORT]
    counts = [
        len({function.path for function in long_functions}),
        sum(function.num_lines for function in long_functions),
        count_jumps_back(long_functions),
        len({function.path for function in path}),
        sum(function.num_lines for function in path),
    ]
    return [name, *map(str, counts)]


def main() -> None:
    """Trace a step and a save of the debug model, and print the counts as a table."""
    options = ["--job.config_file", str(ROOT / "train_configs/debug_model.toml")]
    options += ["--metrics.log_freq", "1", "--checkpoint.async_mode", "disabled"]
    options += ["--training.mixed_precision_param", "bfloat16"]  # with FSDP
    with tempfile.TemporaryDirectory() as folder:
        options += ["--job.dump_folder", folder]
        with Trainer(load_run(options, world_size=1)) as trainer:
            trainer.step()  # builds what later steps reuse
            trainer.step()
            paths = {"step": record_calls(trainer.step), "save": record_calls(trainer.save)}

    headings = ["path", "files with long functions", "their lines", "jumps back"]
    headings += ["files with any function", "their lines"]
    rows = [summarize(name, functions) for name, functions in paths.items()]
    print("\n".join(table(headings, rows)))
    for name, functions in paths.items():
        long_functions = [function for function in functions if function.num_code_lines > SHORT]
        modules = dict.fromkeys(function.path for function in long_functions)
        included = [module for module in modules if not module.startswith(EXCLUDED[name])]
        print(f"{name}: {', '.join(included)}")


if __name__ == "__main__":
    main()

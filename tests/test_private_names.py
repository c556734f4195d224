"""docs/internals/private_torch_names.md lists all private names in the package, with tests."""

import ast
import io
import itertools
import re
import sys
import tokenize
from types import FunctionType, MethodType

import pytest
from small_runs import ROOT

PACKAGE = ROOT / "titanlite"
PAGE = (ROOT / "docs" / "internals" / "private_torch_names.md").read_text()
MAX_NAMES = 60

PYTHON_TYPES = (object, list, dict, BaseException, type, FunctionType, MethodType)
PYTHON_NAMES = {name for python_type in PYTHON_TYPES for name in dir(python_type)}
PYTHON_NAMES |= {"__version__", "__all__", "__name__", "__future__", "__notes__", "__main__"}
PYTHON_NAMES |= {"_make", "_replace"}  # methods of named tuples


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != ""


def find_private_names(code: str) -> set[str]:
    """Return the private names of other libraries in a module.

    A private name is not counted if the module defines it, or if it is an attribute of `self`,
    `cls`, `super()` or a module of the standard library.
    """
    defined = set(PYTHON_NAMES)
    foreign = set[str]()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Import(names=aliases):
                modules = {part for alias in aliases for part in alias.name.split(".")}
                foreign |= modules - sys.stdlib_module_names
            case ast.ImportFrom(module=str(module), names=aliases):
                if not module.startswith("titanlite"):
                    foreign |= {*module.split("."), *(alias.name for alias in aliases)}
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                foreign.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                defined.add(name)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                defined.add(name)
            case ast.Attribute(value=ast.Name(id=owner)) if owner in sys.stdlib_module_names:
                pass
            case ast.Attribute(attr=name):
                foreign.add(name)
            # Strings such as "torch.a.b" name attributes to patch.
            case ast.Constant(value=str(name)) if re.fullmatch(r"torch(\.\w+)+", name):
                foreign |= set(name.split("."))
    return {name for name in foreign - defined if is_private(name)}


MODULES = {
    str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
}


def read_row(line: str) -> list[list[str]]:
    """Return the quoted parts of each cell: names, modules, none, and tests."""
    return [re.findall("`(.+?)`", cell) for cell in line.strip("|").split("|")]


TABLE_ROWS = [read_row(line) for line in PAGE.splitlines() if line.startswith("| `")]


def test_every_private_name_in_the_package_is_listed():
    listed = set[tuple[str, str]]()
    for names, modules, *_ in TABLE_ROWS:
        listed |= set(itertools.product(names, modules))
    unlisted = []
    for module, code in MODULES.items():
        folder = f"{module.split('/')[0]}/"
        for name in find_private_names(code):
            if not {(name, module), (name, folder)} & listed:
                unlisted.append((name, module))

    assert unlisted == []


def test_the_number_of_listed_names_does_not_grow():
    listed = {name for names, *_ in TABLE_ROWS for name in names}

    assert len(listed) <= MAX_NAMES


def list_words(code: str) -> set[str]:
    """Return the words in code and strings, but not in comments."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    texts = [token.string for token in tokens if token.type != tokenize.COMMENT]
    return set(re.findall(r"\w+", " ".join(texts)))


@pytest.mark.parametrize("row", TABLE_ROWS, ids=lambda row: " ".join(row[0])[:40])
def test_every_listed_name_is_used_in_the_listed_modules_and_has_a_test(row):
    names, modules_or_folders, _reason, tests = row
    assert tests

    for prefix in modules_or_folders:
        code = "".join(code for module, code in MODULES.items() if module.startswith(prefix))
        assert set(names) <= list_words(code), prefix
    for test in tests:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), test

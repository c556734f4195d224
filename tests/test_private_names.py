"""docs/architecture.md lists each private name of other libraries that the package uses, and no other."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# What classes of Python may define. Other names with two underscores are some library's own protocol.
PYTHONS = {name for kind in (object, list, dict, BaseException, type) for name in dir(kind)}
PYTHONS |= {"__version__", "__all__", "__name__", "__future__", "__notes__", "__main__"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and name not in PYTHONS


def private_names(code: str) -> set[str]:
    """The private names of other libraries in a module: what it imports, reads as an attribute, or names in getattr,
    hasattr and setattr. Its own are what it defines, and the attributes of `self` and `cls`."""
    tree = ast.parse(code)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    standard: set[str] = set()
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                standard |= {alias.name for alias in names if alias.name in sys.stdlib_module_names}
                found |= {part for alias in names for part in alias.name.split(".")}
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] != "titanlite":
                found |= {part for part in [*module.split("."), *(alias.name for alias in names)]}
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attr):
                own.add(attr)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in standard | {"self", "cls"}:
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=attr):
                found.add(attr)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                found.add(name)
    return {name for name in found - own if is_private(name)}


def names_of_a_module(code: str) -> set[str]:
    """All that a module names: as a variable, an attribute, an import or a text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
                names.add(name)
            case ast.Import(names=aliases):
                names |= {part for alias in aliases for part in alias.name.split(".")}
            case ast.ImportFrom(module=str(module), names=aliases):
                names |= {part for part in [*module.split("."), *(alias.name for alias in aliases)]}
    return names


def modules(place: str) -> dict[str, str]:
    """Path from the package -> code, of a module or of all modules of a room."""
    path = ROOT / "titanlite" / place
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return {str(module.relative_to(ROOT / "titanlite")): module.read_text() for module in found}


def table(title: str) -> Iterator[tuple[set[str], list[str], list[str]]]:
    """Rows of a section's table: the names, the modules or rooms that use them, the tests."""
    section = PAGE.split(f"\n### {title}\n")[1].split("\n#")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert rows
    for names, places, _why, tests in rows:
        yield set(re.findall("`(.+?)`", names)), re.findall("`(.+?)`", places), re.findall("`(.+?)`", tests)


ROWS = [*table("Names with an underscore"), *table("Names without one that nothing documents")]


def test_each_private_name_that_is_used_is_listed() -> None:
    listed = {
        (name, place) for names, places, _ in table("Names with an underscore") for name in names for place in places
    }
    for module, code in modules(".").items():
        for name in private_names(code):
            assert any((name, place) in listed for place in (module, f"{module.split('/')[0]}/")), (
                f"titanlite/{module} uses the private name {name}: use a public one, or list it in docs/architecture.md"
            )


@pytest.mark.parametrize(("names", "places"), [row[:2] for row in ROWS], ids=lambda value: " ".join(sorted(value))[:40])
def test_each_listed_name_is_used_where_the_table_says(names: set[str], places: list[str]) -> None:
    assert places
    for name in names:
        find = private_names if is_private(name) else names_of_a_module
        for place in places:
            assert any(name in find(code) for code in modules(place).values()), f"{place} does not use {name}"


def test_the_test_of_each_listed_name_exists() -> None:
    for names, _, tests in ROWS:
        assert tests, f"no test is named for {names}"
        for test in tests:
            file, _, function = test.partition("::")
            assert f"def {function}(" in (ROOT / file).read_text(), test


def test_the_finder_finds_each_way_to_use_a_private_name() -> None:
    ways = {
        "import torch._dynamo": "_dynamo",
        "from torch._C import Size": "_C",
        "from torch.distributed import _functional_collectives as c": "_functional_collectives",
        "torch._foreach_mul_(a, b)": "_foreach_mul_",
        "tensor.to_local()._spec": "_spec",
        "getattr(tensor, '_tensor', tensor)": "_tensor",
        "tensor.__tensor_flatten__()": "__tensor_flatten__",
    }
    assert {code: private_names(code) for code in ways} == {code: {name} for code, name in ways.items()}
    harmless = "import os, sys\nclass A:\n def __init__(self): self._b = len; super().__init__()\n"
    harmless += "def _f(a: A): a._b.__name__; os._exit(0); sys._current_frames(); _ = a.__doc__\n"
    assert private_names(harmless) == set()

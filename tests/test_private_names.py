"""docs/architecture.md lists each private name of other libraries that the package uses, where, and its tests."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titanlite"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# What classes of Python may define. Other names with two underscores are some library's own protocol.
PYTHONS = {name for kind in (object, list, dict, BaseException, type) for name in dir(kind)}
PYTHONS |= {"__version__", "__all__", "__name__", "__future__", "__notes__", "__main__"}
PYTHONS |= {"_make", "_replace"}  # methods of named tuples


def names_of(code: str) -> tuple[set[str], set[str]]:
    """All that a module names as an attribute, an import or a text; and of these the private names of other libraries:
    not those that it defines, and no attributes of `self`, `cls`, `super()` and of modules of Python."""
    own, found, others = set(PYTHONS), set(), set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Import(names=aliases):
                found |= {part for alias in aliases for part in alias.name.split(".")} - sys.stdlib_module_names
            case ast.ImportFrom(module=str(module), names=aliases) if not module.startswith("titanlite"):
                found |= {*module.split("."), *(alias.name for alias in aliases)}
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=x), *_]):
                found.add(x)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own.add(name)
                others.add(name)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in sys.stdlib_module_names:
                others.add(name)
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(name)) | ast.Name(id=name):
                others.add(name)
    return found | others, {name for name in found - own if name.startswith("_") and name.strip("_")}


MODULES = {str(path.relative_to(PACKAGE)): names_of(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def rows(title: str) -> list[list[list[str]]]:
    """Names, modules or rooms that use them, and tests of each row of a section's table."""
    section = PAGE.split(f"\n### {title}\n")[1].split("\n#")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return [[re.findall("`(.+?)`", cell) for cell in (names, places, tests)] for names, places, _why, tests in lines]


UNDERSCORED, OTHERS = rows("Names with an underscore"), rows("Names without one that nothing documents")


def test_each_private_name_that_is_used_is_listed() -> None:
    listed = {(name, place) for names, places, _ in UNDERSCORED for name in names for place in places}
    used = {(name, module) for module, (_, private) in MODULES.items() for name in private}
    assert {(n, m) for n, m in used if not {(n, m), (n, f"{m.split('/')[0]}/")} & listed} == set()


@pytest.mark.parametrize(("names", "places", "tests"), UNDERSCORED + OTHERS, ids=lambda value: " ".join(value)[:40])
def test_each_listed_name_is_used_where_the_table_says_and_has_a_test(
    names: list[str], places: list[str], tests: list[str]
) -> None:
    assert names
    assert places
    assert tests
    for place in places:
        found = [all_names for module, (all_names, _) in MODULES.items() if module.startswith(place)]
        assert {name for name in names if not any(name in of_module for of_module in found)} == set()
    for test in tests:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), test

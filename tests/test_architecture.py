"""docs/architecture.md is true: what it links to exists, and the floors are those that are enforced."""

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()

LINKS = re.findall(r"\[`?([^`\]]+)`?\]\((\.\./)?([^)#:]+?)(?:#L\d+)?\)", PAGE)


@pytest.mark.parametrize(("text", "up", "path"), LINKS, ids=[f"{text} in {path}" for text, _, path in LINKS])
def test_each_link_leads_to_a_file_that_has_what_the_link_names(text: str, up: str, path: str) -> None:
    """`Class.method` or `function` is defined there; other texts are paths."""
    target = (ROOT / "docs" / up / path).resolve()
    assert target.exists(), path
    if target.suffix == ".py" and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?(\(\))?", text) and text != target.name:
        scope: ast.AST = ast.parse(target.read_text())
        for name in text.removesuffix("()").split("."):
            inside = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
            assert inside, f"{path} defines no {text}"
            scope = inside[0]


def test_every_room_stands_on_the_page_above_those_that_it_imports() -> None:
    rooms = re.findall(r"^\| \[?`(\w+)(?:/|\.py)`.*\|$", PAGE, flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = {name.split(".")[1].strip(): floor for floor, layer in enumerate(layers) for name in layer.split("|")}
    assert sorted(rooms) == sorted(floors)
    assert [floors[room] for room in rooms] == sorted(floors.values())
    folders = {path.name for path in (ROOT / "titanlite").iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(rooms)


COUNT = runpy.run_path(str(ROOT / "scripts" / "count_code.py"))


def test_package_and_tests_do_not_grow() -> None:
    """The limits go down with the numbers. A change that must raise one says in its message what it was worth."""
    assert COUNT["lines_of_package"]() <= COUNT["MOST_PACKAGE_LINES"]
    assert COUNT["lines_of_tests"]() <= COUNT["MOST_TEST_LINES"]


def test_only_code_is_counted(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    text = '"""Docstring\n\nof three lines."""\n\n# comment\nx = """a\n\nb"""  # three lines\n\n'
    module.write_text(f"{text}if x:\n    y = [\n        1,\n    ]\n")
    assert COUNT["code_lines"](module) == 3 + 1 + 3

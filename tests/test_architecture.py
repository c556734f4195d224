"""docs/internals/architecture.md matches the code, and the code size stays below its ceilings."""

import ast
import importlib
import re
import runpy
import tomllib

import pytest
from small_runs import ROOT

PAGE = (ROOT / "docs" / "internals" / "architecture.md").read_text()

LINKS = re.findall(r"\[`?([^`\]]+)`?\]\(((?:\.\./)*)([^)#:]+?)(?:#L\d+)?\)", PAGE)


@pytest.mark.parametrize(
    ("text", "up", "path"), LINKS, ids=[f"{text} in {path}" for text, _, path in LINKS]
)
def test_each_link_leads_to_a_file_that_defines_the_linked_name(text, up, path):
    """Link texts such as `Class.method` or `function` name a definition in the linked file."""
    target = (ROOT / "docs" / "internals" / up / path).resolve()
    assert target.exists(), path

    if (
        target.suffix == ".py"
        and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?(\(\))?", text)
        and text != target.name
    ):
        scope: ast.AST = ast.parse(target.read_text())
        for name in text.removesuffix("()").split("."):
            inside = [
                node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name
            ]
            assert inside, f"{path} defines no {text}"
            scope = inside[0]


def test_the_page_lists_every_package_above_the_packages_that_it_imports():
    packages = re.findall(r"^\| \[?`(\w+)(?:/|\.py)`.*\|$", PAGE, flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    depths = {}
    for depth, layer in enumerate(layers):
        for name in layer.split("|"):
            depths[name.split(".")[1].strip()] = depth

    assert sorted(packages) == sorted(depths)
    assert [depths[package] for package in packages] == sorted(depths.values())

    folders = {
        path.name for path in (ROOT / "titanlite").iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= set(packages)


def test_classes_and_type_aliases_of_the_package_have_unique_names():
    names = []
    for path in (ROOT / "titanlite").rglob("*.py"):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text))
        names += [node.name for node in nodes if isinstance(node, ast.ClassDef)]
        names += re.findall(r"^(_?[A-Z]+[a-z]\w*) = ", text, re.MULTILINE)

    assert [name for name in set(names) if names.count(name) > 1] == []


COUNT = runpy.run_path(str(ROOT / "scripts" / "count_code.py"))


def test_the_names_that_examples_import_exist():
    """Some examples need packages that are not installed, so no other test imports them."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.split(".")[0] == "titanlite":
                module = importlib.import_module(node.module)
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{path.relative_to(ROOT)}: {node.module} lacks {missing}"


def test_package_and_tests_stay_below_their_token_ceilings():
    package = COUNT["count_folder"](ROOT / "titanlite")
    tests = COUNT["count_folder"](ROOT / "tests")

    assert package.tokens <= COUNT["MAX_PACKAGE_TOKENS"]
    assert package.tokens_per_line <= COUNT["MAX_PACKAGE_TOKENS_PER_LINE"]
    assert tests.tokens <= COUNT["MAX_TEST_TOKENS"]
    assert tests.tokens_per_line <= COUNT["MAX_TEST_TOKENS_PER_LINE"]


def test_comments_docstrings_and_layout_do_not_count(tmp_path):
    module = tmp_path / "module.py"
    docstring = '"""Docstring\n\nof three lines."""\n\n'
    assignment = 'x = """a\n\nb"""  # a string of three lines\n\n'  # 3 tokens, 1 line
    # This code has 3 + 3 + 2 + 1 tokens on 4 lines.
    branch = "if x:\n    y = [\n        1,\n    ]\n"
    module.write_text(docstring + "# comment\n" + assignment + branch)

    assert COUNT["count_code"]([module]) == (3 + 9, 1 + 4)

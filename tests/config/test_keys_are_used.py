"""Each key that a job accepts is read by the code that it is for.

The uses are found in the syntax trees of the package. An attribute `x.key` is a use of a section's key where x is known
to hold that section: by the annotation of a parameter or of a function's result, by an assignment from such a value, or
as an attribute of that name (`job.training`). Rules do not count: to check a key is not to use it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.config.keys import SECTIONS
from titanlite.config.mistakes import table_within

PACKAGE = Path(schema.__file__).parents[1]
UNREAD = ("config/schema.py", "config/rules.py", "config/parallelism_rules.py", "load_run.py", "checkpoint/job_diff.py")
CLASSES = {name: value for name, value in vars(schema).items() if isinstance(value, type)}
CLASSES |= {"Architecture": Architecture}
TABLES = [*SECTIONS.values(), schema.DataSource, schema.DataStage, schema.ValidationSource]
ONE_VALUE = {(schema.Optimizer, "name")}  # nothing needs to ask

Known = dict[str, set[type]]


def trees() -> Iterator[ast.Module]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix() not in UNREAD:
            yield ast.parse(path.read_text(encoding="utf-8"))


def named(annotation: ast.expr | None) -> set[type]:
    """The classes of the schema in an annotation such as `tuple[schema.DataSource, ...]`."""
    if annotation is None:
        return set()
    words = [node for node in ast.walk(annotation) if isinstance(node, ast.Name | ast.Attribute)]
    return {CLASSES[word] for node in words if (word := last_word(node)) in CLASSES}


def last_word(node: ast.expr) -> str:
    """`x` of the name x, of the attribute y.x and of y._x; empty for anything else."""
    word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return word.lstrip("_")


def values_in(node: ast.expr, known: Known) -> set[type]:
    """The sections that an expression holds, or holds a collection of."""
    if isinstance(node, ast.Name | ast.Attribute):
        word = last_word(node)
        own = {SECTIONS[word]} if isinstance(node, ast.Attribute) and word in SECTIONS else set()
        return own | known[word] | tables_in(node, known)
    if isinstance(node, ast.Call):
        found = values_in(node.func, known)
        return found if found else set().union(*(values_in(argument, known) for argument in node.args))
    if isinstance(node, ast.BoolOp | ast.IfExp | ast.Tuple | ast.Subscript | ast.Starred):
        return set().union(
            *(values_in(child, known) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        )
    return set()


def tables_in(node: ast.expr, known: Known) -> set[type]:
    """The tables that a key such as `dataset.sources` is a list of."""
    if not isinstance(node, ast.Attribute):
        return set()
    fields = [getattr(section, "model_fields", {}).get(node.attr) for section in values_in(node.value, known)]
    return {table for field in fields if field is not None and (table := table_within(field.annotation)) is not None}


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what; `a, b = c, d` and `for a, b in zip(c, d)` one by one."""
    if isinstance(value, ast.Call) and last_word(value.func) == "zip":
        value = ast.Tuple(value.args)
    if isinstance(value, ast.Call) and last_word(value.func) == "enumerate" and isinstance(target, ast.Tuple):
        target, value = target.elts[1], value.args[0]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for left, right in zip(target.elts, value.elts, strict=True):
            yield from pairs(left, right)
    else:
        yield target, value


def known_in(tree: ast.Module, functions: Known) -> Known:
    """Which names of a module hold which sections."""
    known: Known = defaultdict(set, {name: set(classes) for name, classes in functions.items()})
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            known[node.arg] |= named(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            known[last_word(node.target)] |= named(node.annotation)
    for _ in range(3):  # an alias of an alias of an alias
        for node in ast.walk(tree):
            found: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                found = list(pairs(node.targets[0], node.value))
            elif isinstance(node, ast.For | ast.comprehension):
                found = list(pairs(node.target, node.iter))
            for target, value in found:
                known[last_word(target)] |= values_in(value, known)
    known.pop("", None)
    return known


def uses() -> set[tuple[type, str]]:
    """(class, attribute) of each attribute that is read."""
    modules = list(trees())
    functions: Known = defaultdict(set)
    for tree in modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions[node.name.lstrip("_")] |= named(node.returns)
    found: set[tuple[type, str]] = set()
    for tree in modules:
        known = known_in(tree, functions)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found |= {(section, node.attr) for section in values_in(node.value, known)}
    return found


USES = uses()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_each_key_is_read_somewhere(table: type[schema.Section]):
    readers = {Architecture, schema.Model} if table is schema.Model else set(table.__mro__)
    read = {attribute for section, attribute in USES if section in readers}
    unused = [key for key in table.model_fields if key not in read and (table, key) not in ONE_VALUE]
    assert unused == []


def test_a_key_without_a_reader_would_be_found():
    assert (schema.Training, "seq_len") in USES
    assert (schema.Validation, "document_mask") not in USES
    assert (schema.Dataset, "document_mask") in USES
    assert not any(attribute == "no_such_key" for _, attribute in USES)

"""Each key that a job accepts is read by the code. Rules do not count: to check a key is not to use it."""

import ast
from pathlib import Path

import pytest

from titanlite.config import schema

PACKAGE = Path(schema.__file__).parents[1]
UNREAD = {"config/schema.py", "load_run.py", "checkpoint/job_diff.py", "torchtitan/migrate.py"}
READ = {
    node.attr
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).as_posix() not in UNREAD
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
}
TABLES = [*schema.SECTIONS.values(), schema.DataSource, schema.DataStage, schema.ValidationSource]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_each_key_is_read_somewhere(table: type[schema.Section]):
    one_value = {"name"} if table is schema.Optimizer else set()  # nothing needs to ask
    assert set(table.model_fields) - one_value <= READ

"""The documentation as a site: it is built without a warning, and its references have all keys and all commands."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from titanlite.cli import COMMANDS
from titanlite.config.schema import KEYS

ROOT = Path(__file__).parents[1]
HOOKS = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))


def test_the_reference_has_every_key_with_its_type_default_and_text() -> None:
    page = HOOKS["keys_page"]()
    for key, field in KEYS.items():
        assert f"### {key} {{ #{key} }}" in page
        assert (field.description or "").split("`")[0].replace("<", "&lt;") in page
    assert "### training.seq_len { #training.seq_len }\n\n*a whole number greater than 0; default `" in page
    assert "### dataset.sources.weight" in page  # of a table in a section


LINKS = {
    "[a](training.md#memory)": "[a](training.md#memory)",
    "[a](../README.md)": "[a](index.md)",
    "[a](../titanlite/cli.py#L3)": "[a](https://github.com/titanlite/titanlite/blob/main/titanlite/cli.py#L3)",
    "[a](../train_configs)": "[a](https://github.com/titanlite/titanlite/tree/main/train_configs)",
    "[a](https://pytorch.org) [b](#here)": "[a](https://pytorch.org) [b](#here)",
    "```\nx[0](not_a_link)\n```": "```\nx[0](not_a_link)\n```",
}


def test_links_lead_to_a_page_or_to_the_repository_and_a_link_to_nothing_ends_the_build() -> None:
    there = {"training.md", "index.md", "changes.md"}
    page = SimpleNamespace(file=SimpleNamespace(src_uri="model.md"))
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in there else None)
    for link, leads_to in LINKS.items():
        assert HOOKS["on_page_markdown"](link, page, SimpleNamespace(), files) == leads_to
    with pytest.raises(FileNotFoundError, match=r"docs/model\.md: \.\./titanlite/gone\.py"):
        HOOKS["on_page_markdown"]("[a](../titanlite/gone.py)", page, SimpleNamespace(), files)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="no mkdocs-material: pip install 'titanlite[docs]'"
)
def test_the_site_is_built_without_a_warning_and_asks_for_nothing_on_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    written = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")} <= written
    commands = (tmp_path / "reference" / "commands.html").read_text()
    for name, (_, text) in COMMANDS.items():
        assert f'id="{name}"' in commands
        assert text.partition("`")[0] in commands
    assert "--max-new-tokens" in commands
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//', page.read_text()), page
        assert not re.search(
            r'<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="(?:https?:)?//', page.read_text()
        ), page

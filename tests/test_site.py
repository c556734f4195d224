"""The documentation as a site: it is built without a warning, and its references have all keys and all commands."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="no mkdocs-material: pip install 'titanlite[docs]'"
)
def test_the_site_is_built_without_a_warning_and_asks_for_nothing_on_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    written = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")} <= written
    commands = (tmp_path / "reference" / "commands.html").read_text()
    assert all(f'id="{name}"' in commands for name in COMMANDS)
    assert "--max-new-tokens" in commands
    for page in tmp_path.rglob("*.html"):
        asks = r'<(script|img|iframe)[^>]* src="(https?:)?//'
        asks += r'|<link[^>]* rel="(stylesheet|preconnect)"[^>]* href="(https?:)?//'
        assert not re.search(asks, page.read_text()), page

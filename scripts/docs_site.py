"""Hooks of mkdocs: what of the site is not written in docs/.

The first page is README.md, the changes are CHANGELOG.md. When the site is built, the reference of keys is made from
the schema, and that of all commands from their help, so neither can be out of date. A link that leaves docs/ leads to
the repository on GitHub, and one to a file that is not there ends the build.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.cli import COMMANDS, main, usage
from titanlite.config.mistakes import shown, table_within
from titanlite.config.schema import SECTIONS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]
    from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/titanlite/titanlite"
FROM_ROOT = {"index.md": "README.md", "changes.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
_WHOLE_JOB = ("train", "launch", "check")  # their help has every key, which has a page of its own


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in FROM_ROOT.items()}
    pages |= {"reference/keys.md": keys_page(), "reference/commands.md": commands_page()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to its page of the site, or to the repository."""
    source = FROM_ROOT.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        target = next((page for page, root in FROM_ROOT.items() if root == path), path.removeprefix("docs/"))
        if files.get_file_from_path(target) is not None:
            return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{link[3]}"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source}: {link[2]} leads to {path}, which is not there")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{link[1]}{REPOSITORY}/{kind}/main/{path}{link[3]}"

    # Links are outside of blocks of code.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)


def keys_page() -> str:
    """Every key of a job, from the schema."""
    lines = [
        "# Keys of a job",
        "A job file is TOML: a table for each section. Any key can be given on the command line, too, which wins over "
        "the file: `--training.steps 100`. `titanlite help training.steps` says what stands here.",
    ]
    for name, section in SECTIONS.items():
        lines += [f"## [{name}] {{ #{name} }}", _plain(section.__doc__ or ""), *_keys(section, name)]
    return "\n\n".join(lines) + "\n"


def _keys(table: type[BaseModel], path: str) -> list[str]:
    lines = []
    for name, field in table.model_fields.items():
        inner = table_within(field.annotation)
        kind = (
            f"tables `[[{path}.{name}]]`, in the job file only"
            if inner
            else _allowed(table.model_json_schema()["properties"][name])
        )
        default = "required" if field.is_required() else f"default `{shown(field.default)}`"
        lines += [f"### {path}.{name} {{ #{path}.{name} }}", f"*{kind}; {default}*", _plain(field.description or "")]
        if inner is not None:
            lines += _keys(inner, f"{path}.{name}")
    return lines


def _plain(text: str) -> str:
    """A docstring in which `<name>` is no HTML."""
    parts = text.split("`")  # every second one is code
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def commands_page() -> str:
    """Every command, from its help."""
    lines = ["# Commands", f"```\n{usage()}\n```"]
    for name, (_, text) in COMMANDS.items():
        lines += [f"## titanlite {name} {{ #{name} }}", text]
        if name in _WHOLE_JOB:
            lines.append("Its options are the [keys of a job](keys.md).")
        else:
            lines.append(f"```\n{_help(name)}\n```")
    return "\n\n".join(lines) + "\n"


def _help(command: str) -> str:
    """What `titanlite COMMAND --help` prints in a terminal of 80 columns."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS="80", NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(out):
            code = main([command, "--help"])
        out.flush()
        assert code == 0, command
        assert isinstance(out.buffer, io.BytesIO)
        return out.buffer.getvalue().decode().strip()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _allowed(schema: dict[str, Any]) -> str:
    """The type and the limits of a key in words, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(shown(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"a list, each {_allowed(schema.get('items', {}))}"
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    limits = {"exclusiveMinimum": "greater than", "minimum": "at least", "exclusiveMaximum": "less than"}
    limits |= {"maximum": "at most", "pattern": "matching"}
    rules = [f"{words} {schema[name]}" for name, words in limits.items() if name in schema]
    return f"{kinds[schema['type']]} {' and '.join(rules)}".strip()


def picture(folder: Path) -> None:
    """Draw docs/run.svg: what `titanlite watch` shows of a run now."""
    from rich.console import Console

    from titanlite.report.run_files import read_status

    console = Console(record=True, width=100, file=io.StringIO())
    console.print(read_status(folder).text())
    svg = console.export_svg(title=f"titanlite watch {folder}")
    svg = re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL)  # fonts from the network
    (ROOT / "docs" / "run.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    picture(Path(sys.argv[1]))

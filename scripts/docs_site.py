"""Hooks of MkDocs that generate pages of the documentation site.

The first page is README.md. The reference of keys is generated from the schema, and the reference
of commands from their help. Links to files outside of docs/ lead to the repository on GitHub. A
link to a missing file fails the build.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from titanlite.cli import COMMANDS, format_usage, main
from titanlite.config.mistakes import find_table_model, format_value
from titanlite.config.schema import SECTIONS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]
    from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/titanlite/titanlite"
FROM_ROOT = {
    "index.md": "README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
_LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)(?P<anchor>(?:#[^)\s]*)?)\)")
_CODE_BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
# The help of these commands lists all job keys, which have a separate page.
_WHOLE_JOB = ("train", "launch")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    pages = {
        page: (ROOT / source).read_text(encoding="utf-8") for page, source in FROM_ROOT.items()
    }
    pages |= {"reference/keys.md": keys_page(), "reference/commands.md": commands_page()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page to pages of the site or to the repository."""
    parts = _CODE_BLOCK.split(markdown)
    for i, part in enumerate(parts):
        if not part.startswith("```"):
            parts[i] = _LINK.sub(lambda link: _rewrite_link(link, page, files), part)
    return "".join(parts)


def _rewrite_link(link: re.Match[str], page: Page, files: Files) -> str:
    """Return a Markdown link that works on the site, in place of a link between repository files.

    Raises:
        FileNotFoundError: If the link leads to a missing file.
    """
    source = FROM_ROOT.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
    page_by_path = {root: name for name, root in FROM_ROOT.items()}
    target = page_by_path.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(target) is not None:
        folder = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(target, folder)}{link['anchor']})"

    if not (ROOT / path).exists():
        raise FileNotFoundError(
            f"{source}: the link {link['path']} leads to {path}, which is missing"
        )
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"]({REPOSITORY}/{kind}/main/{path}{link['anchor']})"


def keys_page() -> str:
    """Generate the reference of all job keys from the schema."""
    lines = [
        "# Options",
        "A job file is TOML with one table per section. Options on the command line, such as "
        "`--training.steps 100`, override the file. `titanlite help training.steps` prints the "
        "same text.",
    ]
    for name, section in SECTIONS.items():
        description = _escape(inspect.cleandoc(section.__doc__ or ""))
        lines += [f"## [{name}] {{ #{name} }}", description, *_describe_keys(section, name)]
    return "\n\n".join(lines) + "\n"


def _describe_keys(table: type[BaseModel], path: str) -> list[str]:
    """Return a heading, the type and the description of each key of a table.

    Args:
        table: Model of the section, or of a table in it.
        path: Dotted name of the table, such as "dataset".
    """
    properties = table.model_json_schema()["properties"]
    lines = []
    for name, field in table.model_fields.items():
        key = f"{path}.{name}"
        inner_table = find_table_model(field.annotation)
        if inner_table is None:
            kind = _describe_type(properties[name])
        else:
            kind = f"tables `[[{key}]]`, in the job file only"
        default = "required" if field.is_required() else f"default `{format_value(field.default)}`"
        lines += [
            f"### {key} {{ #{key} }}",
            f"*{kind}; {default}*",
            _escape(field.description or ""),
        ]
        if inner_table is not None:
            lines += _describe_keys(inner_table, key)
    return lines


def _escape(text: str) -> str:
    """Escape the special characters of Markdown outside of inline code."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):  # the others are code
        escaped = re.sub(r"([\\*_\[\]])", r"\\\1", parts[i])
        parts[i] = escaped.replace("<", "&lt;")
    return "`".join(parts)


def commands_page() -> str:
    """Generate the reference of all commands from their help."""
    lines = ["# Commands", f"```\n{format_usage()}\n```"]
    for name, (_, text) in COMMANDS.items():
        lines += [f"## titanlite {name} {{ #{name} }}", text]
        if name in _WHOLE_JOB:
            lines.append("Its options are the [options of a job](keys.md).")
        else:
            lines.append(f"```\n{_format_help(name)}\n```")
    return "\n\n".join(lines) + "\n"


def _format_help(command: str) -> str:
    """Return the help of a command as printed in a terminal with 80 columns."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
        contextlib.redirect_stdout(out),
    ):
        exit_code = main([command, "--help"])
    out.flush()
    assert exit_code == 0, command
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode().strip()


def _describe_type(schema: dict[str, Any]) -> str:
    """Describe the type and the limits of a key from its JSON schema."""
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(_describe_type(option) for option in options)
    if "const" in schema:
        return format_value(schema["const"])
    if "enum" in schema:
        return " or ".join(format_value(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"a list, each {_describe_type(schema.get('items', {}))}"

    kinds = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "a string",
    }
    limits = {
        "exclusiveMinimum": "greater than",
        "minimum": "at least",
        "exclusiveMaximum": "less than",
        "maximum": "at most",
        "pattern": "matching",
    }
    rules = [f"{words} {schema[name]}" for name, words in limits.items() if name in schema]
    return f"{kinds[schema['type']]} {' and '.join(rules)}".strip()


def draw_watch_view(folder: Path) -> None:
    """Write docs/run.svg, the current `titanlite watch` view of a run."""
    from rich.console import Console

    from titanlite.report.run_files import read_status

    console = Console(record=True, width=100, file=io.StringIO())
    console.print(read_status(folder).to_text())
    console.print()  # Rich cuts off the descenders of the last line
    svg = console.export_svg(title=f"titanlite watch {folder}")
    svg = re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL)  # fonts from the network
    (ROOT / "docs" / "run.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    draw_watch_view(Path(sys.argv[1]))

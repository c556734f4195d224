"""Count the tokens and the code lines of each package.

Usage: `python scripts/count_code.py [FOLDER ...]` (default: titanlite and tests). Comments,
docstrings, and layout (line ends and indentation) do not count, so neither packing nor spreading
out code changes its weight. `tests/test_architecture.py` enforces the ceilings below in CI.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Lower the ceilings whenever the count falls, until they reach the targets. Raise them only if
# clear code needs more tokens.
MAX_PACKAGE_TOKENS = 202_800
TARGET_PACKAGE_TOKENS = 130_000
MAX_PACKAGE_TOKENS_PER_LINE = 8.5
TARGET_PACKAGE_TOKENS_PER_LINE = 8.5
MAX_TEST_TOKENS = 137_600
TARGET_TEST_TOKENS = 115_000
MAX_TEST_TOKENS_PER_LINE = 9.1
TARGET_TEST_TOKENS_PER_LINE = 8.5

ROOT = Path(__file__).resolve().parents[1]
# Since Python 3.12, `tokenize` divides an f-string into parts. Count it as one token, as before.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class CodeSize(NamedTuple):
    """Number of tokens, and number of lines on which at least one token starts."""

    tokens: int
    lines: int

    @property
    def tokens_per_line(self) -> float:
        """Return the average number of tokens on a code line."""
        return self.tokens / max(self.lines, 1)


def find_docstring_lines(source: str) -> set[int]:
    """Return the numbers of all lines that belong to a string standing alone as a statement."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def list_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a module, each f-string as one token."""
    depth = 0  # an f-string can contain others
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if depth == 0:
            yield token
        if token.type == FSTRING_START:
            depth += 1
        elif token.type == FSTRING_END:
            depth -= 1


def count_code(paths: Iterable[Path]) -> CodeSize:
    """Add up the size of the given modules."""
    tokens = 0
    lines = 0
    for path in paths:
        source = path.read_text()
        docstring_lines = find_docstring_lines(source)
        tokens_on_line = Counter(
            token.start[0]
            for token in list_tokens(source)
            if token.type not in LAYOUT_TOKENS and token.start[0] not in docstring_lines
        )
        tokens += tokens_on_line.total()
        lines += len(tokens_on_line)
    return CodeSize(tokens, lines)


def count_folder(folder: Path) -> CodeSize:
    """Count all modules in a folder and its subfolders."""
    return count_code(folder.rglob("*.py"))


def main() -> None:
    """Print the size of each package, and the total of each top-level folder."""
    print(f"{'tokens':>8} {'lines':>8} {'tokens/line':>12}")
    for name in sys.argv[1:] or ["titanlite", "tests"]:
        root = ROOT / name
        for folder in sorted({path.parent for path in root.rglob("*.py")}):
            print_row(str(folder.relative_to(ROOT)), count_code(folder.glob("*.py")))
        print_row(f"{name} (total)", count_folder(root))


def print_row(name: str, size: CodeSize) -> None:
    """Print one row of the table."""
    print(f"{size.tokens:8,} {size.lines:8,} {size.tokens_per_line:12.1f}  {name}")


if __name__ == "__main__":
    main()

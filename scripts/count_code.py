"""Count the package's lines of code (without blank lines, comments and docstrings) and all lines of its tests.

`python scripts/count_code.py [FOLDER]`. The two limits only go down; `tests/test_architecture.py` holds them.
"""

import ast
import sys
import tokenize
from pathlib import Path

MOST_PACKAGE_LINES = 11_970
MOST_TEST_LINES = 11_770

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(path: Path) -> int:
    """Lines of a module that hold code."""
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (*NO_CODE, tokenize.ENCODING):
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def lines_of_package() -> int:
    """Lines of code of the package."""
    return sum(map(code_lines, (ROOT / "titanlite").rglob("*.py")))


def lines_of_tests() -> int:
    """All lines of the tests."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))


def main() -> None:
    """Print the number of each folder, and of all."""
    root = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "titanlite")
    total = 0
    for folder in sorted({path.parent for path in root.rglob("*.py")}):
        count = sum(map(code_lines, folder.glob("*.py")))
        total += count
        print(f"{count:6,}  {folder.relative_to(root.parent)}")
    print(f"{total:6,}  in all")


if __name__ == "__main__":
    main()

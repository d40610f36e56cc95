"""Fail when a module or a function has outgrown the size that a reader can hold in mind.

python tools/check_sizes.py [ROOT]    names each offender as path:line, exits with 1 if there is any
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = ("src", "tests", "tools")


def check_module(path: Path) -> Iterator[str]:
    """Yield one line of text per thing in the module that is too long.

    A function's length counts from its `def` (decorators excluded) to its last line, both included.
    """
    source = path.read_text(encoding="utf-8")
    num_lines = len(source.splitlines())
    if num_lines > MAX_MODULE_LINES:
        yield f"{path}:1: module has {num_lines} lines, at most {MAX_MODULE_LINES}"
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield (
                f"{path}:{node.lineno}: function {node.name} has {length} lines, "
                f"at most {MAX_FUNCTION_LINES}"
            )


def check_tree(root: Path) -> list[str]:
    """Return the complaints about every Python module below the checked folders of `root`."""
    modules = sorted(path for name in FOLDERS for path in (root / name).rglob("*.py"))
    return [complaint for path in modules for complaint in check_module(path)]


def main(arguments: list[str]) -> int:
    """Print the complaints about the tree at the given root (default: here); return 1 if any."""
    complaints = check_tree(Path(arguments[0]) if arguments else Path())
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

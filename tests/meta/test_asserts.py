"""Under `python -O` no assert is executed: what it calls must change nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import blockdraft

PURE = frozenset(
    {
        *("all", "any", "dict", "isinstance", "len", "list", "max", "min", "range", "set"),
        *("sorted", "sum", "tuple", "type", "zip"),
        *("dim", "is_contiguous", "items", "keys", "num_written", "numel", "size", "values"),
    }
)
"""Functions and methods that only look."""


def acting_calls(tree: ast.AST) -> Iterator[ast.AST]:
    """What may have an effect inside of an assert: its condition, not its message."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        for part in ast.walk(node.test):
            if isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                yield part
            elif isinstance(part, ast.Call):
                called = part.func
                name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
                if name not in PURE:
                    yield part


def test_no_assert_has_an_effect() -> None:
    root = Path(blockdraft.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(root.rglob("*.py"))
        for node in acting_calls(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "write `if not ...: raise`, or add what only looks to PURE"


def test_effects_in_asserts_are_found() -> None:
    source = "assert memory.reserve(1, 2)\nassert (n := take())\nassert len(a) == 2, say()"
    found = [ast.unparse(node) for node in acting_calls(ast.parse(source))]
    assert found == ["memory.reserve(1, 2)", "(n := take())", "take()"]

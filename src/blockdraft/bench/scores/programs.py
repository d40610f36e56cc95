"""The program that an answer gives, with the tests of its prompt. Loads no model library."""

import ast
import builtins
import re

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
"""A fenced block; one that the answer does not close reaches to its end."""


def program_of(question: str, answer: str, test: str, entry_point: str | None) -> str | None:
    """What must come to its end for the answer to be right; None if it holds no program.

    Of the answer the first fenced block counts that defines `entry_point`, or any function where
    none is named; without a block the whole text. What the question's own blocks define stands
    before it, such as imports. `entry_point` names the function that `check` in the test takes;
    without it the test calls the function itself, and where the question does not tell its name,
    the last function of the answer gets it.
    """
    blocks = [(block, _functions(block)) for block in _BLOCK.findall(answer) or [answer]]
    found = [one for one in blocks if one[1] and (entry_point is None or entry_point in one[1])]
    if not found:
        return None
    code, functions = found[0]
    given = [block for block in _BLOCK.findall(question) if _parsed(block) is not None]
    if entry_point is not None:
        return "\n\n".join([*given, code, test, f"check({entry_point})"])
    name = _called(test)
    known = name is None or name in functions or name in question
    return "\n\n".join([*given, code, *([] if known else [f"{name} = {functions[-1]}"]), test])


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _functions(code: str) -> list[str]:
    """What it defines at its top level, in order; nothing if it is no program."""
    tree = _parsed(code)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [] if tree is None else [one.name for one in tree.body if isinstance(one, kinds)]


def _called(test: str) -> str | None:
    """The function that a test is of: the first that it calls and Python does not have itself."""
    tree = _parsed(test)
    nodes = [] if tree is None else ast.walk(tree)
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = [func.id for func in calls if isinstance(func, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), next(iter(names), None))

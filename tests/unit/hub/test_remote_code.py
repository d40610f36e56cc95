"""Code that comes with a model is run only where a user asks for it."""

import ast
from pathlib import Path

import pytest

import blockdraft

FILES = sorted(Path(blockdraft.__file__).parent.rglob("*.py"))
LOADERS = ("AutoConfig", "AutoTokenizer", "AutoModel")


def loading_calls(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.startswith(LOADERS)
    ]


def test_calls_of_loaders_are_found() -> None:
    assert sum(map(len, map(loading_calls, FILES))) > 9


@pytest.mark.parametrize("path", list(filter(loading_calls, FILES)), ids=lambda path: path.stem)
def test_no_loader_is_left_to_ask_on_the_terminal_whether_to_run_code(path: Path) -> None:
    # Without the argument transformers asks, and takes a "y" out of a pipe of prompts for a yes.
    for call in loading_calls(path):
        assert "trust_remote_code" in [argument.arg for argument in call.keywords], call.lineno

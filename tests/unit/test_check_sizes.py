from pathlib import Path

import pytest

from tools import check_sizes


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def function(num_lines: int, head: str = "def grown():") -> str:
    return head + "\n" + "    pass\n" * (num_lines - 1)


def test_longest_allowed_function_and_module_pass(tmp_path, capsys):
    write(tmp_path, "src/a.py", function(check_sizes.MAX_FUNCTION_LINES))
    write(tmp_path, "tests/b.py", "x = 1\n" * check_sizes.MAX_MODULE_LINES)
    assert check_sizes.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("head", ["def grown():", "async def grown():"])
@pytest.mark.parametrize("folder", check_sizes.FOLDERS)
def test_long_function_is_named(tmp_path, capsys, folder, head):
    text = "x = 1\n\n\n" + function(check_sizes.MAX_FUNCTION_LINES + 1, head)
    path = write(tmp_path, f"{folder}/deep/a.py", text)
    assert check_sizes.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{path}:4: function grown has 61 lines, at most 60\n"


def test_long_module_is_named(tmp_path):
    path = write(tmp_path, "src/a.py", "x = 1\n" * (check_sizes.MAX_MODULE_LINES + 1))
    assert check_sizes.check_tree(tmp_path) == [f"{path}:1: module has 401 lines, at most 400"]


def test_methods_and_nested_functions_count(tmp_path):
    method = "class A:\n    def grown(self):\n" + "        pass\n" * check_sizes.MAX_FUNCTION_LINES
    write(tmp_path, "src/a.py", method)
    assert "function grown" in check_sizes.check_tree(tmp_path)[0]

"""What README and docs say is so: links, files, commands and their options, Python examples."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import blockdraft
from blockdraft.cli.main import app
from tests.small_llm import load_llm
from tests.tiny import tiny_drafter_folder, tiny_target_folder

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "recipes").rglob("*.md"),
    *(ROOT / "tests").rglob("*.md"),
    *(ROOT / "src").rglob("*.md"),
]
RECORDS = {"experiments", "decisions"}
"""Folders of pages that tell what was run and decided once, with the options of then."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for name, code in found if name == language]


def without_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind `blockdraft` of every command in a console block."""
    for code in blocks(page, "console"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if line[:2] == "$ " else []
            here = [index for index, word in enumerate(words) if Path(word).name == "blockdraft"]
            if here and words[:2] != ["pip", "install"]:
                yield words[here[0] + 1 :]


def anchors(page: Path) -> set[str]:
    """Of the headings, as the web shows them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def parse(words: list[str]) -> None:
    """As the command line does, up to the call of the command."""
    command = typer.main.get_command(app)
    context = command.make_context("blockdraft", list(words), resilient_parsing=True)
    while hasattr(command, "commands") and (words or not command.invoke_without_command):
        assert words, "a command is missing"
        name = words[0]
        assert name in command.commands, f"there is no command {name!r}"
        command, words = command.commands[name], words[1:]
    # Raises for unknown options and values that do not convert.
    if not hasattr(command, "commands"):
        command.make_context(name, list(words), parent=context)


CONSOLE_PAGES = [page for page in PAGES if page.parent.name not in RECORDS and [*commands(page)]]
PYTHON_PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", ROOT / "docs/python.md"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    text = without_blocks(page)
    for path in re.findall(r"`((?:\w[\w-]*/)+[\w-]+\.(?:py|toml|jsonl|css|md))`", text):
        if path.startswith("runs/"):
            continue
        places = (ROOT / path, ROOT / "src/blockdraft" / path, page.parent / path)
        if page.parent.name not in RECORDS:
            assert any(place.exists() for place in places), f"{path} does not exist"


@pytest.mark.parametrize("page", CONSOLE_PAGES, ids=name_of)
def test_commands_are_understood(page):
    for words in commands(page):
        parse(words)


@pytest.mark.parametrize("words", [["generat", "x"], ["generate", "--quick", "x"], ["generate"]])
def test_wrong_commands_are_not_understood(words):
    with pytest.raises(Exception, match=r"no command|No such option|Missing"):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"(?:^\$ |`)make ([\w-]+)", page.read_text(encoding="utf-8"), re.M):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"make {name} does not exist"


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_python_examples_run(page, tmp_path, monkeypatch, capsys):
    target, drafter = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    llm = load_llm((target, drafter))
    monkeypatch.setattr(blockdraft, "LLM", lambda: llm)
    examples = blocks(page, "python")
    assert examples
    for code in examples:
        code = code.replace("path/to/target", str(target)).replace("path/to/drafter", str(drafter))
        exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out


def test_readme_is_short_and_says_first_what_it_runs_on():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:30])
    assert "CPU" in first_screen
    assert re.search(r"GPU.*run on one NVIDIA card only", first_screen)

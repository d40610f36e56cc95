"""Running the command line, and reading what it prints."""

import io
import json

from rich.console import Console
from typer.testing import CliRunner

from blockdraft.cli.main import app
from blockdraft.core.errors import MISTAKE
from tests.own_log import own_log


def run(*arguments, **options):
    arguments = [str(argument) for argument in arguments]
    with own_log():
        return CliRunner().invoke(app, arguments, prog_name="blockdraft", **options)


def run_json(*arguments, **options):
    result = run(*arguments, "--json", **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(*tables):
    """Tables in a terminal of 80 columns, which show all that they have."""
    console = Console(width=80, file=io.StringIO())
    for table in tables:
        console.print(table)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def refusal(*arguments, **options):
    """The line on standard error with which a command refuses; the log may stand before it."""
    result = run(*arguments, **options)
    assert result.exit_code == MISTAKE, result.output
    assert result.stdout == ""
    line = [line for line in result.stderr.splitlines() if line.startswith("blockdraft: ")][-1]
    assert "Traceback" not in result.stderr
    return line

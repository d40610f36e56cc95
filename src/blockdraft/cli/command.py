"""What all commands do alike: their help, and how they name options in what they refuse."""

import copy
import inspect
import os
import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from blockdraft.core.errors import ConfigError, RequestError

_OF_A_FILE = re.compile(r"^cannot read |\bline \d")
"""Finds what is said of a file, whose fields may have the names of options."""


class Command(TyperCommand):
    """Names an option where an error names the field that it sets; its help cuts no name."""

    def invoke(self, ctx: Any) -> Any:
        """See click.Command.

        Raises:
            ConfigError: a launcher has started several processes, and this command is for one.
        """
        _refuse_several(self.name)
        try:
            return super().invoke(ctx)
        except (ConfigError, RequestError) as error:
            error.args = (name_options(str(error), self.params), *error.args[1:])
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click.Command."""
        shown = copy.copy(self)
        shown.help = _join_lines(self.help or "")
        shown.params = [_one_name_a_line(parameter) for parameter in self.params]
        super(Command, shown).format_help(ctx, formatter)


def _refuse_several(name: str | None) -> None:
    """Each would load the models to the same GPU, and write the same files.

    A number of processes alone says nothing: some clusters set it for everything that they run.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if name != "train" and "TORCHELASTIC_RUN_ID" in os.environ and count not in ("", "0", "1"):
        raise ConfigError(
            f"torchrun has started {count} processes, and only `blockdraft train` works in "
            f"several; start `{name}` without torchrun: --device-map spreads a target over GPUs"
        )


def name_options(message: str, parameters: Sequence[Any]) -> str:
    """The message of a config or a request, as the user of a command has to read it."""
    if _OF_A_FILE.search(message):
        return message
    for parameter in parameters:
        option = parameter.opts[0]
        if option.startswith("--"):
            message = re.sub(_field(parameter.name), option, message)
    return message


def _field(name: str) -> str:
    """Finds the name of a field, and not the same letters in a path or in what is quoted."""
    if "_" in name:
        return rf"(?<![\w./'\"-]){name}(?![\w/'\"-]|\.\w)"
    # A plain word may be English elsewhere.
    return rf"^{name}(?= is )"


def _join_lines(text: str) -> str:
    """Paragraphs without the line breaks of the source; a terminal makes its own."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _one_name_a_line(parameter: Any) -> Any:
    """Beside each other several long names would be cut, so that nobody could type them."""
    names = [*parameter.opts, *parameter.secondary_opts]
    long = [name for name in names if name.startswith("--")]
    if len(long) < 2:
        return parameter
    parameter = copy.copy(parameter)
    parameter.opts = ["\n".join(long), *(name for name in names if name not in long)]
    parameter.secondary_opts = []
    if parameter.default is True:
        parameter.show_default = "on"
    return parameter

"""Options of a command from the fields of a config, whose defaults stand there alone."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

Command = Callable[..., None]


class Fields:
    """Options under one heading of the help; each is named as the field that it sets.

    Args:
        heading: of the help.
        kinds: how an option is spelled and explained, `Annotated[type, typer.Option(...)]`.
        defaults: of the config, in the form in which the command line has them.
    """

    def __init__(self, heading: str, kinds: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.kinds = {name: _under(heading, kind) for name, kind in kinds.items()}
        self.defaults = {name: defaults[name] for name in kinds}

    def __call__(self, *, without: Collection[str] = ()) -> Callable[[Command], Command]:
        """Add the options to a command, which finds their values in `ctx.params`."""
        kinds = {name: kind for name, kind in self.kinds.items() if name not in without}

        def decorate(command: Command) -> Command:
            own = inspect.signature(command)

            @wraps(command)
            def run(*arguments: Any, **values: Any) -> None:
                command(*arguments, **{k: v for k, v in values.items() if k not in kinds})

            added = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind,
                                  default=self.defaults[name])
                for name, kind in kinds.items()
            ]  # fmt: skip
            # typer reads the options from here.
            run.__signature__ = own.replace(  # type: ignore[attr-defined]
                parameters=[*own.parameters.values(), *added]
            )
            run.__annotations__ = get_type_hints(command, include_extras=True) | kinds
            return run

        return decorate


def _under(heading: str, kind: Any) -> Any:
    value_type, option = get_args(kind)
    option = copy.copy(option)
    option.rich_help_panel = heading
    return Annotated[value_type, option]

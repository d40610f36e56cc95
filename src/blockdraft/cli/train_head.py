"""`blockdraft train-head`: a Hydra head beside a drafter, from the target's own answers."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import options
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.cli.output import print_json
from blockdraft.core.libraries import let_torch_use_matrix_registers
from blockdraft.hub.catalog import DEFAULT_TARGET

if TYPE_CHECKING:
    from blockdraft.train.hydra.run import HeadResult


def train_head(
    drafter: Annotated[
        Path,
        typer.Argument(help="Folder of a drafter that reads features of the target."),
    ],
    answers: Annotated[
        list[Path],
        typer.Argument(help="Folders or files of answers, such as `blockdraft data` writes."),
    ],
    target: options.Target = DEFAULT_TARGET,
    minutes: Annotated[
        float,
        typer.Option(
            help="Minutes of training, without the time that the target needs to read the answers "
            "for --states."
        ),
    ] = 60.0,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the target's hidden states, so that it reads the answers only once; "
            "saves most of the time on a CPU. Each token takes eight bytes times the hidden size. "
            "States of other answers are deleted from the folder.",
            show_default="it reads them in each step",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Train on at most this many answers, drawn at random.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a training step.", show_default="1024 on a CPU, 32768 on a GPU"
        ),
    ] = None,
    from_head: Annotated[
        bool,
        typer.Option("--from-head", help="Start from the drafter's existing head."),
    ] = False,
    layers: Annotated[
        list[int] | None,
        typer.Option(
            "--layer",
            help="Layer of the target to read, counted from 0; the drafter must read it too. "
            "Repeatable.",
            show_default="at most three of the drafter's",
        ),
    ] = None,
    num_tokens: Annotated[
        int | None,
        typer.Option(
            help="Size of the head's vocabulary: the most frequent tokens.", show_default="8192"
        ),
    ] = None,
    inner_size: Annotated[
        int | None,
        typer.Option(
            help="Size of the head's gated layer.", show_default="twice the target's hidden size"
        ),
    ] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Train a Hydra head: a small network that drafts the next three tokens, on CPUs.

    It is written next to the drafter's weights, which stay unchanged, and replaces an existing
    head. To resume an interrupted training, give the same command again.
    """
    values: dict[str, Any] = dict(locals())
    result = _run(values)
    if as_json:
        print_json(_facts(result))
        return
    typer.echo(result.head)


def _run(values: Mapping[str, Any]) -> "HeadResult":
    from blockdraft.train.hydra.config import HeadConfig
    from blockdraft.train.hydra.run import train_head as run
    from blockdraft.train.hydra.state import how_to_go_on

    chosen = {field.name: values[field.name] for field in fields(HeadConfig)}
    config = HeadConfig(
        **chosen | {"answers": tuple(chosen["answers"]), "layers": tuple(chosen["layers"] or ())}
    )
    let_torch_use_matrix_registers()
    with says_how_to_go_on(lambda: how_to_go_on(config.drafter, config.states)):
        return run(config)


def _facts(result: "HeadResult") -> dict[str, Any]:
    return {
        "head": str(result.head),
        "steps": result.num_steps,
        "places": result.num_places,
        "held_out": result.num_held_out,
        "divergence_before": list(result.before),
        "divergence_after": list(result.after),
    }

"""`blockdraft train`: a drafter from the target's own answers."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.output import print_json
from blockdraft.hub.resolve import resolve_model


def train(
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings, each key=value; they win over the file.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    tau_prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Held-out prompts for the true tau at each evaluation. Repeatable."),
    ] = None,
    tau_limit: Annotated[int, typer.Option(min=1, help="Prompts taken from each such file.")] = 8,
    tau_max_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded for each.")] = 96,
    plan: Annotated[bool, typer.Option("--plan", help="Print the settings and stop.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a drafter; a run that is started again with the same `out` goes on."""
    from blockdraft.train.config_file import read_train_config

    run = read_train_config(config, settings or [])
    run = replace(run, target=resolve_model(str(run.target)))
    # A folder stays as it was written: a run goes on only with the settings that it began with.
    if run.init_from is not None and not run.init_from.is_dir():
        run = replace(run, init_from=resolve_model(str(run.init_from)))
    if plan:
        print_json(run.to_dict())
        return
    from blockdraft.models.loading import resolve_device
    from blockdraft.train.prompts import read_prompts
    from blockdraft.train.trainer import train as train_drafter
    from blockdraft.train.true_tau import true_tau_on

    run = replace(run, device=resolve_device(run.device))
    prompts = [p for path in tau_prompts or [] for p in read_prompts(path)[:tau_limit]]
    measure = None
    if prompts:
        measure = true_tau_on(
            prompts, run.target, max_tokens=tau_max_tokens, dtype=run.dtype, device=run.device
        )
    result = train_drafter(run, measure)
    if as_json:
        print_json({"drafter": str(result.drafter), "true_tau": dict(result.true_tau)})
    else:
        typer.echo(result.drafter)

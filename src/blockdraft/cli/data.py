"""`blockdraft data`: answers of the target to train on."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.output import print_json
from blockdraft.hub.catalog import DEFAULT_TARGET

if TYPE_CHECKING:
    from blockdraft.train.data import DataProgress

REPORT_SECONDS = 10.0


def data(
    output: Annotated[Path, typer.Option(help="Folder for answers, prompts and manifest.")],
    target: options.Target = DEFAULT_TARGET,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL file of prompts. Repeatable.")
    ] = None,
    self_written: Annotated[
        int, typer.Option(help="How many prompts the target writes itself (Magpie).")
    ] = 0,
    limit: Annotated[int | None, typer.Option(help="Most prompts to answer.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the answers, 0.7 if not given. Repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers to a prompt at a temperature.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Most tokens of a prompt; longer ones are left out.")
    ] = 192,
    slots: Annotated[int, typer.Option(help="Answers written at once.")] = 96,
    seed: Annotated[int, typer.Option(help="Of order and sampling.")] = 0,
    device: options.Device = "cpu",
    as_json: options.Json = False,
) -> None:
    """Write the target's own answers to prompts, in bulk; started again, it goes on."""
    from blockdraft.train.data import DataConfig, generate_data

    config = DataConfig(
        output=output,
        target=target,
        prompts=tuple(prompts or ()),
        num_self_written=self_written,
        limit=limit,
        temperatures=tuple(temperature or DataConfig.temperatures),
        samples=samples,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        slots=slots,
        seed=seed,
        device=device,
    )
    shown = [time.monotonic()]

    def report(progress: "DataProgress") -> None:
        if time.monotonic() - shown[0] >= REPORT_SECONDS:
            shown[0] = time.monotonic()
            typer.echo(
                f"{progress.num_answers}/{progress.num_jobs} answers, "
                f"{progress.tokens_per_second:.0f} tokens/s, "
                f"{progress.seconds_left / 60:.0f} minutes left",
                err=True,
            )

    path = generate_data(config, report)
    if as_json:
        print_json({"answers": str(path)})
    else:
        typer.echo(path)

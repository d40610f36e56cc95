"""`blockdraft data`: answers of the target to train on."""

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockdraft.cli import options
from blockdraft.cli.logs import is_about_logging
from blockdraft.cli.output import print_json
from blockdraft.core.errors import INTERRUPTED, ConfigError
from blockdraft.hub.catalog import DEFAULT_TARGET

if TYPE_CHECKING:
    from blockdraft.data.answer_file import DataProgress

REPORT_SECONDS = 10.0
BESIDE_JOIN = {"join", "output", "drop_truncated", "as_json"}


Output = Annotated[Path, typer.Option(help="Folder for answers, shards and manifest.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL file of chats, prompts or plain text. Repeatable."),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        help="Hugging Face data set or its folder: NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, such as "
        "openai/gsm8k:main:train. Read whole. Repeatable.",
    ),
]
SelfWritten = Annotated[
    int, typer.Option("--self-written", help="Prompts that the target writes itself (Magpie).")
]
Exclude = Annotated[
    list[Path] | None,
    typer.Option(help="Prompts that none may overlap, besides our benchmark's. Repeatable."),
]
Join = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of answers made elsewhere; joins them, writes none. Of the other options only "
        "--drop-truncated goes with it. Repeatable."
    ),
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option("--temperature", help="Of the answers, 0.7 if not given. Repeatable."),
]


def data(
    context: typer.Context,
    output: Output,
    target: options.Target = DEFAULT_TARGET,
    prompts: Prompts = None,
    datasets: Datasets = None,
    num_self_written: SelfWritten = 0,
    exclude: Exclude = None,
    join: Join = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts to answer.")] = None,
    temperatures: Temperatures = None,
    mix_temperatures: Annotated[
        bool,
        typer.Option(
            "--mix-temperatures",
            help="Answer each prompt at one of the temperatures, drawn for it, instead of at all; "
            "repeat one to draw it more often.",
        ),
    ] = False,
    samples: Annotated[int, typer.Option(help="Answers to a prompt at a temperature.")] = 1,
    max_tokens: Annotated[
        int,
        typer.Option(help="Most tokens of an answer; what fewer cut off before is written anew."),
    ] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Most tokens of a prompt; longer ones are left out.")
    ] = 192,
    max_turns: Annotated[int, typer.Option(help="Turns of a chat that are answered.")] = 4,
    thinking: Annotated[
        Literal["template", "on", "off"], typer.Option(help="What the template is told.")
    ] = "template",
    drop_truncated: Annotated[
        bool, typer.Option("--drop-truncated", help="Leave answers without an end out.")
    ] = False,
    slots: Annotated[int, typer.Option(help="Answers written at once.")] = 96,
    seed: Annotated[int, typer.Option(help="Of order and sampling.")] = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Write the target's own answers to prompts, in bulk; started again, it goes on."""
    values = dict(locals())
    path = _join(context, values) if join else _generate(values)
    if as_json:
        print_json({"answers": str(path)})
    else:
        typer.echo(path)


def _join(context: typer.Context, values: Mapping[str, Any]) -> Path:
    from blockdraft.data.config import DataConfig
    from blockdraft.data.shards import join_data

    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        is_given = source is not None and source.name != "DEFAULT"
        beside = option.name in BESIDE_JOIN or is_about_logging(option.name)
        if is_given and not beside:
            raise ConfigError(f"--join writes no answers; leave {option.opts[0]} out")
    return join_data(
        values["join"],
        values["output"],
        rows_per_shard=DataConfig.rows_per_shard,
        drop_truncated=values["drop_truncated"],
    )


def _generate(values: Mapping[str, Any]) -> Path:
    from blockdraft.bench.workload import BUNDLED
    from blockdraft.data.config import DataConfig
    from blockdraft.data.generate import generate_data

    chosen = {f.name: values[f.name] for f in fields(DataConfig) if f.name in values}
    for name in ("prompts", "datasets", "exclude", "temperatures"):
        chosen[name] = tuple(chosen[name] or ())
    chosen["exclude"] = (BUNDLED, *chosen["exclude"])
    chosen["temperatures"] = chosen["temperatures"] or DataConfig.temperatures
    config = DataConfig(**chosen)
    try:
        return generate_data(config, progress_printer())
    except KeyboardInterrupt as error:
        from blockdraft.train.interrupted import WHILE_ANSWERING

        typer.echo(f"blockdraft: {WHILE_ANSWERING}", err=True)
        raise typer.Exit(INTERRUPTED) from error


def progress_printer() -> Callable[["DataProgress"], None]:
    """Says every few seconds how far prompts and answers are, on standard error."""
    shown = time.monotonic()

    def report(progress: "DataProgress") -> None:
        """Print a line, unless the last one was printed just now."""
        nonlocal shown
        if time.monotonic() - shown >= REPORT_SECONDS:
            shown = time.monotonic()
            typer.echo(
                f"{progress.num_answers}/{progress.num_jobs} {progress.what}, "
                f"{progress.tokens_per_second:.0f} tokens/s, "
                f"{progress.seconds_left / 60:.0f} minutes left",
                err=True,
            )

    return report

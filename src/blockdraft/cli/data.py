"""`blockdraft data`: answers of the target to train on."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockdraft.cli import options
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.cli.logs import LOG
from blockdraft.cli.output import print_json
from blockdraft.core.progress import Progress, time_left
from blockdraft.hub.catalog import DEFAULT_TARGET

if TYPE_CHECKING:
    from blockdraft.data.answer_file import DataProgress

BESIDE_JOIN = {"join", "output", "drop_truncated", "as_json"}


Output = Annotated[Path, typer.Option(help="Folder to write the answers to.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL file of chats, prompts or texts. Repeatable."),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        help="Prompts of a data set, a Hugging Face id or a folder: NAME, NAME:SPLIT or "
        "NAME:CONFIG:SPLIT, such as openai/gsm8k:main:train; NAME@REVISION is a branch, tag or "
        "commit. The whole data set is downloaded. Repeatable.",
    ),
]
SelfWritten = Annotated[
    int,
    typer.Option(
        "--self-written", help="Number of prompts that the target writes itself (Magpie method)."
    ),
]
Exclude = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSONL file of prompts, such as a benchmark. Prompts that overlap one of these, or "
        "one of the bundled benchmark, are left out. Repeatable."
    ),
]
Join = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of answers. Joins all such folders into --output, and writes no new answers; "
        "of the other options only --drop-truncated may be given with it. Repeatable."
    ),
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature",
        help="Sampling temperature of the answers, 0.7 if not given. Repeatable: each "
        "prompt is answered at each of them.",
    ),
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
    limit: Annotated[
        int | None, typer.Option(help="Answer at most this many prompts, drawn at random.")
    ] = None,
    temperatures: Temperatures = None,
    mix_temperatures: Annotated[
        bool,
        typer.Option(
            "--mix-temperatures",
            help="Answer each prompt at one of the temperatures, drawn at random, not at all of "
            "them; repeat a temperature to draw it more often.",
        ),
    ] = False,
    samples: Annotated[
        int,
        typer.Option(
            help="Answers to each prompt at each temperature; at temperature 0 always one."
        ),
    ] = 1,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum length of an answer, in tokens. If an earlier run had a smaller limit, "
            "answers that it cut off are written again."
        ),
    ] = 256,
    max_prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum length of a prompt in tokens, earlier turns of the chat included; longer "
            "prompts are left out."
        ),
    ] = 192,
    max_turns: Annotated[
        int, typer.Option(help="Answer at most this many user turns of a chat.")
    ] = 4,
    thinking: Annotated[
        Literal["template", "on", "off"],
        typer.Option(
            help="Whether the target thinks (reasons) before it answers; template: the default of "
            "its chat template."
        ),
    ] = "template",
    drop_truncated: Annotated[
        bool, typer.Option("--drop-truncated", help="Leave out answers that --max-tokens cut off.")
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Generate the answers on a server of the target, such as vLLM or blockdraft serve "
            "at http://localhost:8000/v1. It must return token ids. The API key is read from "
            "$BLOCKDRAFT_ENDPOINT_KEY.",
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(help="With --endpoint: the target's name there.", show_default="the only one"),
    ] = None,
    slots: Annotated[int, typer.Option(help="Answers to generate concurrently.")] = 96,
    seed: Annotated[int, typer.Option(help="Seed of the order of prompts and of sampling.")] = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Generate the target's answers to prompts, as training data for a drafter.

    Give prompts with --prompts, --dataset or --self-written. To resume an interrupted run, give the
    same command again.
    """
    values = dict(locals())
    path = _join(context, values) if join else _generate(values)
    if as_json:
        print_json({"answers": str(path)})
    else:
        typer.echo(path)


def _join(context: typer.Context, values: Mapping[str, Any]) -> Path:
    from blockdraft.data.config import DataConfig
    from blockdraft.data.shards import join_data

    options.refuse_others(context, BESIDE_JOIN, "--join writes no answers")
    return join_data(
        values["join"],
        values["output"],
        rows_per_shard=DataConfig.rows_per_shard,
        drop_truncated=values["drop_truncated"],
    )


def _generate(values: Mapping[str, Any]) -> Path:
    from blockdraft.bench.workload import BUNDLED
    from blockdraft.data.config import DataConfig
    from blockdraft.data.generate import WHILE_ANSWERING, generate_data

    chosen = {f.name: values[f.name] for f in fields(DataConfig) if f.name in values}
    for name in ("prompts", "datasets", "exclude", "temperatures"):
        chosen[name] = tuple(chosen[name] or ())
    chosen["exclude"] = (BUNDLED, *chosen["exclude"])
    chosen["temperatures"] = chosen["temperatures"] or DataConfig.temperatures
    config = DataConfig(**chosen)
    with says_how_to_go_on(lambda: WHILE_ANSWERING):
        return generate_data(config, progress_printer())


def progress_printer() -> Callable[["DataProgress"], None]:
    """Says how far prompts and answers are, on standard error."""
    shown = Progress(LOG)

    def report(progress: "DataProgress") -> None:
        """Show the newest counts."""
        shown.show(
            f"{progress.num_answers}/{progress.num_jobs} {progress.what}, "
            f"{time_left(progress.seconds_left)}, {progress.tokens_per_second:.0f} tokens/s"
        )
        if progress.num_answers == progress.num_jobs:
            shown.clear()

    return report

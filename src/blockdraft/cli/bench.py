"""`blockdraft bench`: speed over files of prompts, and a short demonstration."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.workload import (
    BUNDLED,
    BenchPrompt,
    first_of_each_category,
    read_workload,
)
from blockdraft.cli import options
from blockdraft.cli.output import DIFFERS, describe_llm, print_json
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError

_LLM = LLMConfig()
_SPEED = SpeedConfig()

DEMO_PER_KIND = 2
DEMO_TEMPERATURE = 0.7
DEMO_MAX_TOKENS = 96

app = typer.Typer(
    help="Measure how fast drafted decoding is, and that it changes nothing.", no_args_is_help=True
)

WithTransformers = Annotated[
    bool,
    typer.Option("--with-transformers/--no-transformers", help="Also time transformers' generate."),
]
Output = Annotated[Path | None, typer.Option(help="Write the JSON report to this file too.")]


@app.command()
def speed(
    ctx: typer.Context,
    prompts: Annotated[list[Path], typer.Option(help="JSONL file of prompts. Repeatable.")],
    limit: Annotated[int | None, typer.Option(min=1, help="First prompts of each file.")] = None,
    max_tokens: options.MaxTokens = _SPEED.max_tokens,
    temperature: options.Temperature = _SPEED.temperature,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = _SPEED.seed,
    block: Annotated[
        int | None, typer.Option(help="Slots of a block.", show_default="the drafter's")
    ] = _SPEED.block,
    with_transformers: WithTransformers = _SPEED.with_transformers,
    target: options.Target = _LLM.target,
    drafter: options.Drafter = str(_LLM.drafter),
    dtype: options.Dtype = _LLM.dtype,
    device: options.Device = _LLM.device,
    exact: options.Exact = options.EXACT,
    num_threads: options.NumThreads = _LLM.num_threads,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Time plain decoding, drafted decoding and transformers, prompt by prompt in turns."""
    workload = [prompt for path in prompts for prompt in read_workload(path, limit)]
    config = SpeedConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        block=block,
        with_transformers=with_transformers,
    )
    _measure(options.llm_config(ctx.params), [config], workload, output, as_json)


@app.command()
def demo(
    ctx: typer.Context,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = DEMO_PER_KIND,
    max_tokens: options.MaxTokens = DEMO_MAX_TOKENS,
    with_transformers: WithTransformers = _SPEED.with_transformers,
    target: options.Target = _LLM.target,
    drafter: options.Drafter = str(_LLM.drafter),
    dtype: options.Dtype = _LLM.dtype,
    device: options.Device = _LLM.device,
    exact: options.Exact = options.EXACT,
    num_threads: options.NumThreads = _LLM.num_threads,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Show the speed on bundled prompts, greedy and sampled; a few minutes on two cores."""
    workload = first_of_each_category(read_workload(BUNDLED), per_kind)
    greedy = SpeedConfig(max_tokens=max_tokens, with_transformers=with_transformers)
    sampled = replace(greedy, temperature=DEMO_TEMPERATURE)
    _measure(options.llm_config(ctx.params), [greedy, sampled], workload, output, as_json)


def _measure(
    llm_config: LLMConfig,
    configs: Sequence[SpeedConfig],
    workload: Sequence[BenchPrompt],
    output: Path | None,
    as_json: bool,
) -> None:
    """Run every config, report, and exit with 1 if any drafted output differs from the plain one.

    `--exact off` promises no equality, so a difference is shown there and is no failure.
    """
    for config in configs:
        config.params  # noqa: B018 - raises for a bad value before anything is loaded
    if not llm_config.drafts:
        raise ConfigError("there is nothing to compare without a drafter; name one with --drafter")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {output}: its folder does not exist; make it first")
    if output is not None and output.is_dir():
        raise ConfigError(f"cannot write {output}: it is a folder; give the name of a file")
    llm = options.load_llm(llm_config)
    from rich.console import Console

    from blockdraft.bench.figures import groups_of
    from blockdraft.bench.report import LEGEND, json_report, table
    from blockdraft.bench.speed import SpeedBench

    bench = SpeedBench(llm, with_transformers=configs[0].with_transformers)
    runs = []
    for config in configs:
        progress = _Progress(f"T={config.temperature:g}", len(workload))
        runs.append((config, bench.run(workload, config, progress.advance)))
    report = json_report(llm, runs)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(report)
    else:
        print(_headline(describe_llm(llm)))
        for config, measurements in runs:
            how = f"temperature {config.temperature:g}" if config.temperature else "greedy"
            title = f"{how}, at most {config.max_tokens} tokens"
            Console().print(table(title, groups_of(measurements)))
        print(LEGEND)
    all_identical = all(m.identical for _, measurements in runs for m in measurements)
    if llm_config.exact and not all_identical:
        raise typer.Exit(DIFFERS)


def _headline(loaded: Mapping[str, Any]) -> str:
    exact = "exact" if loaded["exact"] else "NOT exact: outputs may differ"
    return (
        f"{loaded['target']} drafted by {loaded['drafter']}\n"
        f"{loaded['dtype']} on {loaded['device']}, {loaded['threads']} threads, {exact}"
    )


class _Progress:
    """Counts finished prompts on standard error."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0

    def advance(self, _measurement: object) -> None:
        """Note one more prompt."""
        self._done += 1
        end = "\n" if self._done == self._total else ""
        if sys.stderr.isatty() or end:
            print(f"\r{self._label}: {self._done}/{self._total} prompts", end=end, file=sys.stderr)

"""`blockdraft bench pareto`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.bench.config import ParetoConfig
from blockdraft.bench.sets import files_of
from blockdraft.bench.workload import mixed_prompts
from blockdraft.cli import options
from blockdraft.cli.bench_output import (
    Output,
    Progress,
    Prompts,
    SetsFolder,
    check_before_loading,
    headline,
    load_for_prompts,
    parse_points,
    publish,
    read_prompts_or_bundled,
    requests_of,
    settings_of,
    show_points,
)
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.core.errors import NO, ConfigError
from blockdraft.core.words import choice_of

if TYPE_CHECKING:
    from blockdraft.bench.load.pareto import ParetoBench
    from blockdraft.bench.load.repeats import Repeat

_PARETO = ParetoConfig()


@options.models(without=options.FIXED)
def pareto(
    ctx: typer.Context,
    concurrency: Annotated[
        str,
        typer.Option(
            help="Concurrent requests, increasing: one point of each curve.", metavar="N,N"
        ),
    ] = show_points(_PARETO.concurrency),
    also_drafter: Annotated[
        list[str] | None,
        typer.Option(help="Another drafter of the same target, to compare. Repeatable."),
    ] = None,
    parts: Annotated[
        bool,
        typer.Option("--parts", help="Also measure each part of --drafter alone, such as lookup."),
    ] = _PARETO.parts,
    prompts: Prompts = None,
    sets_folder: SetsFolder = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests in each measurement; prompts are repeated if there are fewer.",
            show_default="the largest number of --concurrency",
        ),
    ] = _PARETO.num_requests,
    repeats: Annotated[int, typer.Option(help="Repeats of each measurement.")] = _PARETO.repeats,
    max_tokens: options.MaxTokens = _PARETO.max_tokens,
    temperature: options.Temperature = _PARETO.temperature,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = _PARETO.seed,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Measure total throughput against the speed of each user, for several drafting configurations.

    Plain decoding, all of --drafter together, and what --also-drafter and --parts name. The curves
    are compared where users are equally fast, and where the throughput is equal. With --output the
    same command resumes an interrupted run. Exits with 1 if any output differs from plain decoding,
    unless --exact is off.
    """
    workload = read_prompts_or_bundled(prompts, sets_folder)
    config = ParetoConfig(
        concurrency=parse_points("concurrency", concurrency),
        num_requests=requests,
        repeats=repeats,
        parts=parts,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    llm_config = options.llm_config(ctx.params)
    check_before_loading(llm_config, output, files_of(prompts, sets_folder))
    chosen = mixed_prompts(workload, config.requests_per_point)
    configs = [llm_config, *(replace(llm_config, drafter=name) for name in also_drafter or [])]
    if len({one.drafter for one in configs}) < len(configs):
        raise ConfigError(
            "--also-drafter names a drafter twice, or that of --drafter; leave it out"
        )
    llms = [load_for_prompts(one, chosen, [config.params]) for one in configs]
    from blockdraft.bench.decode import encode_prompts
    from blockdraft.bench.journal import journal_path
    from blockdraft.bench.load.pareto import ParetoBench, names_of
    from blockdraft.bench.load.pareto_report import pareto_json
    from blockdraft.bench.load.repeats import RepeatJournal

    names = names_of([llm.drafter_folder for llm in llms])
    bench = ParetoBench(dict(zip(names, llms, strict=True)), parts=parts)
    settings = settings_of(configs, llms, asdict(config), chosen)
    journal = RepeatJournal(journal_path(output), settings, "bench pareto")
    missing = len(config.concurrency) * config.repeats - len(journal.done)
    progress = Progress("pareto", missing, "repeats of all configurations")
    with says_how_to_go_on(journal.how_to_go_on):
        measured = bench.run(workload, config, journal, progress.advance)
    lens = map(len, encode_prompts(bench.llm, chosen, config.params))
    publish(pareto_json(bench, config, measured, fmean(lens)), output, as_json=as_json)
    journal.remove()
    if not as_json:
        _show(bench, config, measured)
    reference = measured[0].runs[bench.ways[0].name].outputs
    runs = [run for repeat in measured for run in repeat.runs.values()]
    if llm_config.exact and any(run.num_equal(reference) < len(run.samples) for run in runs):
        raise typer.Exit(NO)


def _show(bench: "ParetoBench", config: ParetoConfig, repeats: Sequence["Repeat"]) -> None:
    from rich.console import Console

    from blockdraft.bench.load import pareto_report as report
    from blockdraft.bench.load.pareto import pareto_points, readings

    size = requests_of(config.requests_per_point, config.max_tokens)
    console = Console(markup=False)
    print(headline(bench.llm))
    points = pareto_points(repeats)
    for table in report.pareto_tables(f"{choice_of(config.temperature)}, {size}", points):
        console.print(table)
    print(*report.crossing_lines(points), sep="\n")
    equally_fast, equally_much = readings(repeats)
    console.print(
        report.reading_table(
            "total throughput over plain, at equal speed per user", "per user", equally_fast
        )
    )
    console.print(
        report.reading_table(
            "speed per user over plain, at equal total throughput", "in total", equally_much
        )
    )
    print(report.PARETO_LEGEND)

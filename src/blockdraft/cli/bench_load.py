"""`blockdraft bench concurrency`, `never-slower`, `pareto` and `traffic`: concurrent requests."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blockdraft.bench.config import (
    ConcurrencyConfig,
    NeverSlowerConfig,
    ParetoConfig,
    TrafficConfig,
)
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
from blockdraft.cli.ledger_output import (
    Ledger,
    Waterfall,
    check_waterfall,
    publish_ledgers,
)
from blockdraft.core.errors import NO, ConfigError
from blockdraft.core.words import choice_of

if TYPE_CHECKING:
    from blockdraft.bench.load.pareto import ParetoBench
    from blockdraft.bench.load.repeats import Repeat

_CONCURRENCY = ConcurrencyConfig()
_NEVER_SLOWER = NeverSlowerConfig()
_PARETO = ParetoConfig()
_TRAFFIC = TrafficConfig()

BadDrafter = Literal["no", "noise", "wrong"]
Points = Annotated[
    str, typer.Option(help="Concurrent requests: one measurement for each number.", metavar="N,N")
]
Repeats = Annotated[int, typer.Option(help="Repeats of each measurement.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]


@options.models(without=options.FIXED)
def concurrency(
    ctx: typer.Context,
    concurrency: Points = show_points(_CONCURRENCY.concurrency),
    prompts: Prompts = None,
    sets_folder: SetsFolder = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests in each measurement; prompts are repeated if there are fewer.",
            show_default="four for each concurrent request, and at least the largest number",
        ),
    ] = _CONCURRENCY.num_requests,
    repeats: Repeats = _CONCURRENCY.repeats,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens that the target verifies in a step of fixed drafting.",
            show_default=str(_CONCURRENCY.num_draft_tokens),
        ),
    ] = None,
    max_tokens: options.MaxTokens = _CONCURRENCY.max_tokens,
    temperature: options.Temperature = _CONCURRENCY.temperature,
    seed: Seed = _CONCURRENCY.seed,
    ledger: Ledger = _CONCURRENCY.ledger,
    waterfall: Waterfall = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Time few and many concurrent requests: plain, with fixed and with adaptive drafting.

    Closed loop: when a request ends, the next one starts. With --output the same command resumes an
    interrupted run, unless it has a --ledger. Exits with 1 if any output differs from plain
    decoding, unless --exact is off.
    """
    workload = read_prompts_or_bundled(prompts, sets_folder)
    config = ConcurrencyConfig(
        concurrency=parse_points("concurrency", concurrency),
        num_requests=requests,
        repeats=repeats,
        num_draft_tokens=(
            _CONCURRENCY.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        ),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ledger=ledger,
    )
    inputs = files_of(prompts, sets_folder)
    check_waterfall(waterfall, with_ledger=ledger, inputs=inputs)
    llm_config = options.llm_config(ctx.params)
    check_before_loading(llm_config, output, inputs)
    chosen = mixed_prompts(workload, config.requests_per_point)
    llm = load_for_prompts(llm_config, chosen, [config.params])
    from rich.console import Console

    from blockdraft.bench.journal import journal_path
    from blockdraft.bench.load import concurrency_report as report
    from blockdraft.bench.load.concurrency import (
        accounts_of,
        keeping_up,
        measure_concurrency,
        point_figures,
    )
    from blockdraft.bench.load.repeats import RepeatJournal

    settings = settings_of([llm_config], [llm], asdict(config), chosen)
    path = None if config.ledger else journal_path(output)
    journal = RepeatJournal(path, settings, "bench concurrency")
    missing = len(config.concurrency) * config.repeats - len(journal.done)
    progress = Progress("concurrency", missing, "repeats of all configurations")
    with says_how_to_go_on(journal.how_to_go_on):
        runs = measure_concurrency(llm, workload, config, progress.advance, journal)
    publish(report.concurrency_json(llm, config, runs, journal.num_found), output, as_json=as_json)
    journal.remove()
    if not as_json:
        print(headline(llm))
        size = requests_of(config.requests_per_point, config.max_tokens)
        rows = point_figures(runs)
        title = f"{choice_of(config.temperature)}, up to {size}"
        Console().print(report.concurrency_table(title, rows))
        verdicts = report.keeping_up_lines(keeping_up(runs))
        print(*report.depth_lines(rows), *verdicts, report.CONCURRENCY_LEGEND, sep="\n")
    if config.ledger:
        accounts = accounts_of(llm, runs)
        publish_ledgers(accounts, waterfall, headline(llm), as_json=as_json)
    if llm_config.exact and any(r.num_identical < len(r.run.samples) for r in runs):
        raise typer.Exit(NO)


@options.models(without=options.FIXED)
def never_slower(
    ctx: typer.Context,
    concurrency: Points = show_points(_NEVER_SLOWER.concurrency),
    prompts: Prompts = None,
    sets_folder: SetsFolder = None,
    bad_drafter: Annotated[
        BadDrafter,
        typer.Option(
            help="Make the drafter's model bad on purpose: noise proposes random tokens, wrong "
            "proposes only wrong ones. Lookup and n-grams are unchanged: leave them out with "
            "--no-lookup --no-ngrams."
        ),
    ] = "no",
    seconds: Annotated[
        float,
        typer.Option(help="Time each side for at least this long, for each number of requests."),
    ] = _NEVER_SLOWER.seconds,
    pairs: Annotated[
        int, typer.Option(help="Pairs of runs for each number of requests.")
    ] = _NEVER_SLOWER.pairs,
    max_tokens: options.MaxTokens = _NEVER_SLOWER.max_tokens,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Time adaptive drafting against an engine without a drafter, in alternating pairs.

    Greedy. The target is loaded twice. With --output the same command resumes an interrupted run.
    Exits with 1 if any output differs, unless --exact is off; being slower is a result, not a
    failure.
    """
    workload = read_prompts_or_bundled(prompts, sets_folder)
    config = NeverSlowerConfig(
        concurrency=parse_points("concurrency", concurrency),
        seconds=seconds,
        pairs=pairs,
        max_tokens=max_tokens,
    )
    llm_config = options.llm_config(ctx.params)
    check_before_loading(llm_config, output, files_of(prompts, sets_folder))
    chosen = mixed_prompts(workload, config.requests_per_point)
    llm = load_for_prompts(llm_config, chosen, [config.params])
    baseline = options.load_llm(replace(llm_config, drafter=None))
    from rich.console import Console

    from blockdraft.bench.bad_drafters import make_bad
    from blockdraft.bench.journal import journal_path
    from blockdraft.bench.load import concurrency_report as report
    from blockdraft.bench.load.never_slower import measure_never_slower, pair_figures
    from blockdraft.bench.load.repeats import RepeatJournal

    if bad_drafter != "no":
        make_bad(llm, bad_drafter)
    asked = asdict(config) | {"bad_drafter": bad_drafter}
    settings = settings_of([llm_config], [llm], asked, chosen)
    journal = RepeatJournal(journal_path(output), settings, "bench never-slower")
    missing = len(config.concurrency) * config.pairs - len(journal.done)
    progress = Progress("never slower", missing, "pairs")
    with says_how_to_go_on(journal.how_to_go_on):
        measured = measure_never_slower(llm, baseline, workload, config, progress.advance, journal)
    described = report.never_slower_json(llm, config, measured, journal.num_found)
    described["bad_drafter"] = bad_drafter
    publish(described, output, as_json=as_json)
    journal.remove()
    if not as_json:
        print(headline(llm) + ("" if bad_drafter == "no" else f", bad drafter: {bad_drafter}"))
        size = requests_of(config.requests_per_point, config.max_tokens)
        rows = pair_figures(measured)
        Console().print(report.never_slower_table(f"greedy, up to {size}", rows))
        verdicts = report.holding_lines(rows)
        print(*report.depth_lines(rows), *verdicts, report.NEVER_SLOWER_LEGEND, sep="\n")
    if llm_config.exact and any(p.num_identical < p.num_outputs for p in measured):
        raise typer.Exit(NO)


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
    repeats: Repeats = _PARETO.repeats,
    max_tokens: options.MaxTokens = _PARETO.max_tokens,
    temperature: options.Temperature = _PARETO.temperature,
    seed: Seed = _PARETO.seed,
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
    publish(
        pareto_json(bench, config, measured, fmean(lens), journal.num_found),
        output,
        as_json=as_json,
    )
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


@options.models(without=options.FIXED)
def traffic(
    ctx: typer.Context,
    prompts: Prompts = None,
    sets_folder: SetsFolder = None,
    requests_per_second: Annotated[
        float, typer.Option(help="Requests per second, on average.")
    ] = _TRAFFIC.requests_per_second,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = _TRAFFIC.num_requests,
    concurrency: Annotated[
        int, typer.Option(help="Maximum number of concurrent requests; others wait.")
    ] = _TRAFFIC.concurrency,
    min_tokens: Annotated[
        int, typer.Option(help="Smallest max_tokens of a request.")
    ] = _TRAFFIC.min_tokens,
    max_tokens: Annotated[
        int, typer.Option(help="Largest max_tokens of a request.")
    ] = _TRAFFIC.max_tokens,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures, one drawn at random for each request.", metavar="T,T")
    ] = ",".join(f"{one:g}" for one in _TRAFFIC.temperatures),
    abort_share: Annotated[
        float,
        typer.Option(help="Share of requests whose client disconnects before the answer ends."),
    ] = _TRAFFIC.abort_share,
    repeats: Annotated[
        int, typer.Option(help="Times that each side plays the same traffic.")
    ] = _TRAFFIC.repeats,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = _TRAFFIC.seed,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Play random arrivals of requests, some of them aborted, plain and with adaptive drafting.

    Open loop: a request arrives at its time whether the engine keeps up or not. Its maximum length
    lies between --min-tokens and --max-tokens, uniformly on a log scale. With --output the same
    command resumes an interrupted run. Exits with 1 if any output differs from plain decoding,
    unless --exact is off.
    """
    try:
        parsed = tuple(map(float, temperatures.split(",")))
    except ValueError as error:
        raise ConfigError(
            f"temperatures is {temperatures!r}; give numbers such as 0,0.7"
        ) from error
    config = TrafficConfig(
        requests_per_second=requests_per_second,
        num_requests=requests,
        concurrency=concurrency,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        temperatures=parsed,
        abort_share=abort_share,
        repeats=repeats,
        seed=seed,
    )
    all_params = config.params
    workload = read_prompts_or_bundled(prompts, sets_folder)
    chosen = mixed_prompts(workload, min(len(workload), config.num_requests))
    llm_config = options.llm_config(ctx.params)
    check_before_loading(llm_config, output, files_of(prompts, sets_folder))
    llm = load_for_prompts(llm_config, chosen, all_params)
    from rich.console import Console

    from blockdraft.bench.decode import encode_prompts
    from blockdraft.bench.journal import journal_path
    from blockdraft.bench.load import traffic_report as report
    from blockdraft.bench.load.traffic import (
        TrafficJournal,
        draw_requests,
        measure_traffic,
        traffic_figures,
    )

    settings = settings_of([llm_config], [llm], asdict(config), chosen)
    journal = TrafficJournal(journal_path(output), settings, "bench traffic")
    asked = draw_requests(config, len(chosen))
    encoded = encode_prompts(llm, chosen, all_params[0])
    progress = Progress("traffic", config.repeats - len(journal.done), "repeats")
    with says_how_to_go_on(journal.how_to_go_on):
        measured = measure_traffic(llm, encoded, asked, config, journal, progress.advance)
    ids = [prompt.id for prompt in chosen]
    publish(
        report.traffic_json(llm, config, asked, ids, measured, journal.num_found),
        output,
        as_json=as_json,
    )
    journal.remove()
    rows = traffic_figures(measured, asked)
    if not as_json:
        print(headline(llm))
        title = (
            f"{config.num_requests} requests, {config.requests_per_second:g} per second, of "
            f"{config.min_tokens} to {config.max_tokens} tokens, temperature {temperatures}, "
            f"{rows[0].num_aborted // len(measured)} aborted"
        )
        Console(markup=False).print(report.traffic_table(title, rows))
        print(report.TRAFFIC_LEGEND)
    if llm_config.exact and any(row.num_identical < row.num_outputs for row in rows):
        raise typer.Exit(NO)

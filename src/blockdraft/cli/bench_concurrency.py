"""`blockdraft bench concurrency` and `blockdraft bench never-slower`."""

from dataclasses import asdict, replace
from typing import Annotated, Literal

import typer

from blockdraft.bench.config import ConcurrencyConfig, NeverSlowerConfig
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
from blockdraft.core.errors import NO
from blockdraft.core.words import choice_of

_CONCURRENCY = ConcurrencyConfig()
_NEVER_SLOWER = NeverSlowerConfig()

BadDrafter = Literal["no", "noise", "wrong"]
Points = Annotated[
    str, typer.Option(help="Concurrent requests: one measurement for each number.", metavar="N,N")
]


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
    repeats: Annotated[
        int, typer.Option(help="Repeats of each measurement.")
    ] = _CONCURRENCY.repeats,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens that the target verifies in a step of fixed drafting.",
            show_default=str(_CONCURRENCY.num_draft_tokens),
        ),
    ] = None,
    max_tokens: options.MaxTokens = _CONCURRENCY.max_tokens,
    temperature: options.Temperature = _CONCURRENCY.temperature,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = _CONCURRENCY.seed,
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
    publish(report.concurrency_json(llm, config, runs), output, as_json=as_json)
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
    described = report.never_slower_json(llm, config, measured) | {"bad_drafter": bad_drafter}
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

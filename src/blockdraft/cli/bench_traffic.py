"""`blockdraft bench traffic`."""

from dataclasses import asdict
from typing import Annotated

import typer

from blockdraft.bench.config import TrafficConfig
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
    publish,
    read_prompts_or_bundled,
    settings_of,
)
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.core.errors import NO, ConfigError

_TRAFFIC = TrafficConfig()


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
    publish(report.traffic_json(llm, config, asked, ids, measured), output, as_json=as_json)
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

"""`blockdraft bench plan`, `report` and `sets`: what measures nothing itself."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.bench.result import read_result, read_results
from blockdraft.bench.sets import SETS
from blockdraft.cli import options
from blockdraft.cli.bench_output import Output, publish
from blockdraft.cli.output import check_not_read, check_writable, print_json, write_report
from blockdraft.core.errors import NO, ConfigError


def plan(
    curve: Annotated[Path, typer.Argument(help="Result of `bench pareto`.", metavar="CURVE")],
    requests_per_second: Annotated[
        float | None, typer.Option(help="Requests per second, on average.")
    ] = None,
    output_tokens: Annotated[
        float | None,
        typer.Option(help="Mean output tokens per request.", show_default="those of the curve"),
    ] = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(help="Mean prompt tokens per request.", show_default="those of the curve"),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --requests-per-second and --output-tokens: JSONL file of real "
            "requests, rows with at (seconds) and output_tokens."
        ),
    ] = None,
    max_tpot: Annotated[
        float | None,
        typer.Option(help="Goal: at most this many milliseconds for each token after the first."),
    ] = None,
    max_ttft: Annotated[
        float | None,
        typer.Option(
            help="Goal: at most this many milliseconds to the first token, queueing included."
        ),
    ] = None,
    percentile: Annotated[
        float, typer.Option(help="Percentage of the requests that must meet both goals.")
    ] = 95.0,
    price: Annotated[
        float | None, typer.Option(help="Price of one machine per hour, in any currency.")
    ] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Say how many replicas a load needs, plain and drafted, and when to turn drafting off.

    From a measured curve: a queueing formula gives the number, and a simulation of arrivals checks
    it. Exits with 1 if no configuration meets the goal with any number of replicas.
    """
    from rich.console import Console

    from blockdraft.bench.plan import report
    from blockdraft.bench.plan.queueing import Goal
    from blockdraft.bench.plan.replicas import make_plan, mean_output, services_of
    from blockdraft.bench.plan.traffic import read_traffic, steady_traffic

    if price is not None and not price >= 0:
        raise ConfigError(f"price is {price:g}; give what a machine costs per hour")
    goal = Goal(
        token_seconds=None if max_tpot is None else max_tpot / 1000,
        first_token_seconds=None if max_ttft is None else max_ttft / 1000,
        percentile=percentile,
    )
    check_not_read(output, [curve] if arrivals is None else [curve, arrivals])
    check_writable(output)
    result = read_result(curve)
    services = services_of(result)
    if arrivals is not None:
        if requests_per_second is not None or output_tokens is not None:
            raise ConfigError(
                "--arrivals says when requests arrive and how long their outputs are; leave out "
                "--requests-per-second and --output-tokens"
            )
        traffic = read_traffic(arrivals, prompt_tokens)
    elif requests_per_second is None:
        raise ConfigError("there is no traffic; give --requests-per-second, or --arrivals")
    else:
        tokens = mean_output(result) if output_tokens is None else output_tokens
        traffic = steady_traffic(requests_per_second, tokens, prompt_tokens)
    rows = make_plan(result, traffic, goal, price)
    made = report.plan_json(result, traffic, goal, price, rows)
    publish(made, output, as_json=as_json)
    if not as_json:
        title = (
            f"{traffic.requests_per_second:.3g} requests per second, outputs of "
            f"{traffic.output_len:.3g} tokens; {report.goal_words(goal)}"
        )
        print(f"measured on {result.machine}; at most {services['plain'].most} concurrent requests")
        Console(markup=False).print(report.plan_table(title, rows))
        print(*report.off_lines(result, rows), report.PLAN_LEGEND, sep="\n")
    if all(row.replicas is None for row in rows):
        raise typer.Exit(NO)


def report(
    results: Annotated[
        Path,
        typer.Argument(help="Folder of results of bench commands (JSON), or one such file."),
    ],
    against: Annotated[
        Path | None,
        typer.Option(help="Folder of earlier results, or one file, to compare with."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with all tables and plots to this file.")
    ] = None,
    into: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write tables into this Markdown file, between its marks `<!-- results: NAME -->` "
            "and `<!-- end of results: NAME -->`, and plots beside the results. Repeatable."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="With --into: write nothing, exit with 1 if a file is out of date."
        ),
    ] = False,
) -> None:
    """Make tables, plots and one HTML page from results.

    Without --html and --into it prints the tables as Markdown. NAME is a result's file without the
    ending; the summary of the default pair has the marks `<!-- results -->`.
    """
    from blockdraft.bench.report import documents

    if check and not into:
        raise ConfigError("--check compares the files given by --into; name them")
    check_writable(html)
    found = read_results(results)
    earlier = [] if against is None else read_results(against)
    check_not_read(html, [one.path for one in [*found, *earlier]])
    sections = documents.sections_of(found, earlier)
    if html is not None:
        write_report(html, documents.render_page(sections, found))
    if into:
        stale = []
        for path, text in documents.documents(found, into).items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path))
                if not check:
                    write_report(path, text)
        print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
        if check and stale:
            raise typer.Exit(NO)
    if html is None and not into:
        print(documents.markdown(sections, found), end="")


def sets(as_json: options.Json = False) -> None:
    """List the sets of prompts that `bench speed --prompts NAME --sets FOLDER` knows.

    None comes with blockdraft: FOLDER holds your copies.
    """
    if as_json:
        print_json([asdict(one) for one in SETS.values()])
        return
    print(
        "Name: what it measures (paper: one of the seven sets of the DFlash paper), prompts, "
        "license, source;\nbelow it the file that the folder of --sets must hold."
    )
    for one in SETS.values():
        number = "" if one.num_prompts is None else f"{one.num_prompts} prompts, "
        suffix = " (with the boxed-answer line added)" if one.suffix else ""
        print(f"{one.name}: {one.use}, {number}{one.license}, from {one.source}{suffix}")
        print(f"    {one.file}.jsonl or {one.file}.jsonl.gz")

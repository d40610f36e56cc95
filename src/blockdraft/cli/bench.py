"""`blockdraft bench`: the group of measurements."""

import typer

from blockdraft.cli.bench_context import context
from blockdraft.cli.bench_load import concurrency, never_slower, pareto, traffic
from blockdraft.cli.bench_results import plan, report, sets
from blockdraft.cli.bench_speed import demo, speed
from blockdraft.cli.command import Command
from blockdraft.cli.logs import with_verbosity

app = typer.Typer(
    help="Measure the speed of drafted decoding, check that it changes no output, and report.",
    no_args_is_help=True,
)
# The help lists them in this order, those first that most people want.
for command in (
    *(speed, demo, concurrency, never_slower, context, traffic, pareto, plan, report, sets),
):
    app.command(cls=Command)(with_verbosity(command))

"""`blockdraft train`: a drafter from the target's own answers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blockdraft.cli import options
from blockdraft.cli.data import progress_printer
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.cli.output import print_json
from blockdraft.core.errors import ConfigError
from blockdraft.core.files import folder_lock
from blockdraft.core.libraries import let_torch_use_matrix_registers
from blockdraft.core.words import counted

if TYPE_CHECKING:
    from blockdraft.data.config import DataConfig
    from blockdraft.train.config_file import RunFile
    from blockdraft.train.estimate import Estimate
    from blockdraft.train.training_run import TrainResult


def _print_keys(wanted: bool) -> None:
    if wanted:
        from blockdraft.train.keys import describe_keys

        typer.echo(describe_keys(), nl=False)
        raise typer.Exit


def train(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN.toml] [KEY=VALUE]...",
            help="A TOML file of settings, and settings that override it; either may be left out. "
            "--keys lists all settings.",
        ),
    ],
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Check the settings, time three steps, print the time and memory that the run "
            "needs, and stop.",
        ),
    ] = False,
    init_only: Annotated[
        bool,
        typer.Option("--init-only", help="Write the untrained drafter, and stop."),
    ] = False,
    _keys: Annotated[
        bool,
        typer.Option(
            "--keys",
            callback=_print_keys,
            is_eager=True,
            help="Print all settings with defaults and meanings, and stop.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train a drafter on answers of its target.

    To resume a run that was stopped, give the same command again: `out` names the run.
    """
    if plan and init_only:
        raise ConfigError("--plan and --init-only exclude each other; leave one out")
    run = _read(arguments)
    rank, count = _launched()
    if plan:
        if rank == 0:
            let_torch_use_matrix_registers()
            _print_plan(run, as_json=as_json)
        return
    if init_only:
        if rank > 0:
            return
        from blockdraft.train.untrained import write_untrained

        folder = write_untrained(run.train, run.answers)
        if as_json:
            print_json({"drafter": str(folder)})
        else:
            typer.echo(folder)
        return
    result = _run(run, rank, count)
    if rank == 0:
        _print_result(result, as_json=as_json)


def _run(run: "RunFile", rank: int, num_processes: int) -> "TrainResult":
    from blockdraft.train.interrupted import how_to_go_on
    from blockdraft.train.trainer import train as train_drafter

    with says_how_to_go_on(lambda: None if rank else how_to_go_on(run)):
        if run.answers is not None:
            _write_answers(run, run.answers, num_processes)
        let_torch_use_matrix_registers()  # answers are exact, and would be refused with them
        return train_drafter(run.train)


def _launched() -> tuple[int, int]:
    """(number of this process, how many train together); only the first one tells how it goes."""
    from blockdraft.train.parallel import launched

    rank, count = launched()
    if rank > 0:
        logging.getLogger("blockdraft").setLevel(logging.WARNING)
    return rank, count


def _write_answers(run: "RunFile", config: "DataConfig", num_processes: int) -> None:
    from blockdraft.data.generate import generate_data
    from blockdraft.data.history import is_answered
    from blockdraft.train.check import check_run
    from blockdraft.train.texts import are_written

    if num_processes == 1:
        if not is_answered(config):
            check_run(run.train, config)
            # Not while another process trains on them.
            with folder_lock(run.train.out):
                generate_data(config, progress_printer())
    elif not are_written(config):
        raise ConfigError(
            f"{config.output} holds no finished answers, and each of {num_processes} processes "
            "would generate them; write them first, with `blockdraft data` or one process"
        )


def _read(arguments: Sequence[str]) -> "RunFile":
    """The run of a command line, whose prompts may not overlap our benchmark's."""
    from blockdraft.bench.workload import BUNDLED
    from blockdraft.train.config_file import resolve_run

    run = resolve_run(arguments)
    if run.answers is None:
        return run
    return replace(run, answers=replace(run.answers, exclude=(BUNDLED, *run.answers.exclude)))


def _print_plan(run: "RunFile", *, as_json: bool) -> None:
    from blockdraft.train.estimate import estimate_run

    settings: dict[str, Any] = run.train.to_dict()
    if run.answers is not None:
        settings["answers"] = run.answers.to_dict()
    figures = estimate_run(run.train, run.answers)
    if as_json:
        print_json({"settings": settings, "plan": figures.to_dict()})
        return
    _print_table("Settings", {name: _shown(value) for name, value in settings.items()})
    _print_table("Plan", _plan_rows(figures, run.train.block_size))
    for warning in figures.warnings:
        typer.echo(f"Warning: {warning}")
    if expected := figures.texts.num_expected:
        typer.echo(
            f"The run first generates {expected} answers, which takes extra time. This plan counts "
            "them at their maximum length, and none as a loop or a repetition."
        )


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_shown(inner)}" for key, inner in value.items())
    return "unset" if value is None else str(value)


def _plan_rows(plan: "Estimate", block_size: int) -> Mapping[str, str]:
    memory, texts = plan.memory, plan.texts
    layers = ", ".join(map(str, plan.drafter.feature_layers))
    features = f"features of layers {layers}" if layers else "no features"
    at_most = "at most " if texts.num_expected else ""
    each = f"in each of {plan.num_processes} processes " if plan.num_processes > 1 else ""
    rows = {
        "drafter": f"{plan.num_parameters / 1e6:.1f} M parameters, "
        f"layers: {plan.drafter.num_layers}, blocks of {block_size}, {features}",
        "target": f"{plan.target_parameters / 1e6:.1f} M parameters",
        "answers": f"{at_most}{texts.num_train} to train on, {texts.num_held_out} held out",
        "tokens": f"{at_most}{texts.num_tokens}, {texts.num_answer_tokens} of them answers",
        "memory, at least": f"{each}{sum(memory.values()) / 2**20:.0f} MiB: "
        + ", ".join(f"{name} {size / 2**20:.0f}" for name, size in memory.items()),
    }
    if plan.step_seconds is None:
        rows["a step"] = "not timed: the processes share the target's layers"
    else:
        rows["a step"] = f"{plan.step_seconds:.2f} s, timed here over three of them"
    if plan.num_steps is not None and plan.passes is not None:
        tokens = plan.passes * texts.num_tokens / 1e6
        rows["steps"] = f"about {plan.num_steps}, {plan.passes:.1f} passes, {tokens:.1f} M tokens"
    if plan.minutes is not None:
        rows["time"] = f"{counted(round(plan.minutes), 'minute')}, evaluations not counted"
    return rows


def _print_table(title: str, rows: Mapping[str, str]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _print_result(result: "TrainResult", *, as_json: bool) -> None:
    from blockdraft.train.advice import below_plain

    before, best = result.evaluations[0], result.best
    if as_json:
        facts = {"drafter": str(result.drafter), "steps": result.num_steps}
        print_json(facts | {"before": before, "best": best})
        return
    kind = "tau" if best["true_tau"] else "offline tau"
    sets = [name for name in sorted(best["true_tau"]) if name != "all"]
    table = Table("prompts", f"{kind} before", f"{kind} after", "speed-up after")
    for name in sets:
        taus = (_number(row["true_tau"].get(name)) for row in (before, best))
        table.add_row(name, *taus, _times(best["speedup"].get(name)))
    # Both of one kind: an earlier part of the run may have decoded, and this one not.
    overall = (
        row["true_tau"].get("all") if best["true_tau"] else row["held_out"]["tau"]
        for row in (before, best)
    )
    table.add_row("all", *map(_number, overall), _times(best["speedup"].get("all")))
    Console(stderr=True).print(table)
    typer.echo(result.drafter)
    if line := below_plain(best):
        typer.echo(f"blockdraft: {line}", err=True)


def _number(tau: float | None) -> str:
    """Nothing for what was not measured, such as a set that came later."""
    return "" if tau is None else f"{tau:.2f}"


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}x"

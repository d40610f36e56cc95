"""`blockdraft bench speed` and `blockdraft bench demo`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.bench.config import BreakEvenConfig, SpeedConfig, check_growing
from blockdraft.bench.outside.engines import ENGINES, parse_against
from blockdraft.bench.scores.scores import check_scored, score_lines, scores_of
from blockdraft.bench.sets import files_of, read_prompts
from blockdraft.bench.workload import (
    BUNDLED,
    BenchPrompt,
    first_of_each_category,
    read_workload,
)
from blockdraft.cli import options
from blockdraft.cli.bench_output import (
    Output,
    Progress,
    SetsFolder,
    check_before_loading,
    headline,
    load_for_prompts,
    parse_points,
    publish,
    settings_of,
)
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.cli.ledger_output import (
    Ledger,
    Waterfall,
    check_waterfall,
    publish_ledgers,
)
from blockdraft.core.config import LLMConfig, Thinking
from blockdraft.core.errors import NO, ConfigError
from blockdraft.core.words import choice_of, counted

if TYPE_CHECKING:
    from blockdraft.bench.outside.others import OtherEngine
    from blockdraft.bench.speed.report import Runs
    from blockdraft.llm import LLM

_SPEED = SpeedConfig()

DEMO_PER_KIND = 2
DEMO_TEMPERATURE = 0.7
DEMO_MAX_TOKENS = 96

WithTransformers = Annotated[
    bool,
    typer.Option(
        "--with-transformers/--no-transformers", help="Also time `generate` of transformers."
    ),
]


@options.models(without=[name for name in options.FIXED if name not in options.DRAFTED])
def speed(
    ctx: typer.Context,
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="JSONL file of prompts, or the name of a set that `bench sets` lists. Repeatable."
        ),
    ],
    sets_folder: SetsFolder = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Take only this many prompts of each file, drawn by --seed."),
    ] = None,
    max_tokens: options.MaxTokens = _SPEED.max_tokens,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Instead of --max-tokens: answers of exactly this many tokens, for each number, "
            "and the length from which drafting saves time.",
        ),
    ] = None,
    temperature: options.Temperature = _SPEED.temperature,
    seed: Annotated[
        int, typer.Option(help="Seed of the sampling, and of the choice of prompts.")
    ] = _SPEED.seed,
    thinking: Annotated[
        Thinking,
        typer.Option(
            help="Whether the model thinks (reasons) before it answers; template: the default of "
            "its chat template."
        ),
    ] = "template",
    whole_blocks: Annotated[
        bool,
        typer.Option(
            "--whole-blocks",
            help="In every step draft as much as the drafter can, not as much as saves time: the "
            "same command then gives the same tau, whatever else the machine does.",
        ),
    ] = False,
    with_transformers: WithTransformers = _SPEED.with_transformers,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Also time other engines, which pip installs in environments of their own: "
            f"{', '.join(ENGINES)}, or the URL of any OpenAI-compatible server. Then transformers "
            "is timed only if it is named here.",
        ),
    ] = None,
    against_model: Annotated[
        str | None,
        typer.Option(
            help="With --against: the target's name on a server that serves several models."
        ),
    ] = _SPEED.against_model,
    against_timeout: Annotated[
        float, typer.Option(help="With --against: seconds allowed for one answer.")
    ] = _SPEED.against_timeout,
    assistant: Annotated[
        str | None,
        typer.Option(help="With --against: small model for transformers-assisted."),
    ] = _SPEED.assistant,
    score: Annotated[
        bool,
        typer.Option(
            "--score",
            help="Also count correct answers, for prompts that have tests or a number as "
            "reference. Tests run the model's programs without network.",
        ),
    ] = _SPEED.score,
    ledger: Ledger = _SPEED.ledger,
    waterfall: Waterfall = None,
    force_acceptance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Timing only: accept this share of the draft tokens in every step, right or "
            "wrong, and print the time of a drafted step divided by that of a plain one. Outputs "
            "are discarded.",
        ),
    ] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Time plain decoding, drafted decoding and transformers on each prompt in turn.

    Every turn of a conversation is asked, after the answers of plain decoding. With --output the
    same command resumes an interrupted run, unless it has a --ledger or --force-acceptance. Exits
    with 1 if any output differs from plain decoding, unless --exact is off.
    """
    workload = read_prompts(prompts, sets_folder, limit, seed, thinking)
    llm_config = options.llm_config(ctx.params)
    inputs = files_of(prompts, sets_folder)
    check_before_loading(llm_config, output, inputs)
    if force_acceptance is not None:
        refused = {
            "--ledger needs real verdicts": ledger or waterfall is not None,
            "--against compares outputs": against is not None,
            "--score needs real outputs": score,
            "--lengths needs real verdicts": lengths is not None,
        }
        for reason, is_given in refused.items():
            if is_given:
                raise ConfigError(f"{reason}; leave it out with --force-acceptance")
        forced = BreakEvenConfig(
            force_acceptance=force_acceptance,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        _measure_break_even(llm_config, forced, workload, output, as_json)
        return
    config = SpeedConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        with_transformers=with_transformers and against is None,
        ledger=ledger,
        score=score,
        against=() if against is None else parse_against(against),
        against_model=against_model,
        against_timeout=against_timeout,
        assistant=assistant,
    )
    check_waterfall(waterfall, with_ledger=ledger, inputs=inputs)
    if score:
        check_scored(workload)
    configs = [config] if lengths is None else _of_lengths(config, lengths)
    llm_config = replace(llm_config, adaptive=not whole_blocks)
    _measure(llm_config, configs, workload, output, as_json, waterfall)


def _of_lengths(config: SpeedConfig, lengths: str) -> list[SpeedConfig]:
    """A run for each length.

    Raises:
        ConfigError: they are no growing numbers, or something else needs whole answers.
    """
    points = parse_points("lengths", lengths)
    check_growing("lengths", points)
    if config.against or config.score or config.ledger:
        raise ConfigError(
            "--lengths cuts answers at each length; leave it out with --against, --score and "
            "--ledger"
        )
    return [replace(config, max_tokens=length, ignore_eos=True) for length in points]


@options.models(without=options.FIXED)
def demo(
    ctx: typer.Context,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = DEMO_PER_KIND,
    max_tokens: options.MaxTokens = DEMO_MAX_TOKENS,
    with_transformers: WithTransformers = _SPEED.with_transformers,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Show the speed on bundled prompts, greedy and sampled; a few minutes on two cores."""
    workload = first_of_each_category(read_workload(BUNDLED), per_kind)
    greedy = SpeedConfig(max_tokens=max_tokens, with_transformers=with_transformers)
    sampled = replace(greedy, temperature=DEMO_TEMPERATURE)
    llm_config = options.llm_config(ctx.params)
    check_before_loading(llm_config, output)
    _measure(llm_config, [greedy, sampled], workload, output, as_json)


def _measure_break_even(
    llm_config: LLMConfig,
    config: BreakEvenConfig,
    workload: Sequence[BenchPrompt],
    output: Path | None,
    as_json: bool,
) -> None:
    # How much is drafted must not depend on verdicts that mean nothing.
    llm = load_for_prompts(replace(llm_config, adaptive=False), workload, [config.params])
    from blockdraft.bench.speed.break_even import (
        break_even_lines,
        json_report,
        measure_break_even,
    )

    progress = Progress(f"acceptance {config.force_acceptance:g}", len(workload))
    measurements = measure_break_even(llm, workload, config, progress.advance)
    publish(json_report(llm, config, measurements), output, as_json=as_json)
    if not as_json:
        print(headline(llm), *break_even_lines(measurements), sep="\n")


def _measure(
    llm_config: LLMConfig,
    configs: Sequence[SpeedConfig],
    workload: Sequence[BenchPrompt],
    output: Path | None,
    as_json: bool,
    waterfall: Path | None = None,
) -> None:
    """Run every config, report, and exit with 1 if any drafted output differs from the plain one.

    `--exact off` promises no equality, so a difference is shown there and is no failure.
    """
    all_params = [config.params for config in configs]
    llm = load_for_prompts(llm_config, workload, all_params, multi_turn=True)
    from blockdraft.bench.journal import journal_path
    from blockdraft.bench.outside.others import started_engines
    from blockdraft.bench.speed.bench import SpeedBench, SpeedJournal
    from blockdraft.bench.speed.report import accounts_of, json_report

    with_ledger = any(config.ledger for config in configs)
    settings = settings_of([llm_config], [llm], list(map(asdict, configs)), workload)
    path = None if with_ledger else journal_path(output)
    journal = SpeedJournal(path, settings, "bench speed")
    num_turns = sum(1 + len(prompt.later) for prompt in workload)
    runs = []
    with (
        says_how_to_go_on(journal.how_to_go_on),
        started_engines(configs[0].against, llm, configs[0]) as others,
    ):
        with_transformers = configs[0].with_transformers
        bench = SpeedBench(llm, with_transformers=with_transformers, others=others)
        for number, config in enumerate(configs):
            size = f", {counted(config.max_tokens, 'token')}" if config.ignore_eos else ""
            progress = Progress(f"{choice_of(config.temperature)}{size}", num_turns)
            found = bench.run(workload, config, progress.advance, journal, number)
            runs.append((config, found))
    publish(json_report(llm, runs, others, journal.num_found), output, as_json=as_json)
    journal.remove()
    if not as_json:
        _show(llm, runs, others)
    for config, measurements in runs:
        if config.ledger:
            accounts = accounts_of(llm, measurements)
            publish_ledgers(accounts, waterfall, headline(llm), as_json=as_json)
    all_identical = all(m.identical for _, measurements in runs for m in measurements)
    if llm_config.exact and not all_identical:
        raise typer.Exit(NO)


def _show(llm: "LLM", runs: "Runs", others: Sequence["OtherEngine"]) -> None:
    from rich.console import Console

    from blockdraft.bench.outside.figures import failure_lines, outside_figures, outside_table
    from blockdraft.bench.speed.figures import groups_of
    from blockdraft.bench.speed.lengths import length_line
    from blockdraft.bench.speed.report import LEGEND, length_of, table

    console = Console(markup=False)
    print(headline(llm))
    for config, measurements in runs:
        most = "" if config.ignore_eos else "at most "
        title = f"{choice_of(config.temperature)}, {most}{counted(config.max_tokens, 'token')}"
        console.print(table(title, groups_of(measurements)))
    print(LEGEND)
    if (found := length_of(runs)) is not None:
        print(length_line(found))
    for _, measurements in runs if others else []:
        figures = [outside_figures(other, measurements) for other in others]
        console.print(outside_table(figures))
        print(*failure_lines(figures), sep="\n")
    for config, measurements in runs:
        if config.score:
            scores = scores_of(measurements, llm.tokenizer.decode, config.max_tokens)
            print(*score_lines(scores), sep="\n")

"""`blockdraft bench context`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.bench.config import ContextConfig
from blockdraft.bench.context.prose import python_help, read_prose
from blockdraft.cli import options
from blockdraft.cli.bench_output import (
    Output,
    Progress,
    check_before_loading,
    headline,
    parse_points,
    publish,
    settings_of,
    show_points,
)
from blockdraft.cli.interruption import says_how_to_go_on
from blockdraft.core.errors import NO
from blockdraft.core.words import counted

if TYPE_CHECKING:
    from blockdraft.text.outline import Outline

_CONTEXT = ContextConfig()


@options.models(without=options.FIXED)
def context(
    ctx: typer.Context,
    lengths: Annotated[
        str,
        typer.Option(help="Prompt tokens: one measurement for each number.", metavar="N,N"),
    ] = show_points(_CONTEXT.lengths),
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file, or JSONL file of prompts, to cut prompts from. Repeatable.",
            show_default="the help topics that come with Python",
        ),
    ] = None,
    passages: Annotated[
        int,
        typer.Option(help="Prompts of each length, cut from places evenly spread over the text."),
    ] = _CONTEXT.passages,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Verify this many draft tokens in every step.",
            show_default="as many as save time",
        ),
    ] = _CONTEXT.num_draft_tokens,
    max_tokens: options.MaxTokens = _CONTEXT.max_tokens,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Time decoding after long prompts of real text, plain and drafted.

    Greedy. Prompts are cut from the text and continued as they are, without a chat template; an end
    token does not end the output. A prompt that would not fit the context with its output is cut
    shorter. By default the text is the help that comes with every Python. With --output the same
    command resumes an interrupted run. Exits with 1 if any output differs from plain decoding,
    unless --exact is off.
    """
    config = ContextConfig(
        lengths=parse_points("lengths", lengths),
        passages=passages,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
    )
    prose = read_prose(text) if text else python_help()
    llm_config = options.llm_config(ctx.params)
    check_before_loading(llm_config, output, text)

    def check(outline: "Outline") -> None:
        from blockdraft.bench.context.bench import check_text

        check_text(outline, prose, config)

    llm = options.load_llm(llm_config, check)
    from rich.console import Console

    from blockdraft.bench.context import report
    from blockdraft.bench.context.bench import ContextJournal, context_figures, measure_context
    from blockdraft.bench.journal import journal_path

    settings = settings_of([llm_config], [llm], asdict(config), [prose])
    journal = ContextJournal(journal_path(output), settings, "bench context")
    progress = Progress("context", len(config.lengths) * config.passages, "passages")
    with says_how_to_go_on(journal.how_to_go_on):
        measured = measure_context(llm, prose, config, progress.advance, journal)
    publish(
        report.context_json(llm, config, prose, measured, journal.num_found),
        output,
        as_json=as_json,
    )
    journal.remove()
    if not as_json:
        rows = context_figures(llm, measured)
        print(headline(llm))
        most = config.num_draft_tokens
        drafting = "adaptive drafting" if most is None else f"{counted(most, 'candidate')} a step"
        size = f"{counted(max_tokens, 'token')}, {counted(passages, 'passage')} of {prose.source}"
        Console().print(report.context_table(f"greedy, {drafting}, {size}", rows))
        print(*report.clipped_lines(rows), report.CONTEXT_LEGEND, sep="\n")
    if llm_config.exact and not all(m.identical for m in measured):
        raise typer.Exit(NO)

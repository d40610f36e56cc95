"""`blockdraft explain`: every round of a run, and why drafts were rejected."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import options
from blockdraft.cli.bench_output import Progress, headline
from blockdraft.cli.output import (
    check_not_read,
    check_writable,
    describe_llm,
    kind_of_failure,
    print_json,
    write_report,
)
from blockdraft.cli.stdin import read_prompt
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import NO, ConfigError
from blockdraft.core.request import SamplingParams
from blockdraft.measure.provenance import describe_environment

if TYPE_CHECKING:
    from blockdraft.diagnose.explain.groups import Explained, Summary
    from blockdraft.diagnose.explain.prompts import Question
    from blockdraft.diagnose.explain.report import Asked
    from blockdraft.llm import LLM
    from blockdraft.text.outline import Check
    from blockdraft.text.tokenizer import Tokenizer


@options.models(
    without=(
        "memory",
        "max_concurrency",
        "lookup",
        "shared_lookup",
        "ngrams",
    )
)
@options.sampling(
    without=(
        "n",
        "logprobs",
        "prediction",
    )
)
def explain(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Explain every prompt of a JSONL file instead.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Draft as `generate` does, instead of whole blocks of the drafter's model alone "
            "in every step.",
        ),
    ] = False,
    lookup: Annotated[
        bool | None,
        typer.Option(
            "--lookup/--no-lookup",
            help="Also draft by prompt lookup.",
            show_default="with --adaptive",
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Also time how the text streams, drafted and plain."),
    ] = False,
    stall_ms: Annotated[
        float | None,
        typer.Option(
            help="With --stream: milliseconds without new text that count as a stall.",
            show_default="three times the median gap",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that replays the run to this HTML file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what each step drafted, what the target accepted, and why it rejected the rest."""
    # The signature declares the options; those of the two configs are read by their names.
    params, config = options.sampling_params(ctx.params), options.llm_config(ctx.params)
    if not adaptive:  # whole blocks are the drafter's own
        config = replace(config, lookup=bool(lookup), ngrams=False)
    _check(config, stream=stream, stall_ms=stall_ms)
    check_not_read(html, None if prompts is None else [prompts])
    check_writable(html)
    questions = _questions(prompt, prompts)

    def encode(tokenizer: "Tokenizer", check: "Check", most: int | None) -> list["Asked"]:
        from blockdraft.diagnose.explain.report import encode_question

        return [
            encode_question(tokenizer, check, one, params, raw=raw, most=most) for one in questions
        ]

    llm = options.load_llm(
        config, lambda outline: encode(outline.tokenizer, outline.check, outline.max_context)
    )
    limits = llm.engine.limits
    asked = encode(llm.tokenizer, limits.check_prompt, limits.max_tokens)
    from blockdraft.diagnose.explain.report import explain_all

    stall_limit = None if stall_ms is None else stall_ms / 1000
    progress = Progress("explained", len(asked))
    summaries, described = [], []
    for one in explain_all(llm, asked, params, with_streams=stream):
        summaries.append(one.summary)
        if as_json or html is not None:  # else no rounds are kept, which would fill the memory
            described.append(one.to_dict(stall_limit))
        if len(asked) > 1:
            progress.advance(one)
    if not as_json:
        _print(llm.config, one, summaries, stall_limit)
    if described:
        _publish(llm, described, summaries, params, html, as_json)
    _end(llm.config, summaries)


def _check(config: LLMConfig, *, stream: bool, stall_ms: float | None) -> None:
    """Refuse at once what would fail only after the models have been loaded."""
    if not config.drafts:
        raise ConfigError(
            "nothing is drafted, so there is nothing to explain; name a drafter, and leave "
            "--num-draft-tokens above 0"
        )
    if stall_ms is not None and not stall_ms > 0:
        raise ConfigError(f"--stall-ms is {stall_ms:g}; give milliseconds above 0")
    if stall_ms is not None and not stream:
        raise ConfigError("--stall-ms needs the timing of --stream; add --stream")


def _questions(prompt: str | None, prompts: Path | None) -> list["Question"]:
    from blockdraft.diagnose.explain.prompts import Question, read_questions

    if (prompt is None) == (prompts is None):
        raise ConfigError("give either a prompt or --prompts FILE")
    if prompts is not None:
        return read_questions(prompts)
    return [Question(id="1", category=None, text=read_prompt(str(prompt)))]


def _print(
    config: LLMConfig, last: "Explained", summaries: list["Summary"], stall_limit: float | None
) -> None:
    from blockdraft.cli.explain_output import print_many, print_one

    print(_mode_line(config))
    if len(summaries) == 1:
        print_one(last, stall_limit)
    else:
        print_many(summaries)


def _publish(
    llm: "LLM",
    described: list[dict[str, Any]],
    summaries: list["Summary"],
    params: SamplingParams,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print JSON and write the page, as far as they were asked for."""
    from blockdraft.diagnose.explain.page import render_page
    from blockdraft.diagnose.explain.report import make_report

    report = make_report(described, summaries)
    if as_json:
        print_json(_described(llm, params) | report)
    if html is not None:
        write_report(html, render_page(report, " · ".join(headline(llm).splitlines())))


def _end(config: LLMConfig, summaries: list["Summary"]) -> None:
    """Exit with 1 where exactness failed.

    Raises:
        RequestError, AnswerFailed: an answer ended with an error.
    """
    errors = [(one.id, one.error) for one in summaries if one.error is not None]
    for id_, error in errors:
        print(f"prompt {id_}: {error}", file=sys.stderr)
    different = sum(one.differs for one in summaries)
    if different:
        print(f"{different} outputs differ between drafted and plain", file=sys.stderr)
    if different and config.exact:
        raise typer.Exit(NO)
    if errors:
        kind = kind_of_failure(error for _, error in errors)
        raise kind(f"{len(errors)} of {len(summaries)} answers ended with an error")


def _described(llm: "LLM", params: SamplingParams) -> dict[str, Any]:
    return {
        "environment": describe_environment(),
        "config": {**describe_llm(llm), "adaptive": llm.config.adaptive},
        "sampling": asdict(params),
    }


def _mode_line(config: LLMConfig) -> str:
    if config.adaptive:
        return (
            "mode: adaptive, as in generate; without --adaptive, whole blocks of the drafter's "
            "model alone"
        )
    sources = ["the drafter's model"] if config.names_drafter else []
    sources += ["lookup"] if config.lookup else []
    is_limited = (config.num_draft_tokens, config.draft_depth) != (None, None)
    how_much = "as many tokens as the options allow" if is_limited else "whole blocks"
    return f"mode: {how_much} of {' and '.join(sources)} alone; --adaptive shows what generate does"

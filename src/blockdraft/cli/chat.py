"""`blockdraft chat`: a conversation in the terminal."""

import importlib
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.output import describe_completion, print_json, summary_line
from blockdraft.cli.stdin import read_stdin
from blockdraft.core.errors import RequestError
from blockdraft.core.request import SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine.completion import Completion
    from blockdraft.llm import LLM


@options.models(
    without=(
        "max_concurrency",
        "shared_lookup",
    )
)
@options.sampling(
    without=(
        "n",
        "logprobs",
        "prediction",
    )
)
def chat(
    ctx: typer.Context,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per turn, each on its own line.")
    ] = False,
) -> None:
    """Talk with the model. /reset forgets the conversation, /quit ends it."""
    params, config = options.sampling_params(ctx.params), options.llm_config(ctx.params)
    opening = [] if system is None else [{"role": "system", "content": system}]
    shortest = [*opening, {"role": "user", "content": "Hi"}]
    llm = options.load_llm(
        config,
        lambda outline: outline.check(outline.tokenizer.encode_chat(shortest), params),
    )
    _edit_lines()
    print("/reset forgets the conversation, /quit or Ctrl-D ends it", file=sys.stderr)
    messages = list(opening)
    take_turn = _take_json_turn if as_json else _take_turn
    while (line := _read_line("" if as_json else "> ")) is not None:
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(f"unknown command {line}; /reset or /quit", file=sys.stderr)
        elif line:
            messages = take_turn(llm, messages, line, params)


def _edit_lines() -> None:
    """Let a terminal's arrow keys move in the line; else `input` takes their codes for text."""
    if all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)):
        with suppress(ImportError):
            importlib.import_module("readline")  # `input` uses it from then on


def _read_line(sign: str) -> str | None:
    """What the user typed behind `sign`; None at the end."""
    try:
        line = read_stdin(lambda: input(sign)).strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    return None if line == "/quit" else line


def _take_turn(
    llm: "LLM", messages: list[dict[str, str]], line: str, params: SamplingParams
) -> list[dict[str, str]]:
    """Stream an answer; returns the conversation, without this turn if it was not finished."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        asked_ids = _encode(llm, asked)
        for chunk in llm.generate(asked_ids, params, stream=True):
            print(chunk.text, end="", flush=True)
            if chunk.completion is not None:
                print(flush=True)
                print(f"[{summary_line(chunk.completion)}]", file=sys.stderr)
                return _after(llm, messages, asked, asked_ids, chunk.completion)
    except KeyboardInterrupt:
        print(flush=True)
        print("[stopped, this turn is forgotten]", file=sys.stderr)
    except RequestError as error:
        print(f"{error}; /reset starts again", file=sys.stderr)
    return messages


def _take_json_turn(
    llm: "LLM", messages: list[dict[str, str]], line: str, params: SamplingParams
) -> list[dict[str, str]]:
    """As `_take_turn`, for a program: one object for every turn, also for a refused one."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        asked_ids = _encode(llm, asked)
        completion = llm.generate(asked_ids, params).completions[0]
    except RequestError as error:
        print_json({"error": str(error)}, as_line=True)
        return messages
    print_json(describe_completion(completion), as_line=True)
    return _after(llm, messages, asked, asked_ids, completion)


def _encode(llm: "LLM", asked: list[dict[str, str]]) -> list[int]:
    return llm.tokenizer.encode_chat(asked, most=llm.engine.limits.max_tokens)


def _after(
    llm: "LLM",
    messages: list[dict[str, str]],
    asked: list[dict[str, str]],
    asked_ids: list[int],
    completion: "Completion",
) -> list[dict[str, str]]:
    """The conversation with an answer to what was asked; as it was before if that has failed."""
    from blockdraft.text.sent_back import as_sent_back

    if completion.error is not None:
        print(f"[{completion.error}; this turn is forgotten]", file=sys.stderr)
        return messages
    answer = as_sent_back(llm.tokenizer, asked_ids, completion.token_ids, completion.text)
    return [*asked, {"role": "assistant", "content": answer}]

"""`blockdraft generate`: one prompt, one answer."""

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import options
from blockdraft.cli.bench_output import headline
from blockdraft.cli.ledger_output import (
    Ledger,
    Waterfall,
    check_waterfall,
    print_ledgers,
    write_waterfall,
)
from blockdraft.cli.output import (
    check_answered,
    check_writable,
    describe_completion,
    describe_llm,
    print_json,
    summary_line,
    write_report,
)
from blockdraft.cli.stdin import read_prompt
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import NO, ConfigError
from blockdraft.core.request import SamplingParams

if TYPE_CHECKING:
    from blockdraft.bench.compare import Comparison
    from blockdraft.engine.completion import Completion, Generation
    from blockdraft.llm import LLM
    from blockdraft.text.tokenizer import Tokenizer


@options.models(without=("shared_lookup",))
@options.sampling()
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Afterwards decode the first answer again, plain and drafted, and compare.",
        ),
    ] = False,
    smooth: Annotated[
        bool,
        typer.Option("--smooth", help="Print text at an even pace, a quarter of a second late."),
    ] = False,
    receipt: Annotated[
        Path | None,
        typer.Option(help="Write to this file what `blockdraft verify` needs to check the answer."),
    ] = None,
    ledger: Ledger = False,
    waterfall: Waterfall = None,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt. With --compare or --ledger, decode it again, drafted and plain."""
    # The signature declares the options; those of the two configs are read by their names.
    params, config = options.sampling_params(ctx.params), options.llm_config(ctx.params)
    text = read_prompt(prompt)
    _check(ctx.params, config, params)

    def encode(tokenizer: "Tokenizer", most: int | None) -> list[int]:
        if raw:
            return tokenizer.encode(text, most=most)
        messages = [] if system is None else [{"role": "system", "content": system}]
        return tokenizer.encode_chat([*messages, {"role": "user", "content": text}], most=most)

    llm = options.load_llm(
        config,
        lambda outline: outline.check(encode(outline.tokenizer, outline.max_context), params),
    )
    _answer(llm, encode(llm.tokenizer, llm.engine.limits.max_tokens), params, ctx.params)


def _answer(
    llm: "LLM", prompt_ids: list[int], params: SamplingParams, values: Mapping[str, Any]
) -> None:
    """Answer, then measure what the options ask for; exit with 1 where exactness failed.

    What there is gets printed, whatever else fails.

    Raises:
        RequestError, AnswerFailed: a sample ended with an error.
        DiskError: a file cannot be written.
    """
    if values["compare"] and llm.drafter_folder is None and not llm.config.lookup:
        raise ConfigError("--compare needs a drafter, and none is known; name one with --drafter")
    # What is measured is the request that was answered.
    params = params if params.seed is not None else replace(params, seed=secrets.randbits(64))
    found: dict[str, Any] = {}
    if values["as_json"]:
        generation = llm.generate(prompt_ids, params)
        found = _describe(llm, generation)
    else:
        show = _print_smoothly if values["smooth"] else _print_text
        try:
            generation = show(llm, prompt_ids, params)
        except KeyboardInterrupt:
            print(flush=True)  # the line on which the text broke off
            raise
    try:
        check_answered(generation)
        if values["receipt"] is not None:
            _write_receipts(llm, generation, values["receipt"])
        if values["compare"]:
            found["compare"] = _compare(llm, prompt_ids, params, is_silent=values["as_json"])
        if values["ledger"]:
            # The last: from here on no prompt is reused.
            found["ledger"] = _account(llm, prompt_ids, params, values)
    finally:
        if values["as_json"]:
            print_json(found)
    measured = [found[name] for name in ("compare", "ledger") if name in found]
    if llm.config.exact and not all(one["identical"] for one in measured):
        raise typer.Exit(NO)


def _check(values: Mapping[str, Any], config: LLMConfig, params: SamplingParams) -> None:
    """Refuse options that do not go together."""
    check_waterfall(values["waterfall"], with_ledger=values["ledger"])
    check_writable(values["receipt"])
    if values["raw"] and values["system"] is not None:
        raise ConfigError("--system needs the chat template; leave out --system or --raw")
    if values["compare"] and not config.drafts:
        raise ConfigError("--compare needs a drafter and --num-draft-tokens above 0")
    if params.logprobs is not None and not values["as_json"]:
        raise ConfigError("--logprobs is shown only with --json; add --json")
    if values["smooth"] and (values["as_json"] or params.n != 1):
        raise ConfigError("--smooth needs one sample that streams as text; leave it out")


def _describe(llm: "LLM", generation: "Generation") -> dict[str, Any]:
    samples = [describe_completion(completion) for completion in generation.completions]
    return {
        **samples[0],
        "prompt_token_ids": list(generation.prompt_token_ids),
        "completions": samples,
        "config": describe_llm(llm),
    }


def _account(
    llm: "LLM", prompt_ids: list[int], params: SamplingParams, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the time goes when the answer is decoded once more, on stderr if not as JSON."""
    from blockdraft.bench.config import WARM_UP_TOKENS
    from blockdraft.bench.ledger.accounts import decode_accounted, describe_accounts

    run = decode_accounted(llm, prompt_ids, params)
    if not values["as_json"]:
        # Drafting has learned from the answer what pays, and no prompt is reused.
        print(
            f"warmed up with {WARM_UP_TOKENS} tokens, then decoded again: time and tau may differ "
            "from the answer above",
            file=sys.stderr,
        )
        print_ledgers(run.accounts, sys.stderr)
    write_waterfall(values["waterfall"], run.accounts, headline(llm))
    return describe_accounts(run.accounts) | {"identical": run.identical}


def _write_receipts(llm: "LLM", generation: "Generation", path: Path) -> None:
    """One object, or a list of them for several samples."""
    receipts = [receipt.to_json() for receipt in llm.receipts(generation)]
    found = receipts if len(receipts) > 1 else receipts[0]
    write_report(path, json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def _print_text(llm: "LLM", prompt_ids: list[int], params: SamplingParams) -> "Generation":
    """Stream a single sample; several, one after another when finished. Summaries on stderr."""
    completions = []
    for chunk in llm.generate(prompt_ids, params, stream=True):
        if params.n == 1:
            print(chunk.text, end="", flush=True)
        if chunk.completion is not None:
            print("" if params.n == 1 else chunk.completion.text, flush=True)
            print(_summary(chunk.completion, params), file=sys.stderr)
            completions.append(chunk.completion)
    return _generation(prompt_ids, params, completions)


def _print_smoothly(llm: "LLM", prompt_ids: list[int], params: SamplingParams) -> "Generation":
    """As `_print_text`, for one sample; text leaves at the rate at which it comes."""
    from blockdraft.cli.smooth import SmoothWriter

    with SmoothWriter(lambda text: print(text, end="", flush=True)) as writer:
        for chunk in llm.generate(prompt_ids, params, stream=True):
            writer.push(chunk.text, len(chunk.token_ids))
    print(flush=True)
    assert chunk.completion is not None
    print(_summary(chunk.completion, params), file=sys.stderr)
    return _generation(prompt_ids, params, [chunk.completion])


def _generation(
    prompt_ids: list[int], params: SamplingParams, completions: list["Completion"]
) -> "Generation":
    """What was streamed, in the order of the samples."""
    from blockdraft.engine.completion import Generation

    in_order = sorted(completions, key=lambda completion: completion.index)
    return Generation(tuple(prompt_ids), tuple(in_order), params)


def _summary(completion: "Completion", params: SamplingParams) -> str:
    line = summary_line(completion)
    if params.is_sampled:
        line += f", seed {completion.seed}"
    return f"[sample {completion.index}: {line}]" if params.n > 1 else f"[{line}]"


def _compare(
    llm: "LLM", prompt_ids: list[int], params: SamplingParams, *, is_silent: bool
) -> dict[str, Any]:
    """The first sample, plain and drafted: how fast each is, on stderr if not silent."""
    from blockdraft.bench.compare import compare
    from blockdraft.bench.config import WARM_UP_TOKENS

    result = compare(llm, prompt_ids, replace(params, n=1))
    plain, drafted = result.plain, result.drafted
    if not is_silent:
        print(f"warmed up with {WARM_UP_TOKENS} tokens each, then timed:", file=sys.stderr)
        print(f"plain    {summary_line(plain)}", file=sys.stderr)
        print(f"drafted  {summary_line(drafted)}", file=sys.stderr)
        same = "identical" if result.identical else "DIFFERENT"
        print(f"speed-up {_speedup_words(result)}, {same} tokens", file=sys.stderr)
    return {
        "plain": describe_completion(plain),
        "drafted": describe_completion(drafted),
        "speedup": 0.0 if result.speedup is None else result.speedup.value,
        "total_speedup": 0.0 if result.total_speedup is None else result.total_speedup.value,
        "acceptance_length": drafted.acceptance.acceptance_length,
        "identical": result.identical,
        "warm_up": f"both ways, up to {WARM_UP_TOKENS} tokens each, before timing",
    }


def _speedup_words(result: "Comparison") -> str:
    """Both: prefill, which drafting does not speed up, may be most of the time."""
    if result.speedup is None:
        return "none: a single token"
    decoding = f"{result.speedup.value:.2f} times plain after the first token"
    if result.total_speedup is None:
        return decoding
    return f"{decoding}, {result.total_speedup.value:.2f} times with prefill (one prompt)"

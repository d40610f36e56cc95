"""`blockdraft generate`: one prompt, one answer."""

import sys
from collections.abc import Mapping
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
    DIFFERS,
    describe_completion,
    describe_llm,
    print_json,
    summary_line,
)
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError, RequestError
from blockdraft.core.request import SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine.completion import Completion, Generation
    from blockdraft.llm import LLM

_CONFIG = LLMConfig()
_PARAMS = SamplingParams()


def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: options.Target = _CONFIG.target,
    drafter: options.Drafter = str(_CONFIG.drafter),
    max_tokens: options.MaxTokens = _PARAMS.max_tokens,
    min_tokens: options.MinTokens = _PARAMS.min_tokens,
    temperature: options.Temperature = _PARAMS.temperature,
    top_p: options.TopP = _PARAMS.top_p,
    top_k: options.TopK = _PARAMS.top_k,
    min_p: options.MinP = _PARAMS.min_p,
    repetition_penalty: options.RepetitionPenalty = _PARAMS.repetition_penalty,
    presence_penalty: options.PresencePenalty = _PARAMS.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = _PARAMS.frequency_penalty,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = _PARAMS.seed,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = _PARAMS.ignore_eos,
    n: Annotated[int, typer.Option("--n", help="Number of samples.")] = _PARAMS.n,
    logprobs: options.Logprobs = _PARAMS.logprobs,
    json_schema: options.JsonSchemaFile = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    grammar: options.GrammarFile = None,
    speculative: options.Speculative = options.SPECULATIVE,
    dtype: options.Dtype = _CONFIG.dtype,
    device: options.Device = _CONFIG.device,
    exact: options.Exact = options.EXACT,
    num_threads: options.NumThreads = _CONFIG.num_threads,
    tree_nodes: options.TreeNodes = _CONFIG.tree_nodes,
    max_concurrency: options.MaxConcurrency = _CONFIG.max_concurrency,
    memory: options.Memory = _CONFIG.memory,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Time plain and drafted decoding side by side.")
    ] = False,
    show_draft: Annotated[
        bool, typer.Option("--show-draft", help="Mark what was drafted; prints when finished.")
    ] = False,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Let text flow evenly, a quarter of a second late.")
    ] = False,
    ledger: Ledger = False,
    waterfall: Waterfall = None,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt. With --ledger it is decoded plainly too, to compare."""
    # The signature declares the options; those of the two configs are read by their names.
    params, config = options.sampling_params(ctx.params), options.llm_config(ctx.params)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("the prompt is empty; give some text")
    _check(ctx.params, config, params)
    llm = options.load_llm(config)
    _answer(llm, _encode(llm, text, system, raw), params, text, ctx.params)


def _answer(
    llm: "LLM",
    prompt_ids: list[int],
    params: SamplingParams,
    text: str,
    values: Mapping[str, Any],
) -> None:
    """Answer in the way that the options ask for."""
    as_json = values["as_json"]
    if values["ledger"]:
        _print_ledger(llm, prompt_ids, params, values["waterfall"], as_json)
    elif values["compare"]:
        _compare(llm, prompt_ids, params, as_json)
    elif as_json:
        _print_json(llm, prompt_ids, params)
    elif values["show_draft"]:
        _print_drafts(llm, prompt_ids, params, text, values["raw"])
    elif values["smooth"]:
        _print_smoothly(llm, prompt_ids, params)
    else:
        _print_text(llm, prompt_ids, params)


def _check(values: Mapping[str, Any], config: LLMConfig, params: SamplingParams) -> None:
    """Refuse options that do not go together."""
    drafts = config.drafts and params.max_draft_tokens != 0
    check_waterfall(values["waterfall"], with_ledger=values["ledger"])
    others = [name for name in ("compare", "as_json", "show_draft", "ledger") if values[name]]
    if values["raw"] and values["system"] is not None:
        raise ConfigError("--system needs the chat template; leave out --system or --raw")
    if values["compare"] and not drafts:
        raise ConfigError("--compare needs a drafter and --speculative on or a number")
    if values["compare"] and params.n != 1:
        raise ConfigError(f"--compare takes one sample, and --n is {params.n}; leave it out")
    if values["ledger"] and values["compare"]:
        raise ConfigError("--ledger compares with plain decoding already; leave out --compare")
    if values["show_draft"] and not drafts:
        raise ConfigError("--show-draft needs a drafter and --speculative on or a number")
    if values["show_draft"] and len(others) > 1:
        raise ConfigError(
            "--show-draft prints text, alone; for JSON there is `blockdraft explain --json`"
        )
    if values["smooth"] and (others or params.n != 1):
        raise ConfigError("--smooth needs one sample that streams as text; leave the others out")


def _encode(llm: "LLM", text: str, system: str | None, raw: bool) -> list[int]:
    if raw:
        return llm.tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def _print_json(llm: "LLM", prompt_ids: list[int], params: SamplingParams) -> None:
    print_json(_describe(llm, llm.generate(prompt_ids, params)))


def _describe(llm: "LLM", generation: "Generation") -> dict[str, Any]:
    samples = [describe_completion(completion) for completion in generation.completions]
    return {
        **samples[0],
        "prompt_token_ids": list(generation.prompt_token_ids),
        "completions": samples,
        "config": describe_llm(llm),
    }


def _print_ledger(
    llm: "LLM",
    prompt_ids: list[int],
    params: SamplingParams,
    waterfall: Path | None,
    as_json: bool,
) -> None:
    """Print the answers when finished. Summaries and ledger on stderr, if not as JSON."""
    from blockdraft.bench.ledger import decode_accounted, describe_accounts

    run = decode_accounted(llm, prompt_ids, params)
    write_waterfall(waterfall, run.accounts, headline(llm))
    if as_json:
        ledger = describe_accounts(run.accounts) | {"identical": run.identical}
        print_json(_describe(llm, run.generation) | {"ledger": ledger})
    else:
        for completion in run.generation.completions:
            print(completion.text, flush=True)
            print(_summary(completion, params), file=sys.stderr)
        print_ledgers(run.accounts, sys.stderr)
    if llm.config.exact and not run.identical:
        raise typer.Exit(DIFFERS)


def _print_text(llm: "LLM", prompt_ids: list[int], params: SamplingParams) -> None:
    """Stream a single sample; several, one after another when finished. Summaries on stderr."""
    for chunk in llm.generate(prompt_ids, params, stream=True):
        if params.n == 1:
            print(chunk.text, end="", flush=True)
        if chunk.completion is not None:
            print("" if params.n == 1 else chunk.completion.text, flush=True)
            print(_summary(chunk.completion, params), file=sys.stderr)


def _print_smoothly(llm: "LLM", prompt_ids: list[int], params: SamplingParams) -> None:
    """As `_print_text`, for one sample; text leaves at the rate at which it comes."""
    from blockdraft.cli.smooth import SmoothWriter

    with SmoothWriter(lambda text: print(text, end="", flush=True)) as writer:
        for chunk in llm.generate(prompt_ids, params, stream=True):
            writer.push(chunk.text, len(chunk.token_ids))
    print(flush=True)
    assert chunk.completion is not None
    print(_summary(chunk.completion, params), file=sys.stderr)


def _print_drafts(
    llm: "LLM", prompt_ids: list[int], params: SamplingParams, text: str, raw: bool
) -> None:
    """Print each sample when it is finished, what was drafted marked. Summaries on stderr."""
    from blockdraft.cli.explain_output import print_drafts
    from blockdraft.proof.explain.run import check_explains, explain

    check_explains(llm)
    for explanation in explain(llm, prompt_ids, params, prompt=text, before=text if raw else ""):
        print_drafts(explanation)
        print(_summary(explanation.completion, params), file=sys.stderr)


def _summary(completion: "Completion", params: SamplingParams) -> str:
    line = summary_line(completion)
    if params.temperature > 0:
        line += f", seed {completion.seed}"
    return f"[sample {completion.index}: {line}]" if params.n > 1 else f"[{line}]"


def _compare(llm: "LLM", prompt_ids: list[int], params: SamplingParams, as_json: bool) -> None:
    from blockdraft.bench.compare import compare
    from blockdraft.bench.config import WARM_UP_TOKENS

    if llm.drafter_folder is None:
        raise ConfigError("--compare needs a drafter, and none is known; name one with --drafter")
    result = compare(llm, prompt_ids, params)
    plain, drafted = result.plain, result.drafted
    if as_json:
        print_json(
            {
                "plain": describe_completion(plain),
                "drafted": describe_completion(drafted),
                "speedup": result.speedup,
                "acceptance_length": drafted.acceptance.acceptance_length,
                "identical": result.identical,
                "warm_up": f"both ways, up to {WARM_UP_TOKENS} tokens each, before timing",
                "config": describe_llm(llm),
            }
        )
    else:
        print(drafted.text)
        print(f"warmed up with {WARM_UP_TOKENS} tokens each way, then timed:", file=sys.stderr)
        print(f"plain    {summary_line(plain)}", file=sys.stderr)
        print(f"drafted  {summary_line(drafted)}", file=sys.stderr)
        same = "identical" if result.identical else "DIFFERENT"
        print(f"speed-up {result.speedup:.2f}x, {same} tokens", file=sys.stderr)
    if llm.config.exact and not result.identical:
        raise typer.Exit(DIFFERS)

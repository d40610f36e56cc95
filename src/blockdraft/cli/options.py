"""Options that several commands share, and how their values are read.

Defaults are those of LLMConfig and SamplingParams.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from blockdraft.cli.fields import Fields
from blockdraft.cli.imports import quick_imports
from blockdraft.cli.logs import LOG, is_about_logging
from blockdraft.core.config import (
    MOST_DRAFT_TOKENS,
    DeviceMap,
    DraftDtype,
    KVCacheDtype,
    LLMConfig,
    Quantize,
)
from blockdraft.core.errors import ConfigError, why_unread
from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams
from blockdraft.hub.resolve import resolve_drafter, resolve_model

if TYPE_CHECKING:
    from blockdraft.llm import LLM
    from blockdraft.text.outline import Outline

Switch = Literal["on", "off"]
EXACT: Switch = "on" if LLMConfig().exact else "off"

Target = Annotated[
    str,
    typer.Option(
        help="Target model: a name that `blockdraft models` lists, a folder, a GGUF file, or a "
        "Hugging Face id, ORG/NAME or ORG/NAME@REVISION."
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        help="Drafter: auto (the one known for the target), none, or a name, folder or id "
        "as for --target."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Precision of the target: bfloat16, float32, float64, or auto (bfloat16 where the CPU "
        "or GPU multiplies it in hardware, else float32)."
    ),
]
DraftDtypeOption = Annotated[
    DraftDtype,
    typer.Option(
        "--draft-dtype",
        metavar="TYPE",
        help="Precision of the drafter's weights: int8, target (the target's precision), or auto "
        "(whichever drafts faster).",
    ),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option(
        "--quantize",
        help="Round the weights of the target's linear layers to int8 or int4: less memory, faster "
        "steps, different output. Drafted output equals plain output of the rounded target.",
        show_default="as they are",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (a GPU if CUDA finds one, else the CPU), cpu, or another device as torch names "
        "it, such as cuda:1."
    ),
]
DeviceMapOption = Annotated[
    DeviceMap | None,
    typer.Option(
        "--device-map",
        metavar="WAY",
        help="Spread the target's layers over all devices, by one of transformers' strategies: "
        f"{', '.join(get_args(DeviceMap))}. The drafter is on the first device.",
        show_default="all on --device",
    ),
]
KVCacheDtypeOption = Annotated[
    KVCacheDtype,
    typer.Option(
        "--kv-cache-dtype",
        help="Precision of the target's KV cache: auto (the target's precision), or int8: about "
        "half the memory of bfloat16, different output, and slower if no kernel reads it.",
    ),
]
Exact = Annotated[
    Switch,
    typer.Option(
        help="on: drafted output equals plain output, bit for bit; models that cannot ensure this "
        "are refused. off: they run, and drafting may change the output."
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of draft tokens that the target verifies in a step, for each "
        f"sequence, up to {MOST_DRAFT_TOKENS}; 0: plain decoding.",
        show_default="as many as save time, up to 15 or a whole block",
    ),
]
DraftDepth = Annotated[
    int | None,
    typer.Option(
        help="Maximum length of a drafted path. If --num-draft-tokens is larger, the rest are "
        "alternatives: a tree.",
        show_default="as long as the drafter can",
    ),
]
Lookup = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="Also draft by prompt lookup: what followed the same words earlier in prompt and "
        "output.",
        show_default="with a drafter",
    ),
]
NGrams = Annotated[
    bool,
    typer.Option(
        "--ngrams/--no-ngrams",
        help="Also draft from n-grams: the drafter's table and Hydra head, if it has them, and the "
        "text itself.",
    ),
]
SharedLookup = Annotated[
    int,
    typer.Option(
        metavar="TOKENS",
        help="With lookup, also search the last outputs of all requests, up to this many tokens.",
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Number of CPU threads.",
        show_default="one for each core that is idle at startup",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the code that comes with a model that transformers does not know.",
    ),
]
Recheck = Annotated[
    bool,
    typer.Option(
        "--recheck",
        help="Test exactness and time the steps again, instead of using the stored results of an "
        "earlier start.",
    ),
]
MaxConcurrency = Annotated[
    int, typer.Option(help="Maximum number of sequences decoded concurrently.")
]
Memory = Annotated[
    float | None,
    typer.Option(
        help="GiB of memory for the KV cache.",
        show_default="enough for all sequences at full length, at most a quarter of the memory",
    ),
]

MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
MinTokens = Annotated[int, typer.Option(help="Minimum number of tokens to generate.")]
Temperature = Annotated[
    float,
    typer.Option(help="0: the most likely token (greedy); higher values sample more randomly."),
]
TopP = Annotated[
    float,
    typer.Option(help="Choose among the fewest tokens whose probabilities reach this sum; 1: all."),
]
TopK = Annotated[int, typer.Option(help="Choose among this many most likely tokens; 0: all.")]
MinP = Annotated[
    float,
    typer.Option(
        help="Leave out tokens less likely than this share of the most likely one; 0: none."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.", show_default="random")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted from the logit of every token already generated.")
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="Subtracted from a token's logit once for each time it was generated."),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN=BIAS", help="Added to the logit of a token id. Repeatable."),
]
ThinkingTokenBudget = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of thinking tokens, for models that think between tags such as "
        "<think> and </think>."
    ),
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="End with this token. Repeatable.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past the model's end-of-sequence token.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="With --json: the log-probability of each token, and of this many most likely ones."
    ),
]
JsonSchemaFile = Annotated[
    Path | None,
    typer.Option("--json-schema", help="Answer with JSON that the schema in this file accepts."),
]
Regex = Annotated[
    str | None, typer.Option(help="Answer with text that matches this regular expression.")
]
Choice = Annotated[
    list[str] | None,
    typer.Option(help="Answer with exactly this text. Repeatable: with one of these texts."),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option("--grammar", help="Answer with text that the Lark grammar in this file accepts."),
]
Prediction = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE",
        help="The expected answer, or a similar text, to draft from. It changes only the speed.",
    ),
]
N = Annotated[int, typer.Option("--n", help="Number of answers to sample.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


_CONFIG, _PARAMS = LLMConfig(), SamplingParams()

DRAFTED = ("num_draft_tokens", "draft_depth")
"""How much is drafted; of LLMConfig, and so no option of a request."""
FIXED = ("max_concurrency", *DRAFTED, "recheck", "shared_lookup")
"""Fields of LLMConfig that commands which measure or examine set themselves."""

models = Fields(
    "Models and machine",
    {
        "target": Target,
        "drafter": Drafter,
        "dtype": Dtype,
        "draft_dtype": DraftDtypeOption,
        "quantize": QuantizeOption,
        "device": Device,
        "device_map": DeviceMapOption,
        "exact": Exact,
        "num_threads": NumThreads,
        "kv_cache_dtype": KVCacheDtypeOption,
        "memory": Memory,
        "max_concurrency": MaxConcurrency,
        "num_draft_tokens": NumDraftTokens,
        "draft_depth": DraftDepth,
        "lookup": Lookup,
        "ngrams": NGrams,
        "shared_lookup": SharedLookup,
        "recheck": Recheck,
        "trust_remote_code": TrustRemoteCode,
    },
    {f.name: getattr(_CONFIG, f.name) for f in fields(LLMConfig)}
    | {"drafter": str(_CONFIG.drafter), "exact": EXACT},
)
"""Of LLMConfig."""

sampling = Fields(
    "What is generated",
    {
        "max_tokens": MaxTokens,
        "min_tokens": MinTokens,
        "thinking_token_budget": ThinkingTokenBudget,
        "temperature": Temperature,
        "top_p": TopP,
        "top_k": TopK,
        "min_p": MinP,
        "repetition_penalty": RepetitionPenalty,
        "presence_penalty": PresencePenalty,
        "frequency_penalty": FrequencyPenalty,
        "logit_bias": LogitBias,
        "seed": Seed,
        "n": N,
        "logprobs": Logprobs,
        "stop": Stop,
        "stop_token_ids": StopTokenIds,
        "ignore_eos": IgnoreEos,
        "json_schema": JsonSchemaFile,
        "regex": Regex,
        "choice": Choice,
        "grammar": GrammarFile,
        "prediction": Prediction,
    },
    {f.name: getattr(_PARAMS, f.name) for f in fields(SamplingParams)}
    | dict.fromkeys(("logit_bias", "stop", "stop_token_ids"))  # repeatable: none are given
    | dict.fromkeys(("json_schema", "regex", "choice", "grammar", "prediction")),
)
"""Of SamplingParams; a grammar is given in one of several forms."""


def parse_logit_bias(items: Sequence[str]) -> dict[int, float]:
    """Read TOKEN=BIAS pairs.

    Raises:
        ConfigError: one is none, or names a token again.
    """
    biases: dict[int, float] = {}
    for item in items:
        token, _, bias = item.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError as error:
            raise ConfigError(
                f"--logit-bias is {item!r}; give a token id and a number, such as 42=-1.5"
            ) from error
        if token_id in biases:
            raise ConfigError(f"--logit-bias names token {token_id} twice; leave one out")
        biases[token_id] = value
    return biases


def parse_grammar(values: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a command's values ask for.

    Raises:
        ConfigError: they ask for two, or a file cannot be read.
        RequestError: it is malformed.
    """
    names = ("json_schema", "regex", "choice", "grammar")
    given = [name for name in names if values.get(name) not in (None, (), [])]
    if not given:
        return None
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise ConfigError(f"{first} and {second} each give a grammar; leave one out")
    name, value = given[0], values[given[0]]
    if name == "json_schema":
        return Grammar.json_schema(_read("--json-schema", value))
    if name == "grammar":
        return Grammar.lark(_read("--grammar", value))
    return Grammar.regex(value) if name == "regex" else Grammar.choice(value)


def parse_prediction(given: str | None) -> str:
    """The text of `--prediction`, or that of the file that it names.

    Raises:
        ConfigError: the file cannot be read.
    """
    if given is None:
        return ""
    return _read("--prediction", Path(given[1:])) if given.startswith("@") else given


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = why_unread(error)
        raise ConfigError(f"cannot read {option} {path} ({reason}); give a text file") from error


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Read a command's values; options are named as the fields of SamplingParams.

    Raises:
        ConfigError, RequestError: a value is not usable.
    """
    names = {f.name for f in fields(SamplingParams)} - set(DRAFTED)
    chosen = {name: values[name] for name in names if name in values}
    for name in ("stop", "stop_token_ids"):
        chosen[name] = tuple(chosen.get(name) or ())
    chosen["logit_bias"] = parse_logit_bias(chosen.get("logit_bias") or ())
    chosen["prediction"] = parse_prediction(values.get("prediction"))
    chosen["grammar"] = parse_grammar(values)
    return SamplingParams(**chosen)


def llm_config(values: Mapping[str, Any]) -> LLMConfig:
    """Read a command's values; options are named as the fields of LLMConfig.

    Raises:
        ConfigError: a value is not usable.
    """
    chosen = {f.name: values[f.name] for f in fields(LLMConfig) if f.name in values}
    chosen.setdefault("recheck", True)  # commands that measure or prove rely on nothing older
    return LLMConfig(**chosen | {"exact": values["exact"] == "on"})


def is_given(ctx: typer.Context, name: str) -> bool:
    """True if the option whose value has this name stands on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_others(ctx: typer.Context, beside: Collection[str], why: str) -> None:
    """Refuse any option on the command line but those named in `beside`, and -v and -q.

    Raises:
        ConfigError: says `why`, and which one.
    """
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if is_given(ctx, name) and name not in beside and not is_about_logging(name):
            raise ConfigError(f"{why}; leave out {parameter.opts[0]}")


def load_llm(config: LLMConfig, check: Callable[["Outline"], object] | None = None) -> "LLM":
    """Load what the options ask for; `check` may refuse the request before weights are read."""
    LOG.info("loading %s", config.target)
    # A wrong name is refused before the libraries are imported, which takes seconds.
    resolve_drafter(config, resolve_model(config.target))
    with quick_imports():
        from blockdraft.llm import LLM
    return LLM.of(config, check)

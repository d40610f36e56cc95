"""Options that several commands share, and how their values are read.

Defaults are those of LLMConfig and SamplingParams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams

if TYPE_CHECKING:
    from blockdraft.llm import LLM

Switch = Literal["on", "off"]
EXACT: Switch = "on" if LLMConfig().exact else "off"

Target = Annotated[str, typer.Option(help="Target: a catalog name, a folder or a hub id.")]
Drafter = Annotated[
    str, typer.Option(help="Drafter: auto, none, a catalog name, a folder or a hub id.")
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float32 or float64.")]
Device = Annotated[
    str, typer.Option(help="auto (a GPU that CUDA can use, else cpu), cpu or a torch device.")
]
Exact = Annotated[Switch, typer.Option(help="Drafted output equals plain output, bit for bit.")]
TreeNodes = Annotated[
    int | None,
    typer.Option(
        help="Draft trees of so many tokens a step, whatever pays.",
        show_default="chains as long as pays",
    ),
]
Lookup = Annotated[
    bool,
    typer.Option(
        "--lookup/--no-lookup",
        help="Also draft what followed the same words earlier in prompt and output.",
    ),
]
SharedLookup = Annotated[
    int,
    typer.Option(
        metavar="TOKENS",
        help="Look up in so many tokens of the last outputs of all requests too; 0: none.",
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="Threads of torch.", show_default="torch's own, at most one a free core"
    ),
]
MaxConcurrency = Annotated[int, typer.Option(help="Most sequences that advance together.")]
Memory = Annotated[
    float | None,
    typer.Option(
        help="GiB for keys and values.",
        show_default="what all can fill, at most a quarter of the machine's",
    ),
]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
MinTokens = Annotated[int, typer.Option(help="Least tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Fewest tokens whose probability reaches this; 1: all.")]
TopK = Annotated[int, typer.Option(help="Most likely tokens only; 0: all.")]
MinP = Annotated[float, typer.Option(help="Least probability relative to the most likely token.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.", show_default="drawn")]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        help="Most candidates verified a step, the anchor not counted; 0 decodes plainly.",
        show_default="as many as pay",
    ),
]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: seen tokens become rarer.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtracted once for a generated token.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted for each occurrence.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN=BIAS", help="Added to the logit of a token id. Repeatable."),
]
Stop = Annotated[list[str] | None, typer.Option(help="Text to end before. Repeatable.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="Token to end with. Repeatable.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end.")]
Logprobs = Annotated[
    int | None, typer.Option(help="Log-probability of each token and of that many likely ones.")
]
JsonSchemaFile = Annotated[
    Path | None, typer.Option("--json-schema", help="Answer with JSON that this schema accepts.")
]
Regex = Annotated[str | None, typer.Option(help="Answer with text that matches this pattern.")]
Choice = Annotated[list[str] | None, typer.Option(help="Answer with this text. Repeatable.")]
GrammarFile = Annotated[
    Path | None, typer.Option("--grammar", help="Answer with text of this Lark grammar.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {option} {path} ({error}); give a text file") from error


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Read a command's values; options are named as the fields of SamplingParams.

    Raises:
        ConfigError, RequestError: a value is not usable.
    """
    chosen = {f.name: values[f.name] for f in fields(SamplingParams) if f.name in values}
    for name in ("stop", "stop_token_ids"):
        chosen[name] = tuple(chosen.get(name) or ())
    chosen["logit_bias"] = parse_logit_bias(chosen.get("logit_bias") or ())
    num_draft_tokens = values.get("num_draft_tokens")
    if num_draft_tokens is not None:
        if num_draft_tokens < 0:
            raise ConfigError(f"--num-draft-tokens is {num_draft_tokens}; give 0 or more")
        chosen["speculative"] = num_draft_tokens
    chosen["grammar"] = parse_grammar(values)
    return SamplingParams(**chosen)


def llm_config(values: Mapping[str, Any]) -> LLMConfig:
    """Read a command's values; options are named as the fields of LLMConfig.

    Raises:
        ConfigError: a value is not usable.
    """
    chosen = {f.name: values[f.name] for f in fields(LLMConfig) if f.name in values}
    if chosen.get("tree_nodes") is not None:  # their size is fixed
        chosen.setdefault("adaptive", False)
    return LLMConfig(**chosen | {"exact": values["exact"] == "on"})


def load_llm(config: LLMConfig) -> "LLM":
    """Load what the options ask for."""
    from blockdraft.llm import LLM  # takes seconds: not for --help, nor for a mistyped option

    return LLM(**{f.name: getattr(config, f.name) for f in fields(LLMConfig)})

"""A receipt: all that is needed to check, token by token, that an answer is the target's.

Plain values for JSON. What does not change which tokens are chosen, such as drafts and logprobs, is
not in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from blockdraft.core.errors import ConfigError, RequestError, why_unread
from blockdraft.core.files import read_json
from blockdraft.core.grammar import Grammar
from blockdraft.core.request import MAX_SAMPLES, MAX_SEED, FinishReason, SamplingParams

KIND = "blockdraft receipt"
FORMAT = 1

Environment = Mapping[str, Any]
"""What the bits of the target's logits depend on, by name; see measure/identity.py."""

_PARAMS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "ignore_eos", "grammar", "thinking_token_budget"),
)
"""Fields of SamplingParams that decide which tokens are chosen; the seed stands beside them."""
_FIELDS = {
    *("kind", "format", "target", "environment", "prompt_token_ids", "prompt", "messages"),
    *("params", "seed", "index", "shown_token_ids", "token_ids", "text"),
    *("finish_reason", "stop_string"),
}
_REMEDY = "give a file that `blockdraft generate --receipt FILE` wrote, or a server's answer"


class Encoder(Protocol):
    """Makes token ids of prompts that are given as text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One sample: what was asked, what was answered, and where.

    `params` without a seed, which stands beside them, and with one sample. `shown_token_ids` are
    special tokens that have text in it, as a server may show them. `text`, `finish_reason` and
    `stop_string` are None where they are not known. `environment` is empty if nobody knows it.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    token_ids: tuple[int, ...]
    index: int = 0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    shown_token_ids: tuple[int, ...] = ()
    target: str = ""
    environment: Environment = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON.

        The seed is text: it may have 64 bits, of which many programs that read JSON keep 53.
        """
        return {
            "kind": KIND,
            "format": FORMAT,
            "target": self.target,
            "environment": dict(self.environment),
            "prompt_token_ids": list(self.prompt_token_ids),
            "params": _params_to_json(self.params),
            "seed": str(self.seed),
            "index": self.index,
            "shown_token_ids": list(self.shown_token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_string": self.stop_string,
        }


def counting(params: SamplingParams) -> SamplingParams:
    """Of parameters those that decide which tokens are chosen."""
    return SamplingParams(**{name: getattr(params, name) for name in _PARAMS})


def read_answers(path: Path) -> list[Mapping[str, Any]]:
    """The receipts of a file, as JSON has them: one, a list, or those in a server's answer.

    Raises:
        ConfigError: it cannot be read, or holds none, or an answer in it lacks its receipt.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {why_unread(error)}; {_REMEDY}") from error
    answers = list(_receipts_in(found))
    if not answers:
        raise ConfigError(f"{path} holds no receipt; {_REMEDY}")
    if lacking := _without_receipt(found):
        raise ConfigError(
            f"{path}: {lacking[0]} has no receipt, so nothing can be said of it; take it out, or "
            "ask for receipts of all answers"
        )
    return answers


def _without_receipt(found: object) -> list[str]:
    """Names of the answers of a file, or choices of an answer, that lack a receipt.

    A list may be the chunks of a stream: of these the last one of each choice has it.
    """
    has_receipt: dict[tuple[str, object], bool] = {}
    for position, answer in enumerate(found if isinstance(found, list) else [found], 1):
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list):
            has_receipt[f"answer {position}", None] = bool(_receipts_in(answer))
            continue
        own: dict[tuple[str, object], bool] = {}
        for place, choice in enumerate(choices):
            is_named = isinstance(choice, dict) and isinstance(choice.get("index"), int)
            name = f"answer {answer.get('id', position)}", choice["index"] if is_named else place
            # Two choices of one answer that share an index are no chunks: each needs its own.
            own[name] = own.get(name, True) and bool(_receipts_in(choice))
        for name, has_it in own.items():
            has_receipt[name] = has_receipt.get(name, False) or has_it
    return [
        answer if choice is None else f"choice {choice} of {answer}"
        for (answer, choice), has_it in has_receipt.items()
        if not has_it
    ]


def _receipts_in(value: object) -> list[Mapping[str, Any]]:
    if isinstance(value, list):
        return [receipt for item in value for receipt in _receipts_in(item)]
    if not isinstance(value, dict):
        return []
    if "choices" in value:
        return _receipts_in(value["choices"])
    if "receipt" in value:
        return _receipts_in(value["receipt"])
    return [value] if value.get("kind") == KIND or "token_ids" in value else []


def read_receipt(value: Mapping[str, Any], encoder: Encoder) -> Receipt:
    """A receipt of plain values. The prompt may be given as `prompt` or `messages` too.

    What says only where the answer was made, and how it ended, may be missing.

    Raises:
        RequestError: a field is missing, malformed or unknown, or a parameter is out of its range.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"the receipt is {value!r:.60}; {_REMEDY}")
    if unknown := [name for name in value if name not in _FIELDS]:
        raise RequestError(f"the receipt has the unknown field {unknown[0]!r:.60}; {_REMEDY}")
    if value.get("kind", KIND) != KIND or value.get("format", FORMAT) != FORMAT:
        raise RequestError(
            f"the receipt is {value.get('kind')!r} of format {value.get('format')!r}, and this "
            f"version reads {KIND!r} of format {FORMAT}; verify it with the version that wrote it"
        )
    environment = _take(value, "environment", dict, {})
    if odd := [name for name in environment if not str(name).isidentifier()]:
        raise RequestError(f"the receipt's environment has the field {odd[0]!r:.60}; {_REMEDY}")
    finish_reason = _take(value, "finish_reason", str | None, None)
    if finish_reason not in (None, "stop", "length"):
        raise RequestError(f"finish_reason is {finish_reason!r}; give stop or length")
    params = _params_of(_take(value, "params", dict, {}))
    if params.is_sampled and "seed" not in value:
        raise RequestError(
            f"the receipt's temperature is {params.temperature:g}, but it has no seed; give the "
            "request's seed, next to params"
        )
    return Receipt(
        prompt_token_ids=_prompt(value, encoder),
        params=params,
        seed=_count(value, "seed", MAX_SEED),
        token_ids=_ids(value, "token_ids"),
        index=_count(value, "index", MAX_SAMPLES - 1),
        text=_take(value, "text", str | None, None),
        finish_reason=finish_reason,
        stop_string=_take(value, "stop_string", str | None, None),
        shown_token_ids=_ids(value, "shown_token_ids") if "shown_token_ids" in value else (),
        target=_take(value, "target", str, ""),
        environment=environment,
    )


def _prompt(value: Mapping[str, Any], encoder: Encoder) -> tuple[int, ...]:
    given = [name for name in ("prompt_token_ids", "prompt", "messages") if name in value]
    if len(given) != 1:
        found = " and ".join(given) or "no prompt"
        raise RequestError(
            f"the receipt has {found}; give one of prompt_token_ids, prompt and messages"
        )
    if given == ["prompt"]:
        return tuple(encoder.encode(_take(value, "prompt", str, "")))
    if given == ["messages"]:
        return tuple(encoder.encode_chat(_take(value, "messages", list, [])))
    return _ids(value, "prompt_token_ids")


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(params, name) for name in _PARAMS}
    biases = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    grammar = None if params.grammar is None else _grammar_to_json(params.grammar)
    lists = {name: list(found[name]) for name in ("stop", "stop_token_ids")}
    return found | lists | {"logit_bias": biases, "grammar": grammar}


def _params_of(value: Mapping[str, Any]) -> SamplingParams:
    """What is missing is as SamplingParams has it; what does not count is left out."""
    known = {one.name for one in fields(SamplingParams)}
    if unknown := [name for name in value if name not in known]:
        raise RequestError(f"the receipt's params have the unknown field {unknown[0]!r:.60}")
    chosen = {name: value[name] for name in _PARAMS if name in value}
    if isinstance(biases := chosen.get("logit_bias"), dict):
        chosen["logit_bias"] = {_token_id(name): bias for name, bias in biases.items()}
    if chosen.get("grammar") is not None:
        chosen["grammar"] = _grammar_of(chosen["grammar"])
    return replace(SamplingParams(), **chosen)


def _token_id(name: object) -> int:
    try:
        return int(str(name))
    except ValueError as error:
        raise RequestError(f"logit_bias names {name!r:.40}; give token ids as keys") from error


def _grammar_to_json(grammar: Grammar) -> dict[str, Any]:
    parts = {name: _grammar_to_json(part) for name, part in grammar.parts}
    return {"kind": grammar.kind, "source": grammar.source, "parts": parts}


def _grammar_of(value: object) -> Grammar:
    if not isinstance(value, dict) or not {"kind", "source"} <= value.keys():
        raise RequestError(f"grammar is {value!r:.60}; give an object with kind, source and parts")
    parts = _take(value, "parts", dict, {})
    each = tuple((name, _grammar_of(part)) for name, part in parts.items())
    return Grammar(value["kind"], value["source"], each)


def _take(value: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    found = value.get(name, default)
    if not isinstance(found, kind):
        raise RequestError(f"the receipt's {name} is {found!r:.60}; {_REMEDY}")
    return found


def _count(value: Mapping[str, Any], name: str, most: int) -> int:
    """A whole number, maybe as text."""
    found = value.get(name, 0)
    text = str(found) if isinstance(found, int | str) and not isinstance(found, bool) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        raise RequestError(
            f"the receipt's {name} is {found!r:.60}; give a whole number of at least 0"
        )
    if int(text) > most:
        raise RequestError(f"the receipt's {name} is {text}; give a number up to {most}")
    return int(text)


def _ids(value: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = value.get(name)
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise RequestError(f"the receipt's {name} is {found!r:.60}; give a list of token ids")
    return tuple(found)

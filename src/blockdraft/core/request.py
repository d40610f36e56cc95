"""What a user asks of one generation."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.core.grammar import Grammar

FinishReason = Literal["stop", "length", "error"]

MAX_SEED = 2**64 - 1
MAX_SAMPLES = 2**16
MAX_LOGPROBS = 20
MAX_TOOLS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 filter nothing. `logprobs` asks for
    the log-probability of each token and of that many most likely ones. `num_draft_tokens` is the
    most candidates that are verified in one step, the anchor not counted, and `draft_depth` the
    longest path of them; 0 candidates are plain decoding, None leaves it to the configuration, and
    neither exceeds that.
    `drafters` are the kinds of loaded drafters that may propose, all if None; () is plain decoding.
    `prediction` is what the output is expected to be, in whole or in part, as text or token ids: it
    is drafted from, and changes no output.
    `thinking_token_budget` is the most tokens of thinking: the mark that ends the section follows
    then. It needs a model that thinks between marks such as `<think>` and `</think>`.
    `prompt_logprobs` asks for the same of the prompt's tokens, which are then all computed.

    With a `grammar` the answer belongs to it as a whole, unless `max_tokens`, a stop string or a
    stop token cuts it short. Where it allows nothing but the end, `min_tokens` gives way.

    Raises:
        RequestError: a value is out of its range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    num_draft_tokens: int | None = None
    draft_depth: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    prediction: str | tuple[int, ...] = ()
    drafters: tuple[str, ...] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens, 1)
        check_count("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; give a "
                f"min_tokens of at most {self.max_tokens}, or a higher max_tokens",
                param="min_tokens",
            )
        self._take_real("temperature", 0.0, math.inf)
        if self.top_k == -1:  # other engines' word for all tokens
            self._take("top_k", 0)
        check_count("top_k", self.top_k, 0)
        self._take_real("top_p", 0.0, 1.0, low_open=True)
        self._take_real("min_p", 0.0, 1.0)
        # Beyond these factors float32 logits soon become zero or infinite.
        self._take_real("repetition_penalty", 0.01, 100.0)
        self._take_real("presence_penalty", -2.0, 2.0)
        self._take_real("frequency_penalty", -2.0, 2.0)
        self._take("logit_bias", _checked_bias(self.logit_bias))
        if self.seed is not None:
            check_count("seed", self.seed, 0, MAX_SEED)
        self._take("stop", _checked_stop(self.stop))
        self._take("stop_token_ids", _checked_ids(self.stop_token_ids))
        for name in ("ignore_eos", "prompt_logprobs"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}; give True or False", param=name)
        check_count("n", self.n, 1, MAX_SAMPLES)
        if self.logprobs is not None:
            check_count("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.num_draft_tokens is not None:
            check_count("num_draft_tokens", self.num_draft_tokens, 0)
        if self.draft_depth is not None:
            check_count("draft_depth", self.draft_depth, 1)
        if self.thinking_token_budget is not None:
            check_count("thinking_token_budget", self.thinking_token_budget, 0)
        if self.drafters is not None:
            self._take("drafters", _checked_drafters(self.drafters))
        self._take("prediction", _checked_prediction(self.prediction))
        _check_grammar(self.grammar, self.ignore_eos)
        if self.prompt_logprobs and self.logprobs is None:
            raise RequestError("prompt_logprobs needs logprobs, 0 or more", param="logprobs")

    def _take(self, name: str, value: object) -> None:
        """Set a field to its normal form; the class is frozen for everybody else."""
        object.__setattr__(self, name, value)

    def _take_real(self, name: str, low: float, high: float, *, low_open: bool = False) -> None:
        self._take(name, _checked_real(name, getattr(self, name), low, high, low_open=low_open))

    @property
    def is_sampled(self) -> bool:
        """True if the choice depends on the seed."""
        return self.temperature > 0.0

    @property
    def is_greedy_argmax(self) -> bool:
        """True if the choice is the plain argmax of the target's logits."""
        return not self.is_sampled and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """True if penalties, biases, a limit of length or a grammar act on the logits."""
        forbids = self.min_tokens > 0 or self.grammar is not None
        forbids = forbids or self.thinking_token_budget is not None
        return self.uses_penalties or bool(self.logit_bias) or forbids

    @property
    def uses_penalties(self) -> bool:
        """True if earlier tokens of the sequence change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def ending_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an output, of a model that ends its own with `eos_ids`."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | eos_ids

    @property
    def max_draft_tokens(self) -> int | None:
        """The most candidates of a step; None leaves it to the configuration."""
        return 0 if self.drafters == () else self.num_draft_tokens


def _checked_drafters(kinds: object) -> tuple[str, ...]:
    if isinstance(kinds, str) or not isinstance(kinds, Iterable):
        raise RequestError(
            f"drafters is {kinds!r}; give a tuple of kinds, such as ('lookup',)", param="drafters"
        )
    names = tuple(kinds)
    for name in names:
        if not isinstance(name, str):
            raise RequestError(f"drafters holds {name!r}; give names of kinds", param="drafters")
    return names


def _checked_prediction(prediction: object) -> str | tuple[int, ...]:
    if isinstance(prediction, str):
        return prediction
    if not isinstance(prediction, Iterable) or isinstance(prediction, Mapping | bytes):
        raise RequestError(
            f"prediction is {prediction!r:.60}; give a text or a list of token ids",
            param="prediction",
        )
    token_ids = tuple(prediction)
    for token_id in token_ids:
        check_count("prediction", token_id, 0, described="an id in prediction")
    return token_ids


def _check_grammar(grammar: object, ignore_eos: bool) -> None:
    if grammar is None:
        return
    if not isinstance(grammar, Grammar):
        raise RequestError(f"grammar is {grammar!r:.60}; give a Grammar, see Grammar.json_schema")
    if ignore_eos:
        raise RequestError(
            "a grammar, such as that of a format, decides where the answer ends; leave out "
            "ignore_eos",
            param="ignore_eos",
        )


def _checked_stop(stop: object) -> tuple[str, ...]:
    # A plain string would be taken for its letters.
    if isinstance(stop, str) or not isinstance(stop, Iterable):
        raise RequestError(f"stop is {stop!r}; give a tuple of strings", param="stop")
    texts = tuple(stop)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"stop holds {text!r}; give strings", param="stop")
        if not text:
            raise RequestError(
                "stop holds an empty string; every text would end there, leave it out", param="stop"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"stop holds {text!r:.60}, which is not valid Unicode; give UTF-8", param="stop"
            ) from error
    return texts


def _checked_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise RequestError(
            f"stop_token_ids is {ids!r}; give a tuple of token ids", param="stop_token_ids"
        )
    token_ids = tuple(ids)
    for token_id in token_ids:
        check_count("stop_token_ids", token_id, 0, described="an id in stop_token_ids")
    return token_ids


def _checked_bias(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError(
            f"logit_bias is {biases!r}; give a mapping of token ids to numbers", param="logit_bias"
        )
    for token_id in biases:
        check_count("logit_bias", token_id, 0, described="a key of logit_bias")
    return {
        token_id: _checked_real(
            "logit_bias", bias, -100.0, 100.0, described=f"logit_bias of token {token_id}"
        )
        for token_id, bias in biases.items()
    }


def check_count(
    name: str, value: object, low: int, high: int | None = None, *, described: str | None = None
) -> None:
    """Refuse what is no whole number of a range; `described` is `name` in words.

    Raises:
        RequestError: names the value and the range.
    """
    shown = described or name
    limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{shown} is {value!r}; give a whole number {limit}", param=name)
    if value < low or (high is not None and value > high):
        raise RequestError(f"{shown} is {value}; give a number {limit}", param=name)


def _checked_real(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    described: str | None = None,
) -> float:
    shown = described or name
    start = f"above {low:g}" if low_open else f"of at least {low:g}"
    end = "" if high == math.inf else f" and at most {high:g}"
    remedy = f"give a {'finite ' if high == math.inf else ''}number {start}{end}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{shown} is {value!r}; {remedy}", param=name)
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real) or real < low or real > high or (low_open and real == low):
        raise RequestError(f"{shown} is {real:g}; {remedy}", param=name)
    return real


def check_length(num_prompt: int, params: SamplingParams, described: str, limit: int) -> None:
    """Refuse a prompt that leaves too little room for the answer.

    Raises:
        ContextTooLong: says both numbers, and which limit it is.
    """
    if num_prompt + params.max_tokens > limit:
        raise ContextTooLong(
            f"prompt of {num_prompt} tokens and max_tokens {params.max_tokens} exceed "
            f"{described} tokens; shorten one of them"
        )

"""From a request's fields to the parameters of the engine: the one place that translates. No torch.

Ranges are SamplingParams' own. What this server cannot do is refused here, with its name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams
from blockdraft.server.protocol import ChatRequest, CompletionRequest, Sampling

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; SamplingParams' own default is greedy."""
MAX_SCORES = 2**20
"""Log-probabilities of several prompts in one answer. To write so many takes seconds, in which all
other requests wait, and some hundred megabytes."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's for text completions; a chat answer may fill the context."""

_SAME_NAMES = (
    "top_p",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "thinking_token_budget",
    "ignore_eos",
    "num_draft_tokens",
    "draft_depth",
)


def chat_params(
    request: ChatRequest, *, num_prompt: int, max_context: int, grammar: Grammar | None = None
) -> SamplingParams:
    """The parameters of a chat request whose prompt has `num_prompt` tokens.

    `grammar` is what `response_format` and `tools` ask for, see server/shape.py.

    Raises:
        RequestError: a value is out of range, or asks for what is not supported.
        ContextTooLong: the prompt leaves no room for a token.
    """
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            f"max_tokens is {request.max_tokens} and max_completion_tokens "
            f"{request.max_completion_tokens}; give one of them",
            param="max_completion_tokens",
        )
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return _params(
        request,
        max_tokens=limits.pop() if limits else _room(num_prompt, max_context),
        logprobs=logprobs,
        grammar=grammar,
    )


def chat_names(request: ChatRequest) -> dict[str, str]:
    """Of the engine's parameters those that the client has given by another name."""
    names = {"logprobs": "top_logprobs"}
    if request.max_tokens is None and request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def completion_params(
    request: CompletionRequest,
    *,
    num_prompt: int,
    max_context: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The parameters of a text completion whose prompt has `num_prompt` tokens.

    `grammar` is what `response_format` asks for.

    Raises:
        RequestError: a value is out of range, or asks for what is not supported.
        ContextTooLong: the prompt leaves no room for a token.
    """
    n = 1 if request.n is None else request.n
    if request.best_of not in (None, n):
        raise RequestError(
            f"best_of is {request.best_of} and n is {n}; ranking samples is not supported",
            param="best_of",
        )
    if request.stream_options is not None and request.stream_options.include_rounds:
        raise RequestError(
            "stream_options.include_rounds is for chats only; leave it out", param="stream_options"
        )
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, _room(num_prompt, max_context))
    if is_echo_alone(request):
        # The engine's prompt pass always gives a token; the answer leaves it out.
        max_tokens = min(1, _room(num_prompt, max_context))
    return _params(
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=bool(request.echo) and request.logprobs is not None,
        grammar=grammar,
    )


def check_scores(request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse to score more of the prompts than is written at once; a single one is always scored.

    For a request whose values are in their ranges.

    Raises:
        RequestError: says how many log-probabilities that would be.
    """
    n = 1 if request.n is None else request.n
    if not request.echo or request.logprobs is None or n * len(prompts) == 1:
        return
    num = n * sum(map(len, prompts)) * (request.logprobs + 1)
    if num > MAX_SCORES:
        raise RequestError(
            f"the request asks for {num} log-probabilities of its prompts, and at most "
            f"{MAX_SCORES} are given at once; send fewer prompts in a request, or lower logprobs",
            param="logprobs",
        )


def is_echo_alone(request: CompletionRequest) -> bool:
    """True if nothing but the prompt is wanted back, as when a text is to be scored."""
    return bool(request.echo) and request.max_tokens == 0


def _params(request: Sampling, **chosen: Any) -> SamplingParams:
    for name in _SAME_NAMES:
        value = getattr(request, name)
        if value is not None:
            chosen[name] = value
    if request.speculative is not None and request.speculative is not True:
        chosen.setdefault("num_draft_tokens", int(request.speculative))
    temperature = request.temperature
    chosen["temperature"] = DEFAULT_TEMPERATURE if temperature is None else temperature
    if request.stop is not None:
        chosen["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        chosen["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.logit_bias is not None:
        chosen["logit_bias"] = _bias(request.logit_bias)
    return SamplingParams(**chosen)


def _bias(biases: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise RequestError(
                f"logit_bias names {name!r:.40}; give token ids as keys", param="logit_bias"
            )
        if int(name) in found:
            raise RequestError(f"logit_bias names token {int(name)} twice", param="logit_bias")
        found[int(name)] = bias
    return found


def _room(num_prompt: int, max_context: int) -> int:
    if num_prompt >= max_context:
        raise ContextTooLong(
            f"prompt of {num_prompt} tokens leaves no room in the context of {max_context} tokens; "
            "shorten it"
        )
    return max_context - num_prompt

"""Answers as the JSON that OpenAI's clients read. No state here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.engine.completion import Completion, Round
from blockdraft.engine.samples import Job
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.server.calls import Call
from blockdraft.server.pieces import Piece, TokenEntry
from blockdraft.speculate.verify import TokenLogprobs
from blockdraft.text.token_bytes import TokenBytes

Json = dict[str, Any]

_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all JSON of one answer has in common."""

    id: str
    kind: str
    created: int
    model: str
    fingerprint: str

    def wrap(self, choices: list[Json], *, kind: str | None = None, **more: Any) -> Json:
        """An answer, or a piece of one."""
        return {
            "id": self.id,
            "object": kind or self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


class ChatForm:
    """POST /v1/chat/completions."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokens: TokenBytes, *, with_logprobs: bool, with_ids: bool) -> None:
        self._tokens = tokens
        self._with_logprobs = with_logprobs
        self.with_ids = with_ids

    def opening(self, index: int) -> Json:
        """The first choice of a stream: who speaks."""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def delta(self, piece: Piece) -> Json:
        """A piece of a stream."""
        delta: Json = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return self._choice(piece.index, {"delta": delta}, piece)

    def message(self, piece: Piece) -> Json:
        """A whole answer."""
        content = None if piece.calls and not piece.content else piece.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [_called(call) for call in piece.calls]
        return self._choice(piece.index, {"message": message}, piece)

    def _choice(self, index: int, body: Json, piece: Piece | None) -> Json:
        choice: Json = {"index": index, **body, "logprobs": None}
        if self._with_logprobs and piece is not None and piece.entries:
            entries = [_chat_entry(self._tokens, entry) for entry in piece.entries]
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self.with_ids and piece is not None:
            choice["token_ids"] = piece.token_ids
        if piece is not None and piece.receipt is not None:
            choice["receipt"] = piece.receipt.to_json()
        if piece is not None and piece.rounds:
            choice["rounds"] = _rounds(piece.rounds)
        if piece is not None and piece.token_kinds:
            choice["token_kinds"] = piece.token_kinds
        choice["finish_reason"] = None if piece is None else piece.finish_reason
        return choice


class CompletionForm:
    """POST /v1/completions."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        tokens: TokenBytes,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        with_logprobs: bool,
        with_ids: bool,
        is_echo_alone: bool,
    ) -> None:
        self._tokens = tokens
        self._prompts = prompts
        self._n = n
        self._with_logprobs = with_logprobs
        self.with_ids = with_ids
        self._is_echo_alone = is_echo_alone

    def opening(self, index: int) -> Json | None:
        """A text needs no opening."""
        return None

    def delta(self, piece: Piece) -> Json:
        """A piece of a stream."""
        return self.message(piece)

    def message(self, piece: Piece) -> Json:
        """A whole answer."""
        choice: Json = {"index": piece.index, "text": piece.content, "logprobs": None}
        if self._with_logprobs and piece.entries:
            choice["logprobs"] = _text_entries(self._tokens, piece.entries, piece.text_offsets)
        if self.with_ids:
            choice["token_ids"] = piece.token_ids
            choice["prompt_token_ids"] = list(self._prompts[piece.index // self._n])
        if piece.receipt is not None:
            choice["receipt"] = piece.receipt.to_json()
        # The one token behind a prompt that is only scored was not asked for.
        ended = piece.finish_reason
        choice["finish_reason"] = "length" if ended and self._is_echo_alone else ended
        return choice


Form = ChatForm | CompletionForm


def usage(jobs: Sequence[Job], num_tokens: int, completions: Iterable[Completion]) -> Json:
    """Tokens of the prompts and of all answers, and how the drafts fared.

    Of a request with a prediction its tokens are accepted if they are in the answer, and rejected
    if they are not; of others this tells of the drafted tokens. A prompt counts once, however many
    samples it has; its cached tokens are those that an earlier request has computed.
    """
    num_prompt = sum(len(job.prompt_ids) for job in jobs)
    done = list(completions)
    if any(job.prediction_ids for job in jobs):
        num_accepted = sum(c.num_predicted_tokens or 0 for c in done)
        num_rejected = sum(c.num_unpredicted_tokens or 0 for c in done)
    else:
        num_accepted = sum(c.acceptance.num_accepted for c in done)
        num_rejected = sum(c.acceptance.num_drafted for c in done) - num_accepted
    first = [c for c in done if c.index == 0]
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(c.num_reused_tokens for c in first)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_rejected,
        },
    }


def request_metrics(completions: Sequence[Completion], max_draft_depth: int) -> Json | None:
    """vLLM's `metrics`: times in milliseconds and the fate of the drafts; None for many samples."""
    if len(completions) != 1:
        return None
    (completion,) = completions
    timings, num_after = completion.timings, len(completion.token_ids) - 1
    return {
        "time_to_first_token_ms": 1000 * timings.first_token,
        "generation_time_ms": 1000 * timings.decode,
        "queue_time_ms": 1000 * timings.queue,
        "mean_itl_ms": 1000 * timings.decode / num_after if num_after > 0 else None,
        "tokens_per_second": timings.tokens_per_second,
        "speculative_decoding": _speculation(completion.acceptance, max_draft_depth),
    }


def _speculation(stats: AcceptanceStats, max_draft_depth: int) -> Json | None:
    """vLLM's schema, over the passes that drafted; None if none did."""
    outcomes = {key: count for key, count in stats.outcomes.items() if key[0]}
    num_steps = sum(outcomes.values())
    if not num_steps:
        return None
    num_drafted = sum(drafted * count for (drafted, _), count in outcomes.items())
    num_accepted = sum(accepted * count for (_, accepted), count in outcomes.items())
    lengths = sorted({drafted for drafted, _ in outcomes})
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps,
        "draft_acceptance_rate": num_accepted / num_drafted,
        "acceptance_histogram": _histogram(outcomes, None),
        "acceptance_histogram_by_draft_length": {
            str(length): _histogram(outcomes, length) for length in lengths
        },
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": max_draft_depth,
    }


def _histogram(outcomes: Mapping[tuple[int, int], int], length: int | None) -> list[int]:
    """How many passes kept j drafts, at place j; of those that drafted `length`, or of all."""
    chosen = {k: n for k, n in outcomes.items() if length is None or k[0] == length}
    longest = max(drafted for drafted, _ in chosen)
    counts = [0] * (longest + 1)
    for (_, accepted), count in chosen.items():
        counts[accepted] += count
    return counts


def _rounds(rounds: Sequence[Round]) -> list[Json]:
    return [
        {
            "tokens": one.texts,
            "num_drafted": one.num_drafted,
            "num_accepted": one.num_accepted,
            "follows_stall": one.follows_stall,
        }
        for one in rounds
    ]


def _called(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: Call) -> Json:
    if call.id:
        return {"index": call.index, **_called(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _chat_entry(tokens: TokenBytes, entry: TokenEntry) -> Json:
    token_id, logprobs = entry
    assert logprobs is not None, "a chat answer has no prompt in it"
    top = [_chat_token(tokens, i, logprob) for i, logprob in logprobs.top]
    return {**_chat_token(tokens, token_id, logprobs.logprob), "top_logprobs": top}


def _chat_token(tokens: TokenBytes, token_id: int, logprob: float) -> Json:
    return {
        "token": tokens.text_of(token_id),
        "logprob": _json_logprob(logprob),
        "bytes": list(tokens.bytes_of(token_id)),
    }


def _text_entries(tokens: TokenBytes, entries: Sequence[TokenEntry], offsets: list[int]) -> Json:
    return {
        "tokens": [tokens.text_of(token_id) for token_id, _ in entries],
        "token_logprobs": [
            None if found is None else _json_logprob(found.logprob) for _, found in entries
        ],
        "top_logprobs": [_top(tokens.text_of, *entry) for entry in entries],
        "text_offset": offsets,
    }


def _top(
    text_of: Callable[[int], str], token_id: int, found: TokenLogprobs | None
) -> dict[str, float] | None:
    """The likeliest tokens, and the one that stands there, as OpenAI's texts have it."""
    if found is None:
        return None
    # Of tokens with the same text the likeliest stays.
    told = [*found.top, (token_id, found.logprob)]
    return {text_of(one): _json_logprob(logprob) for one, logprob in reversed(told)}


def _json_logprob(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot happen."""
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE

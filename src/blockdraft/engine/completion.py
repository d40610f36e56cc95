"""What a user gets back from a generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockdraft.core.errors import RequestError
from blockdraft.core.receipt import Environment, Receipt, counting
from blockdraft.core.request import FinishReason, SamplingParams
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.speculate.verify import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one sample. Decoding begins when the first token is there.

    queue: from the request to its first step, part of `first_token`.
    first_token: from the request to the first token, waiting and prompt pass included.
    decode: from the first token to the last. total: from the request to the last token.
    tokens_per_second: tokens after the first over `decode`; 0 for a single token.
    largest_gap: the longest between two tokens; tokens of one step come together.
    """

    first_token: float
    decode: float
    total: float
    tokens_per_second: float
    queue: float = 0.0
    largest_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample.

    `token_ids` hold the token that ended it; `text` ends before it, and before a stop string.
    The same `seed` and `index` give the same tokens again. With finish reason "error", `error` says
    what went wrong, and the tokens are those before it. `logprobs` are None unless asked for.
    `num_reused_tokens` of the prompt were not computed, because an earlier request had done so.
    `prompt_logprobs`, if asked for, begin with the second token of the prompt: the first has none.
    `stop_string` is the one that ended it, if one did. Of the tokens of a prediction the output has
    `num_predicted_tokens`, and not the other `num_unpredicted_tokens`; None without a prediction.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None
    acceptance: AcceptanceStats
    timings: Timings
    error: str | None = None
    num_reused_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_string: str | None = None
    num_predicted_tokens: int | None = None
    num_unpredicted_tokens: int | None = None

    def receipt(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        target: str,
        environment: Environment,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Receipt:
        """What is needed to verify it; see Receipt. `params` are those of its request.

        Raises:
            RequestError: it ended with an error.
        """
        if self.finish_reason == "error":
            raise RequestError(f"an answer that ended with an error has no receipt: {self.error}")
        return Receipt(
            prompt_token_ids=tuple(prompt_ids),
            params=counting(params),
            seed=self.seed,
            index=self.index,
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=self.finish_reason,
            stop_string=self.stop_string,
            shown_token_ids=tuple(sorted(shown_ids)),
            target=target,
            environment=environment,
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """All samples of one prompt, in order, and the parameters that it was given."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Round:
    """What one target pass committed: the text that each token adds, and how its draft fared.

    The first `num_accepted` tokens were drafted. The first round of a sample is that of its prompt,
    which drafts nothing. A character of several tokens counts for the last of them; special tokens
    have no text. `follows_stall`: it came late, see Pace; told by AsyncEngine only.
    """

    texts: tuple[str, ...]
    num_drafted: int
    num_accepted: int
    follows_stall: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of one sample while streaming.

    The pieces of `text` and `token_ids` of a sample, joined, are those of its completion, which
    comes with the last one. Text may lag behind the tokens: half a character, or what may become
    a stop string, is held back. `logprobs` has an entry for each token if they were asked for, and
    `prompt_logprobs` come with the first chunk. A round comes as soon as all of its text is final.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[Round, ...] = ()

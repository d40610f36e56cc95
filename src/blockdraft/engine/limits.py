"""What a request to an engine may ask for, checked before anything of it runs."""

from collections.abc import Iterable, Sequence

from blockdraft.core.errors import RequestError
from blockdraft.core.request import SamplingParams, check_length
from blockdraft.models.target.interface import Target
from blockdraft.speculate.proposer import Proposer


class RequestLimits:
    """Refuses token ids, lengths and drafters that a target and its drafters do not have."""

    def __init__(self, target: Target, proposer: Proposer) -> None:
        self._target, self._proposer = target, proposer

    @property
    def max_tokens(self) -> int:
        """The most tokens that a prompt and its continuation may have together."""
        return min(self._lengths().values())

    def _lengths(self) -> dict[str, int]:
        """The most tokens of a sequence, by what bounds them."""
        context, memory = self._target.max_context, self._target.memory.num_tokens
        return {f"the context of {context}": context, f"the KV cache of {memory}": memory}

    def is_token(self, token_id: int) -> bool:
        """True for ids of the vocabulary."""
        return 0 <= token_id < self._target.vocab_size

    def check_ids(self, param: str | None, token_ids: Iterable[int]) -> None:
        """Refuse token ids outside the vocabulary.

        Raises:
            RequestError: names the first of them, and `param`.
        """
        wrong = [i for i in token_ids if not self.is_token(i)]
        if wrong:
            raise RequestError(
                f"token id {wrong[0]} is outside the vocabulary; give ids from 0 to "
                f"{self._target.vocab_size - 1}",
                param=param,
            )

    def check_prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse a prompt that cannot be continued with these parameters.

        Raises:
            RequestError: the prompt is empty, a token id is outside the vocabulary, or a drafter
                is not loaded.
            ContextTooLong: prompt and max_tokens do not fit the target's context or memory.
        """
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        self.check_ids(None, prompt_ids)
        self._check_drafters(params)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias)
        for described, limit in self._lengths().items():
            check_length(len(prompt_ids), params, described, limit)

    def _check_drafters(self, params: SamplingParams) -> None:
        loaded = [drafter.kind for drafter in self._proposer.drafters]
        for kind in params.drafters or ():
            if kind not in loaded:
                raise RequestError(
                    f"drafters names {kind!r}, but only these are loaded: {', '.join(loaded)}; "
                    "name some of those, or leave drafters out",
                    param="drafters",
                )

    def check_prediction(self, prediction_ids: Sequence[int]) -> None:
        """Refuse a prediction that cannot be one of this target's outputs.

        Raises:
            RequestError: it is longer than any output, or has a token id outside the vocabulary.
        """
        if len(prediction_ids) > self.max_tokens:
            raise RequestError(
                f"the prediction has {len(prediction_ids)} tokens, but prompt and output have room "
                f"for {self.max_tokens}; give the part that is expected first",
                param="prediction",
            )
        self.check_ids("prediction", prediction_ids)

    def check_min_tokens(self, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        """Refuse a `min_tokens` that forbids every token; a sample with it would end in an error.

        With a grammar nothing is refused: where the two contradict, the grammar decides.

        Raises:
            RequestError: every token ends the answer.
        """
        vocab_size = self._target.vocab_size
        num_ending = sum(map(self.is_token, params.ending_ids(eos_ids)))
        if params.min_tokens and params.grammar is None and num_ending == vocab_size:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, and all {vocab_size} tokens of the vocabulary "
                "end the answer; give min_tokens 0 or fewer stop_token_ids",
                param="min_tokens",
            )

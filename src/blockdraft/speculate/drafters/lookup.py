"""Drafts that are looked up: what stood behind the same words before, in prompt or output.

No model runs. The longest suffix of the text that also stands earlier is found in a suffix
automaton, and what followed there is proposed. How likely it follows again is learned, by the
length of the match, from every token that the target chooses.
"""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.drafters.automaton import NO_MATCH, Automaton, Match
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.rates import Rates, RequestRates

LEAST_MATCH, LONG_MATCH = 2, 12
"""Tokens: fewer are no match, and a match of LONG_MATCH or more is believed for longer."""
USUAL_TOKENS, MAX_LOOKUP_TOKENS = 8, 16
"""The most tokens of a proposal, and of one behind a long match."""
MAX_MATCH = 16
"""Longer matches have the rates of this length."""
MAX_INDEXED = 32_768
"""The last tokens of a prompt, so many, are searched; each takes some 500 bytes."""

_PRIOR = (
    *(0.0,) * LEAST_MATCH,
    *(0.4, 0.55, 0.65, 0.7, 0.75, 0.78, 0.8, 0.83, 0.83, 0.85, 0.85, 0.87, 0.87, 0.9, 0.95),
)
"""The rate at which the next token is the one behind the match, by the length of the match. Counted
on 700 of the default target's answers to varied prompts, in prompts and in outputs."""


class SharedTexts:
    """Recent outputs of all requests, to be searched by later ones; at most `max_tokens` of them.

    They are in two halves. When the newer one is full the older one is dropped, and `version`
    changes.
    """

    def __init__(self, max_tokens: int) -> None:
        self._half = max(1, max_tokens // 2)
        self.halves = (Automaton(), Automaton())
        self.version = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Take an output that has ended, or as much of its end as has room."""
        if len(self.halves[0]) + len(token_ids) >= self._half:
            self.halves = (Automaton(), self.halves[0])
            self.version += 1
        first = max(0, len(token_ids) + 1 - self._half)
        self.halves[0].extend([*token_ids[first:], _BETWEEN_TEXTS])


_BETWEEN_TEXTS = -1
"""Stands between two texts; it is no token, and no guess goes beyond it."""


class _Text:
    """A text that is searched, and the place in it that matches the end of the sample."""

    def __init__(self, automaton: Automaton, match: Match, rates: RequestRates) -> None:
        self.automaton = automaton
        self.match = match
        self._rates = rates

    def follow(self, token_id: int) -> None:
        self.match = self.automaton.advanced(self.match, token_id)

    def guess(self, num: int) -> list[int]:
        """What stands behind the match, at most `num` tokens; nothing behind a short one."""
        if self.match.length < LEAST_MATCH:
            return []
        found = self.automaton.behind(self.match, num)
        return found[: found.index(_BETWEEN_TEXTS)] if _BETWEEN_TEXTS in found else found

    def learn(self, token_id: int) -> None:
        """Compare the guess of the next token with the token itself."""
        for guess in self.guess(1):
            self._rates.record(_bucket(self.match.length), guess == token_id)

    def chain(self, num: int) -> tuple[list[int], list[float]]:
        """A guess of at most `num` likely tokens, with the probability of each path."""
        length = self.match.length
        if length < LONG_MATCH:
            num = min(num, USUAL_TOKENS)
        guess = self.guess(num)
        path = self._rates.likely_path([_bucket(length + index) for index in range(len(guess))])
        return guess[: len(path)], path


class _Output(_Text):
    """The output so far, whose own end is what matches."""

    def follow(self, token_id: int) -> None:
        self.automaton.append(token_id)
        self.match = self.automaton.repeated()

    def guess(self, num: int) -> list[int]:
        found = super().guess(num)
        # A text that goes round in circles is expected to go on so.
        period = len(found)
        while period > 0 and len(found) < num:
            found.append(found[-period])
        return found


def _bucket(length: int) -> int:
    return min(length, MAX_MATCH)


class _Searched:
    """All texts that are searched for one sample; the first `num_seen` output tokens are read."""

    def __init__(self, prompt: Automaton, new_rates: Callable[[str], RequestRates]) -> None:
        self._shared_rates = new_rates("shared")
        # Among equals the last one wins: what was written last is the most like what comes next.
        self.own = [
            _Text(prompt, prompt.repeated(), new_rates("prompt")),
            _Output(Automaton(), NO_MATCH, new_rates("output")),
        ]
        self.shared: list[_Text] = []
        self.shared_version = -1
        self.num_seen = 0

    def use(self, shared: SharedTexts) -> None:
        """Search the texts of others too."""
        if self.shared_version != shared.version:
            self.shared_version = shared.version
            self.shared = [_Text(half, NO_MATCH, self._shared_rates) for half in shared.halves]

    @property
    def texts(self) -> list[_Text]:
        return self.shared + self.own

    def see(self, token_ids: Sequence[int]) -> None:
        """Learn from tokens that the target has chosen, and follow them."""
        for token_id in token_ids:
            for text in self.texts:
                text.learn(token_id)
                text.follow(token_id)
            self.num_seen += 1

    def chain(self, num: int) -> tuple[list[int], list[float]]:
        """The guess from which the target is expected to keep the most tokens."""
        return max((text.chain(num) for text in reversed(self.texts)), key=lambda one: sum(one[1]))


class LookupDrafter(ModelFree):
    """Proposes what followed the same tokens in the prompt, the output, or other outputs: a chain.

    Only committed tokens are read, from the sequence itself, so nothing has to be taken back when
    drafts are rejected. What was read is kept until the sequence ends, also while it is preempted,
    or its tokens would be learned from twice. Samples of one prompt share the automaton of the
    prompt.

    shared_tokens: tokens of recent outputs of all requests that are searched too; 0 for none.
    """

    kind = "lookup"

    def __init__(self, *, shared_tokens: int = 0) -> None:
        self.max_nodes = MAX_LOOKUP_TOKENS
        self._shared = SharedTexts(shared_tokens) if shared_tokens else None
        self._rates = {name: Rates(_PRIOR) for name in ("prompt", "output", "shared")}
        self._prompts: WeakValueDictionary[tuple[int, ...], Automaton] = WeakValueDictionary()
        self._samples: dict[int, Sample] = {}
        self._searched: WeakKeyDictionary[Sample, _Searched] = WeakKeyDictionary()

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open. What was reused is read like all else."""
        self._samples[row.sequence.key] = row.sequence

    def _propose(self, row: Row) -> Proposal:
        sample = row.sequence
        searched = self._searched.get(sample)
        if searched is None:
            searched = self._searched[sample] = self._begin(sample)
        if self._shared is not None:
            searched.use(self._shared)
        searched.see(sample.token_ids[sample.num_prompt + searched.num_seen :])
        tokens, probabilities = searched.chain(row.num_slots)
        return Proposal.chain(tokens, self.kind, probabilities) if tokens else NOTHING

    def _begin(self, sample: Sample) -> _Searched:
        prompt = tuple(sample.token_ids[: sample.num_prompt][-MAX_INDEXED:])
        known = self._prompts.get(prompt)
        if known is None:
            known = self._prompts[prompt] = Automaton(prompt)
        return _Searched(known, lambda name: self._rates[name].of_request())

    def close(self, key: int) -> None:
        """See Drafter.close. An output that has ended well may serve others."""
        sample = self._samples.pop(key, None)
        if sample is None or sample.finish_reason is None:
            return
        self._searched.pop(sample, None)
        if self._shared is not None and sample.finish_reason != "error":
            self._shared.add(sample.output_ids)

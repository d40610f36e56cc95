"""Drafts that are looked up: what stood behind the same words before, in prompt or output.

No model runs. The longest suffix of the text that also stands earlier is found in a suffix
automaton, and what followed there is proposed. How likely it follows again is learned, by the
length of the match, from every token that the target chooses.
"""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.drafters.automaton import NO_MATCH, Automaton, Match
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.rates import Rates, RequestRates

MAX_LOOKUP_TOKENS = 16
"""Of a proposal behind a long match."""
USUAL_TOKENS = 8
"""Of all others."""
LONG_MATCH = 12
LEAST_MATCH = 2
MAX_MATCH = 16
"""Longer matches count like this one."""
LEAST_PROBABILITY = 0.1
"""A row of the target's forward is worth more elsewhere, or not computed at all."""
MAX_INDEXED = 32_768
"""Tokens of a prompt that are searched, its last ones: some 500 bytes each."""

_PRIOR = (
    *(0.0,) * LEAST_MATCH,
    *(0.4, 0.55, 0.65, 0.7, 0.75, 0.78, 0.8, 0.83, 0.83, 0.85, 0.85, 0.87, 0.87, 0.9, 0.95),
)
"""Before anything is learned: that the next token is the one behind a match of so many tokens. As
counted on 700 of the default target's answers to varied prompts, in prompts and in outputs."""


class SharedTexts:
    """Recent outputs of all requests, for those that come after them; bounded.

    Of two halves the older one is dropped when the newer one is full. `version` changes with it.
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
        self.halves[0].extend([*token_ids[-self._half + 1 :], _BETWEEN_TEXTS])


_BETWEEN_TEXTS = -1
"""No token; nothing is read beyond it."""


class _Text:
    """A text that is searched, and how much of its end the sample's own end matches."""

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
        path = self._rates.path([_bucket(length + index) for index in range(len(guess))])
        num_likely = sum(probability >= LEAST_PROBABILITY for probability in path)
        return guess[:num_likely], path[:num_likely]


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
    """What is searched for one sample, up to the token that was seen last."""

    def __init__(self, prompt: Automaton, new_rates: Callable[[str], RequestRates]) -> None:
        self._shared_rates = new_rates("shared")
        # The last one wins among equals: what was written last is the most like what comes.
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
        self.num_seen += len(token_ids)

    def chain(self, num: int) -> tuple[list[int], list[float]]:
        """The guess from which the target is expected to keep the most tokens."""
        return max((text.chain(num) for text in reversed(self.texts)), key=lambda one: sum(one[1]))


class LookupDrafter(ModelFree):
    """Proposes what followed the same tokens in the prompt, the output, or other outputs: a chain.

    Only committed tokens are ever read, from the sequence itself, so there is nothing to take back,
    and a sequence that was preempted is just read again. A prompt is read when its first token is
    there; samples of one prompt share what is known of it.

    shared_tokens: of recent outputs of all requests that are searched too; 0 for none.
    """

    kind = "lookup"

    def __init__(self, *, shared_tokens: int = 0) -> None:
        self.max_nodes = MAX_LOOKUP_TOKENS
        self._shared = SharedTexts(shared_tokens) if shared_tokens else None
        self._rates = {name: Rates(_PRIOR) for name in ("prompt", "output", "shared")}
        self._prompts: WeakValueDictionary[tuple[int, ...], Automaton] = WeakValueDictionary()
        self._samples: dict[int, Sample] = {}
        self._searched: dict[int, _Searched] = {}

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open. What was reused is read like all else."""
        self._samples[row.sequence.key] = row.sequence

    def _propose(self, row: Row) -> Proposal:
        sample = row.sequence
        searched = self._searched.get(sample.key)
        if searched is None:
            searched = self._searched[sample.key] = self._begin(sample)
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
        self._searched.pop(key, None)
        sample = self._samples.pop(key, None)
        if self._shared is None or sample is None:
            return
        if sample.finish_reason in ("stop", "length"):
            self._shared.add(sample.output_ids)

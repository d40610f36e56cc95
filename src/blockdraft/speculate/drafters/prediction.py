"""Drafts from a prediction: what the request itself expects of its output.

The prediction is followed from its start. Where the target chooses another token, the output is
found in it again: at the longest run of tokens that ends like the output, the one nearest to the
place where it was left. Where there is none, one token is taken to stand for another.
"""

from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.rates import Rates, RequestRates

MAX_PREDICTED_TOKENS = 16
"""The most tokens of a proposal."""
MAX_RUN = 16
"""Longer runs of right tokens have the rates of this length."""
_RUN_AT_START = 8
"""Before anything is written, so many tokens count as right: who gives a prediction believes it."""
_NEAR = 32
"""Of the places where a token stands, so many are looked at on either side of the expected one."""
_NEAR_FOR_ONE = 8
"""A match of a single token counts only if it is no farther away."""

_PRIOR = (
    0.3,
    *(0.5, 0.65, 0.75, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
)
"""By the number of right tokens in a row, the rate at which the next one is right too, at first."""


class Follower:
    """Where in a prediction an output stands; `place` is that of the token expected next."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.place = 0
        self.run = _RUN_AT_START
        self._written: list[int] = []
        self._places: dict[int, list[int]] = {}
        for place, token_id in enumerate(token_ids):
            self._places.setdefault(token_id, []).append(place)

    def expected(self, num: int) -> Sequence[int]:
        """At most `num` tokens; none behind the end."""
        return self.token_ids[self.place : self.place + num]

    def see(self, token_id: int) -> None:
        """Take the next token of the output."""
        self._written.append(token_id)
        if list(self.expected(1)) == [token_id]:
            self.place += 1
            self.run = min(self.run + 1, MAX_RUN)
        else:
            self._find(token_id)

    def _find(self, token_id: int) -> None:
        """Go on behind the longest run that ends with this token, else behind the expected one."""
        places = self._places.get(token_id, [])
        middle = bisect_left(places, self.place)
        near = places[max(0, middle - _NEAR) : middle + _NEAR]
        run, found = 0, self.place
        for place in sorted(near, key=lambda place: (abs(place - self.place), -place)):
            if (own := self._run_at(place)) > run:
                run, found = own, place
            if run == MAX_RUN:  # none is longer, as where one token is repeated for ever
                break
        if run == 1 and abs(found - self.place) > _NEAR_FOR_ONE:
            run, found = 0, self.place
        self.run, self.place = run, min(found + 1, len(self.token_ids))

    def _run_at(self, place: int) -> int:
        """How many tokens up to a place equal the last ones written."""
        longest = min(MAX_RUN, place + 1, len(self._written))
        same = (self.token_ids[place - i] == self._written[-1 - i] for i in range(longest))
        return next((i for i, is_same in enumerate(same) if not is_same), longest)


def num_as_predicted(prediction_ids: Sequence[int], output_ids: Sequence[int]) -> int:
    """Tokens of a prediction that the output has too, two or more in a row, or from the start."""
    follower, found = Follower(prediction_ids), set[int]()
    for token_id in output_ids:
        follower.see(token_id)
        if follower.run > 1:
            start = max(0, follower.place - follower.run)
            found.update(range(start, follower.place))
    return len(found)


class _Prediction:
    """The prediction of one sample, and how far its output has been compared with it."""

    def __init__(self, follower: Follower, rates: RequestRates) -> None:
        self.follower = follower
        self.rates = rates
        self.num_seen = 0

    def see(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            for expected in self.follower.expected(1):
                self.rates.record(self.follower.run, expected == token_id)
            self.follower.see(token_id)
            self.num_seen += 1

    def proposal(self, num: int, kind: str) -> Proposal:
        tokens = self.follower.expected(num)
        run = self.follower.run
        path = self.rates.likely_path([min(run + index, MAX_RUN) for index in range(len(tokens))])
        return Proposal.chain(tokens[: len(path)], kind, path) if path else NOTHING


class PredictionDrafter(ModelFree):
    """Proposes what the request's own prediction says comes next; for others nothing.

    What was compared with a prediction is kept as long as the sample, also while it is preempted,
    or its tokens would be learned from twice.
    """

    kind = "prediction"

    def __init__(self) -> None:
        self.max_nodes = MAX_PREDICTED_TOKENS
        self._rates = Rates(_PRIOR)
        self._predictions: WeakKeyDictionary[Sample, _Prediction] = WeakKeyDictionary()

    def serves(self, sample: Sample) -> bool:
        """See FreeDrafter.serves: those with a prediction."""
        return bool(sample.prediction_ids)

    def _propose(self, row: Row) -> Proposal:
        sample = row.sequence
        known = self._predictions.get(sample)
        if known is None:
            known = _Prediction(Follower(sample.prediction_ids), self._rates.of_request())
            self._predictions[sample] = known
        known.see(sample.token_ids[sample.num_prompt + known.num_seen :])
        return known.proposal(row.num_slots, self.kind)

"""What a step costs and brings if a model drafts for some of its sequences. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat, zip_longest

from blockdraft.allocation.candidates import FreeProposal
from blockdraft.allocation.costs import StepCosts
from blockdraft.allocation.expectation import Expectation
from blockdraft.allocation.prices import StepPrices
from blockdraft.core.sequence import Row

_WORTH_STEPS = 16
"""What it takes to project the features of a long text is spread over so many steps of drafting."""
_STEP_TOKENS = 4
"""Tokens that a step usually commits, whose features the next draft projects."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a step is expected to cost and to bring if a model drafts for some sequences.

    keys: of these sequences. depth: of the drafts. num_slots: of each draft forward. num_lagging:
    tokens whose features are projected before. draft: seconds of all draft forwards. drafting: the
    same with the projection. rate: tokens per second, if the projection of a long text is paid over
    several steps. predicted: candidates that are kept, if the whole prediction is believed. own: of
    these, those of the sequences that the model drafts for. loss: seconds beyond those that plain
    decoding takes for as many tokens. tokens: of the step.
    """

    keys: list[int]
    depth: int
    num_slots: int
    num_lagging: int
    draft: float
    drafting: float
    rate: float
    predicted: float
    own: float
    loss: float
    tokens: float


class Offers:
    """Makes offers for one step, and remembers what it has found of each sequence.

    expectation: what the model is expected to propose for a row. lag: tokens whose features it
    would have to project before. free: what is known without the model, by key. trust: the share
    of the predicted tokens that is believed. least_rate: tokens per second without the model.
    """

    def __init__(
        self,
        costs: StepCosts,
        prices: StepPrices,
        expectation: Callable[[Row], Expectation],
        lag: Callable[[Row], int | None],
        free: Mapping[int, FreeProposal],
        *,
        trust: float,
        least_rate: float,
    ) -> None:
        self._costs, self._prices = costs, prices
        self._expectation, self._lag, self._free = expectation, lag, free
        self._trust, self._least_rate = trust, least_rate
        self._candidates: dict[int, tuple[list[float], list[float]]] = {}
        self._lags: dict[int, int] = {}

    def may_pay(self, rows: Sequence[Row]) -> bool:
        """False if drafting for these rows cannot give a better rate, however cheap its rows."""
        drafting = {row.sequence.key for row in rows}
        gained = sum(sum(own.gains) for key, own in self._free.items() if key not in drafting)
        gained += sum(sum(self._with_model(row)[0]) for row in rows)
        tokens = self._prices.num_sequences + self._trust * gained
        draft = self._costs.draft(*self._costs.draft_forwards(len(rows), 1))
        return tokens > self._least_rate * (self._prices.plain_seconds + draft)

    def of(self, rows: Sequence[Row], *, least: int = 0, whole: bool = False) -> Offer:
        """The model drafts for these rows, and the best candidates of all rows are verified.

        least: so many candidates are verified in any case. whole: drafts are as deep as the rows
        allow, not only as deep as is usually verified.
        """
        prices = self._prices
        drafting = {row.sequence.key for row in rows}
        found = [
            (own.gains, own.branches, repeat(False))
            for key, own in self._free.items()
            if key not in drafting
        ]
        found += [(*self._with_model(row), repeat(True)) for row in rows]
        candidates = [one for own in found for one in zip(*own, strict=False)]
        candidates.sort(key=lambda one: -one[0])
        num_lagging = sum(self._lag_of(row) for row in rows)
        project = self._costs.project(num_lagging)
        usual = min(project, self._costs.project(_STEP_TOKENS * len(rows)))
        depth = max(row.num_slots for row in rows)
        if not whole:
            each = (self._expectation(row).survival[:depth] for row in rows)
            depth = prices.best_depth([sum(own) for own in zip(*each, strict=True)], len(rows))
        num_slots, num_forwards = self._costs.draft_forwards(len(rows), depth)
        draft = self._costs.draft(num_slots, num_forwards)
        price = prices.best(
            [gain for gain, _, _ in candidates],
            [branch for _, branch, _ in candidates],
            draft + usual + (project - usual) / _WORTH_STEPS,
            least=min(least, len(candidates)),
            trust=self._trust,
        )
        return Offer(
            keys=[row.sequence.key for row in rows],
            depth=depth,
            num_slots=num_slots,
            num_lagging=num_lagging,
            draft=draft,
            drafting=draft + project,
            rate=price.rate,
            predicted=(price.tokens - prices.num_sequences) / self._trust,
            own=sum(gain for gain, _, is_own in candidates[: price.num_candidates] if is_own),
            loss=draft + project + price.forward - prices.plain_worth(price.tokens),
            tokens=price.tokens,
        )

    def _lag_of(self, row: Row) -> int:
        key = row.sequence.key
        if key not in self._lags:
            self._lags[key] = self._lag(row) or 0
        return self._lags[key]

    def _with_model(self, row: Row) -> tuple[list[float], list[float]]:
        """Gains and branches of a row's candidates that are expected if the model drafts too."""
        key = row.sequence.key
        if key not in self._candidates:
            expectation, num = self._expectation(row), row.num_draft_tokens
            free = self._free.get(key)
            # With the model there are no fewer good candidates than without.
            pairs = zip_longest(
                expectation.gains[:num], [] if free is None else free.gains, fillvalue=0.0
            )
            expected = [max(own, known) for own, known in pairs]
            branch = self._costs.branch(row.sequence.num_cached)
            added = [share * branch for share in expectation.branches[:num]]
            self._candidates[key] = expected, added + [0.0] * (len(expected) - len(added))
        return self._candidates[key]

"""For which sequences of a step a model drafts. No torch.

A model drafts for the sequences with which the most tokens per second are expected (`offers.py`),
where that is more than without it. What to expect is learned from earlier proposals, so a model
that has disappointed would never draft again. It is therefore tried from time to time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blockdraft.allocation.account import Account
from blockdraft.allocation.backoff import Backoff
from blockdraft.allocation.candidates import FreeCandidates, Order
from blockdraft.allocation.costs import StepCosts
from blockdraft.allocation.expectation import Expectation, Expectations, Trust
from blockdraft.allocation.offers import Offer, Offers
from blockdraft.allocation.policy import Outcome
from blockdraft.allocation.prices import StepPrices
from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row

_TRY_DEPTH = 3
"""In a try, at least so many nodes of the first path are verified."""
_TRY_STEPS, _MOST_TRY_STEPS = 16, 64
"""A sequence is not tried again for _TRY_STEPS steps: tries spend what drafting has gained
elsewhere, and must not spend all of it. Where candidates are known without a model, and with many
sequences, there is one pause for all of them. It doubles with each try until drafting pays, up to
_MOST_TRY_STEPS."""
_SHARE_BESIDE_FREE, _SHARE_IN_BATCHES = 1 / 500, 1 / 250
"""Nor do tries take more than this share of the time there. The first try of a sequence projects
the features of its whole prompt, which may take as long as a step of many sequences."""
_SURPRISE = 1.0
"""Tokens. If so many more of the model's are kept in a try than expected, the next ones follow
soon."""
_MANY_SEQUENCES = 4
"""With more sequences it takes long to weigh who might draft. After a step in which nobody should,
the next step is not weighed, then the next two, the next four, and so on up to _MOST_UNWEIGHED."""
_MOST_UNWEIGHED = 16
_LITTLE_KNOWN = 0.6
"""Tokens. A model is tried for a sequence if candidates known without it are expected to give no
more. For other sequences it adds less, and what it adds does not show what it is worth for these.
"""
_MOST_UNTRIED = 512
"""After so many steps without the model it is tried for any sequence. Where much is always known
without it, nothing else would show that it has become better."""
_DEEP_STEPS = 32
"""In one of so many drafted steps the whole first path of a sequence is verified: depths that are
never verified are never learned."""
_REST_STEPS = 64
"""Where a try would be too expensive, nothing is weighed for so many steps, unless the number of
sequences changes or the credit suffices."""
_OUTLIER = 4.0
"""A try counts as at most so many times its expected loss, or so many plain steps if that is more:
else a machine that was suspended for a minute would put an end to tries for hours."""
_FIRST_TRUST_BESIDE_FREE = 0.7
"""Where candidates are known without a model, it is asked only where these are poor, which is where
guessing is hard. It gives less there than elsewhere: the default drafter gave 0.64 of what was
expected when sampled, and 0.71 when greedy."""


@dataclass(frozen=True, slots=True)
class Decision:
    """For which sequences of a step a model drafts.

    offer: these sequences, and what drafting for them costs and brings; None if no model drafts.
    forced: how many nodes of a sequence's first path are verified in any case, by its key. is_try:
    a loss is expected, and the model drafts to learn what it is worth. is_idle: nothing was
    weighed, because nobody can draft or drafting has not paid lately.
    """

    offer: Offer | None = None
    forced: Mapping[int, int] = field(default_factory=dict)
    is_try: bool = False
    is_idle: bool = False


NOBODY = Decision()
IDLE = Decision(is_idle=True)


class ModelDrafts:
    """Decides for which sequences a model drafts, and learns from what comes of it.

    It is asked at most once a step, and told in the same step what came of it. See `BestRate` for
    max_nodes, max_depth, lag and model_kind.
    """

    def __init__(
        self,
        costs: StepCosts,
        account: Account,
        max_nodes: int,
        max_depth: int,
        lag: Callable[[Row], int | None],
        model_kind: str,
    ) -> None:
        self._costs, self._account, self._lag = costs, account, lag
        self._model_kind = model_kind
        self._expectations = Expectations(max_nodes, max_depth)
        self._trust = {False: Trust(), True: Trust(_FIRST_TRUST_BESIDE_FREE)}
        """By whether candidates are known without a model."""
        self._tries = Backoff(_TRY_STEPS, _MOST_TRY_STEPS)
        self._weighing = Backoff(1, _MOST_UNWEIGHED)
        self._rest: tuple[int, float, int] | None = None
        """While nothing is weighed: the number of sequences as a power of two, and the credit and
        the step that end it."""
        self._num_steps = self._num_drafted = self._offered_at = 0

    def is_weighed(self, num_sequences: int, num_steps: int) -> bool:
        """False where nobody drafts in the step, and it is not even looked at who might."""
        return num_sequences <= _MANY_SEQUENCES or self._weighing.is_due(num_steps)

    def decide(
        self, rows: Sequence[Row], num_steps: int, prices: StepPrices, free: FreeCandidates
    ) -> Decision:
        """Who drafts in the step of these rows, the `num_steps`-th one.

        free: what is known without a model.
        """
        self._num_steps = num_steps
        able = self._able(rows)
        if not able or self._is_resting(len(able)):
            self._weighing.attempt(num_steps)
            return IDLE
        if self._account.wants_control and prices.shows_plain_cost:
            return NOBODY
        decision = self._weighed(able, prices, free)
        if decision.offer is not None:
            self._offered_at = num_steps
        return decision

    def _able(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that a model may draft for, as it sees them."""
        as_seen = [row.for_model() for row in rows]
        return [row for row in as_seen if row.num_draft_tokens > 0 and self._lag(row) is not None]

    def _is_resting(self, num_able: int) -> bool:
        if self._rest is None:
            return False
        size, credit, until = self._rest
        same = size == num_able.bit_length()
        return same and self._account.credit < credit and self._num_steps < until

    def _weighed(self, able: list[Row], prices: StepPrices, free: FreeCandidates) -> Decision:
        """The rows with which the most tokens per second are expected; else perhaps a try."""
        promising = sorted(able, key=lambda row: -sum(self._expectation(row).gains))
        offers = Offers(
            self._costs,
            prices,
            self._expectation,
            self._lag,
            free.by_key,
            trust=self._trust[free.has_any](prices.num_sequences),
            least_rate=free.price.rate,
        )
        sizes = _sizes(len(able))
        # Offers take time, and mostly there is none that could pay.
        may_pay = [num for num in sizes if offers.may_pay(promising[:num])]
        made = [offers.of(promising[:num]) for num in may_pay]
        best = max(made, key=lambda offer: offer.rate, default=None)
        if best is not None and best.rate > free.price.rate and self._account.allows(best.loss):
            return self._paying(best, offers, promising)
        self._weighing.attempt(self._num_steps)
        row = self._row_to_try(able, prices, free)
        if row is None:
            return NOBODY
        made += [offers.of(promising[:num]) for num in sizes if num not in may_pay]
        cheapest = min(made, key=lambda offer: offer.loss)
        if len(cheapest.keys) == 1:
            cheapest = offers.of([row], least=_TRY_DEPTH, whole=True)
        # What the candidates of others would gain without it is lost as well.
        loss = cheapest.loss + cheapest.tokens * (1 / prices.plain_rate - 1 / free.price.rate)
        if not self._account.allows_try(loss):
            credit = self._account.credit_for_try(loss)
            self._rest = len(able).bit_length(), credit, self._num_steps + _REST_STEPS
            return NOBODY
        self._tries.attempt(self._num_steps)
        return Decision(cheapest, {row.sequence.key: _TRY_DEPTH}, is_try=True)

    def _paying(self, best: Offer, offers: Offers, promising: list[Row]) -> Decision:
        """Draft as the best offer says, now and then with a whole path."""
        self._tries.succeed()
        self._weighing.succeed()
        if self._num_drafted % _DEEP_STEPS != _DEEP_STEPS - 1:
            return Decision(best)
        drafting = promising[: len(best.keys)]
        row = drafting[self._num_drafted // _DEEP_STEPS % len(drafting)]
        return Decision(offers.of(drafting, whole=True), {row.sequence.key: row.num_slots})

    def _row_to_try(self, able: list[Row], prices: StepPrices, free: FreeCandidates) -> Row | None:
        """The row that has not drafted for the longest time, of those that may be tried now."""
        rows = [row for row in able if free.expected_of(row.sequence.key) <= _LITTLE_KNOWN]
        if not rows and self._num_steps - self._offered_at >= _MOST_UNTRIED:
            rows = able
        if not rows or (_share_tries(prices, free) and not self._tries.is_due(self._num_steps)):
            return None
        row = min(rows, key=self._drafted_at)
        return row if self._num_steps - self._drafted_at(row) >= _TRY_STEPS else None

    def _drafted_at(self, row: Row) -> int:
        step = self._expectations.drafted_at(row)
        return -_TRY_STEPS if step is None else step

    def _expectation(self, row: Row) -> Expectation:
        return self._expectations.of(row, self._num_steps)

    def has_part_in(self, proposal: Proposal) -> bool:
        """True if some candidate is the model's."""
        return any(self._model_kind in source for source in proposal.sources)

    def record_proposals(
        self, offer: Offer, rows: Sequence[Row], proposals: Sequence[Proposal], order: Order
    ) -> None:
        """Learn what the model has proposed to an offer. order: of the candidates of all rows."""
        found: list[list[int]] = [[] for _ in rows]
        for place, index in enumerate(order.rows):
            found[index].append(place)
        for row, proposal, own in zip(rows, proposals, found, strict=True):
            if row.sequence.key not in offer.keys or not self.has_part_in(proposal):
                continue
            gains = [order.gains[place] for place in own]
            branches = [order.branches[place] > 0 for place in own]
            chances = dict(zip((order.nodes[place] for place in own), gains, strict=True))
            first = [chances[node] for node in proposal.tree.through([])]
            self._expectations.record(row, self._num_steps, gains, branches, first)

    def record_kept(self, offer: Offer, num_sequences: int, num_kept: int, has_free: bool) -> None:
        """Compare the candidates that were kept with those that an offer predicted."""
        self._trust[has_free].record(num_sequences, offer.predicted, num_kept)

    def record_no_offer(self, num_sequences: int, num_steps: int) -> None:
        """The model has not drafted in the last steps, which had so many sequences."""
        for trust in self._trust.values():
            trust.fade(num_sequences, num_steps)

    def record_drafted(self) -> None:
        """Something was verified, of the model or without it: nothing rests any longer."""
        self._num_drafted += 1
        self._rest = None

    def record_try(
        self,
        offer: Offer,
        lost: float,
        outcomes: Sequence[Outcome],
        prices: StepPrices,
        free: FreeCandidates,
    ) -> None:
        """Take what a try has lost, in seconds, and what came of its step.

        Where all sequences share one pause, it lasts the longer for the loss.
        """
        # What others have proposed says nothing of the model, and of many sequences it varies more.
        if self._num_own_kept(offer, outcomes) - offer.own >= _SURPRISE:
            self._tries.restart()
        elif _share_tries(prices, free):
            lost = min(lost, _OUTLIER * max(offer.loss, prices.plain_seconds))
            share = _SHARE_BESIDE_FREE if free.has_any else _SHARE_IN_BATCHES
            least = math.ceil(max(lost, 0.0) / (share * prices.plain_seconds))
            self._tries.wait_until(self._num_steps + least)

    def _num_own_kept(self, offer: Offer, outcomes: Sequence[Outcome]) -> int:
        """Candidates of the model that were kept."""
        return sum(
            self._model_kind in outcome.proposal.sources[node]
            for outcome in outcomes
            if outcome.row.sequence.key in offer.keys
            for node in outcome.kept_nodes
        )

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        self._expectations.close(key)


def _share_tries(prices: StepPrices, free: FreeCandidates) -> bool:
    """True if there is one pause between tries for all sequences of a step."""
    return free.has_any or prices.num_sequences > _MANY_SEQUENCES


def _sizes(num: int) -> list[int]:
    """How many rows are looked at together: 1, 4, 16 ... and all, since each takes time."""
    return sorted({num, *(4**power for power in range(num.bit_length()) if 4**power < num)})

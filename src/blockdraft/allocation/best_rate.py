"""The policy that takes the candidates with the most tokens per second. No torch.

A step of n sequences that verifies k candidates costs a target forward of n + k rows, and what was
drafted; it commits one token a sequence, and each candidate with its probability. `BestRate` learns
both, takes the candidates of all sequences in one order of probability, and of them the number that
gives the most expected tokens per second. None is plain decoding.

What drafting may lose is bounded by an account, whatever is believed (`account.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blockdraft.allocation.account import Account
from blockdraft.allocation.backoff import Backoff
from blockdraft.allocation.calibration import Calibration
from blockdraft.allocation.candidates import NO_CANDIDATES, FreeProposal, Order, by_key, ordered
from blockdraft.allocation.costs import StepCosts
from blockdraft.allocation.expectation import Expectation, Expectations, Trust
from blockdraft.allocation.free_worth import FreeWorth
from blockdraft.allocation.offers import Offer, Offers
from blockdraft.allocation.policy import Outcome
from blockdraft.allocation.prices import Price, StepPrices
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.recorder import Phase
from blockdraft.core.sequence import Row

_FORWARD: tuple[Phase, ...] = ("forward", "capture", "choose", "commit")
_DECIDING: tuple[Phase, ...] = ("free", "controller")
"""What plain decoding does without."""
_DRAFT: tuple[Phase, ...] = ("draft", "draft_head", "guess")

_TRY_DEPTH = 3
"""Of the first path, what is verified of a sequence that is tried though nothing is expected."""
_TRY_STEPS = 16
_MOST_TRY_STEPS = 64
"""A sequence that has been tried is not tried again for so many steps. Tries are paid from what
drafting has gained elsewhere, and are not to spend all of that. Where candidates are known without
a model, and no try leads to drafts that pay, there are half as many each time, down to one in
_MOST_TRY_STEPS steps, however many sequences share them."""
_TRY_SHARE = 1 / 500
"""Where candidates are known without a model, tries take no more of the time than this. The first
one of a sequence projects the features of its whole prompt: in a crowd that is a step's time."""
_CROWD = 4
"""With more sequences it takes long to weigh who might draft. After a step in which nobody should,
one step goes without, then two, then four, up to _MOST_UNWEIGHED."""
_MOST_UNWEIGHED = 16
_POOR = 0.6
"""A sequence is tried where the candidates that are known without a model are expected to give no
more tokens than this. Elsewhere a model adds less, and what it adds says nothing of where it is
needed."""
_MOST_UNTRIED = 512
"""But after so many steps without it a model is tried all the same: if much is known all the time,
nothing else tells that it is better than it seemed."""
_DEEP_STEPS = 32
"""After so many drafted steps the whole first path of a sequence is verified, since what is never
verified is never learned."""
_REST_STEPS = 64
"""Where drafting does not pay, and nothing has changed, all is weighed again after so many."""
_IDLE_STEPS = 4
"""Where nothing was weighed, one step of so many is learned from."""
_OUTLIER = 4.0
"""A step loses at most so many plain ones: a machine that stood still tells nothing. The pause
behind a try counts so many times the expected loss at most, or so many plain steps if that is
more."""
_LARGEST_AFTERMATH = 0.25
"""A plain step right behind a drafted one is slower, with cold caches. Drafting is charged for it
with at most this share of a plain step."""
_FIRST_TRUST_BESIDE_FREE = 0.7
"""A model that is asked because what is known without it is poor is asked where guessing is hard,
and gives less there than elsewhere: the default drafter 0.64 of it sampled, and 0.71 greedy."""
_CHEAP_BRANCHES = 0.05
"""Where branches add less than this share to a step, chains need not be priced apart."""


@dataclass(slots=True)
class _Step:
    """The step that was asked about last. forced: paths that are verified in any case, by key.

    free: by key; empty where nothing was asked, or found. of_free: all of them in order, and the
    best number.
    least_rate: tokens per second without the model. is_plain: nothing may be verified. free_saves:
    seconds, against plain steps.
    """

    prices: StepPrices
    free: dict[int, FreeProposal]
    of_free: tuple[Order, Price]
    least_rate: float
    is_plain: bool
    free_saves: float
    offer: Offer | None = None
    is_idle: bool = False
    is_try: bool = False
    forced: dict[int, int] = field(default_factory=dict)
    price: Price | None = None
    predicted: float = 0.0
    has_proposals: bool = False
    """Of the model: it may have none, or have failed."""

    @property
    def has_free(self) -> bool:
        """True if candidates are known without the model."""
        return len(self.of_free[0].nodes) > 0

    def gains_of(self, key: int) -> list[float]:
        """Of what is proposed for a sequence without the model."""
        own = self.free.get(key)
        return [] if own is None else own.gains


class BestRate:
    """Takes the candidates that give the most tokens per second, and none where that is best.

    max_nodes, max_depth: the most candidates that a model proposes for a sequence, and on its
    longest path. lag: tokens whose features it would have to project before it drafts for a row,
    None if it cannot draft now. model_kind: its name as a source. What other drafters propose costs
    nothing and is known before: a model drafts where that gives more tokens per second than their
    candidates alone.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_nodes: int,
        max_depth: int,
        lag: Callable[[Row], int | None] = lambda row: 0,
        *,
        model_kind: str,
    ) -> None:
        self.calibration = Calibration()
        self.account = Account()
        self._costs, self._lag, self._model_kind = costs, lag, model_kind
        self._expectations = Expectations(max_nodes, max_depth)
        self._trust_of_choices = Trust()
        self._trust_of_limits = {False: Trust(), True: Trust(_FIRST_TRUST_BESIDE_FREE)}
        self._free_worth = FreeWorth()
        self._step: _Step | None = None
        self._num_steps = self._num_drafted = self._offered_at = 0
        self._behind_drafts = False
        self._tries = Backoff(_TRY_STEPS, _MOST_TRY_STEPS)
        self._weighing = Backoff(1, _MOST_UNWEIGHED)
        self._rest: tuple[int, float, int] | None = None
        """Sequences that rest, in powers of two, the credit that ends it, the step that does."""

    def asks_free(self, num_rows: int) -> bool:
        """See `Policy`."""
        return self.account.may_lose and self._free_worth.asks(num_rows)

    def limit(
        self, rows: Sequence[Row], num_other_rows: int, free: Sequence[Proposal]
    ) -> list[Row]:
        """See `Policy`."""
        self._num_steps += 1
        self._step = None
        if not rows:
            return []
        num_keys = sum(row.sequence.num_cached for row in rows)
        prices = StepPrices(self._costs, len(rows), num_keys, num_other_rows)
        self.account.open_step(prices.plain_seconds)
        if not (self.account.may_lose or any(free)):
            self._step = _asleep(prices)
            return [row.limited(0) for row in rows]
        order = self._order(rows, free, {}) if any(free) else NO_CANDIDATES
        price = self._best(prices, order)
        self._step = step = _Step(
            prices,
            by_key(rows, free, order) if any(free) else {},
            of_free=(order, price),
            least_rate=price.rate,
            is_plain=self.account.wants_control or not self.account.may_lose,
            free_saves=prices.plain_worth(price.tokens) - price.seconds,
        )
        able = [] if self._is_unweighed(step) else self._able(rows)
        step.is_idle = not able or self._is_resting(able)
        if not step.is_idle and not self.account.wants_control:
            self._decide(step, able)
        if step.offer is not None:
            self._offered_at = self._num_steps
        keys = [] if step.offer is None else step.offer.keys
        depth = 0 if step.offer is None else step.offer.depth
        return [
            row.limited(row.num_model_tokens, depth) if row.sequence.key in keys else row.limited(0)
            for row in rows
        ]

    def _is_unweighed(self, step: _Step) -> bool:
        return step.prices.num > _CROWD and not self._weighing.is_due(self._num_steps)

    def _is_resting(self, able: Sequence[Row]) -> bool:
        if self._rest is None:
            return False
        size, credit, until = self._rest
        same = size == len(able).bit_length()
        return same and self.account.credit < credit and self._num_steps < until

    def _decide(self, step: _Step, able: list[Row]) -> None:
        """Who drafts: those with whom the most tokens per second are expected, or one to try."""
        promising = sorted(able, key=lambda row: -sum(self._expectation(row).gains))
        sizes = _sizes(len(able))
        offers = self._offers(step)
        # Offers take time, and mostly there is none that could pay.
        may_pay = [num for num in sizes if offers.may_pay(promising[:num])]
        made = [offers.of(promising[:num]) for num in may_pay]
        best = max(made, key=lambda offer: offer.rate, default=None)
        if best is not None and best.rate > step.least_rate and self.account.allows(best.loss):
            step.offer = best
            self._tries.succeed()
            self._weighing.succeed()
            if self._num_drafted % _DEEP_STEPS == _DEEP_STEPS - 1:
                row = promising[self._num_drafted // _DEEP_STEPS % len(best.keys)]
                step.forced = {row.sequence.key: row.num_slots}
                step.offer = offers.of(promising[: len(best.keys)], whole=True)
            return
        self._weighing.attempt(self._num_steps)
        poor = [row for row in able if sum(step.gains_of(row.sequence.key)) <= _POOR]
        if not poor and self._num_steps - self._offered_at >= _MOST_UNTRIED:
            poor = able
        if not poor or (step.has_free and not self._tries.is_due(self._num_steps)):
            return
        longest_ago = min(poor, key=self._drafted_at)
        if self._num_steps - self._drafted_at(longest_ago) < _TRY_STEPS:
            return
        made += [offers.of(promising[:num]) for num in sizes if num not in may_pay]
        offer = min(made, key=lambda offer: offer.loss)
        if len(offer.keys) == 1:
            offer = offers.of([longest_ago], least=_TRY_DEPTH, whole=True)
        # What the candidates of others would gain without it is lost as well.
        loss = offer.loss + offer.tokens * (1 / step.prices.plain_rate - 1 / step.least_rate)
        if self.account.allows_try(loss):
            step.offer = offer
            step.forced = {longest_ago.sequence.key: _TRY_DEPTH}
            step.is_try = True
            self._tries.attempt(self._num_steps)
        else:
            credit = self.account.credit_for_try(loss)
            self._rest = len(able).bit_length(), credit, self._num_steps + _REST_STEPS

    def _able(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that a model may draft for, as it sees them."""
        as_seen = [row.for_model() for row in rows]
        return [row for row in as_seen if row.num_draft_tokens > 0 and self._lag(row) is not None]

    def _drafted_at(self, row: Row) -> int:
        step = self._expectations.drafted_at(row)
        return -_TRY_STEPS if step is None else step

    def _expectation(self, row: Row) -> Expectation:
        return self._expectations.of(row, self._num_steps)

    def _offers(self, step: _Step) -> Offers:
        return Offers(
            self._costs,
            step.prices,
            self._expectation,
            self._lag,
            step.free,
            trust=self._trust_of_limits[step.has_free](step.prices.num),
            least_rate=step.least_rate,
        )

    def choose(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Proposal]:
        """See `Policy`. Where no model was to draft, `proposals` are what `limit` was given."""
        step = self._step
        is_plain = step is None or (step.offer is None and (step.is_plain or not any(proposals)))
        if step is None or is_plain:
            return [NOTHING] * len(rows)
        sources = {name for proposal in proposals for name in proposal.sources}
        step.has_proposals = any(self._model_kind in name for name in sources)
        if step.offer is None:
            order, step.price = step.of_free
        else:
            order = self._order(rows, proposals, step.forced)
            step.price = self._best_of(step, order)
        branches = sum(order.branches[: step.price.num_candidates])
        if branches > _CHEAP_BRANCHES * step.price.seconds:
            chains = [proposal.first_chain() for proposal in proposals]
            order_of_chains = self._order(rows, chains, step.forced)
            price = self._best_of(step, order_of_chains)
            if price.rate > step.price.rate:
                step.price, order, proposals = price, order_of_chains, chains
        num = step.price.num_candidates
        self._expect(step, rows, proposals, order)
        step.predicted = sum(order.gains[:num])
        nodes: list[list[int]] = [[] for _ in rows]
        for index, node in zip(order.rows[:num], order.nodes[:num], strict=True):
            nodes[index].append(node)
        return [
            proposal if len(own) == len(proposal) else proposal.only(sorted(own))
            for proposal, own in zip(proposals, nodes, strict=True)
        ]

    def _best_of(self, step: _Step, order: Order) -> Price:
        """The best number of candidates, now that all are proposed."""
        return self._best(
            step.prices,
            order,
            step.offer.drafting if step.offer is not None and step.has_proposals else 0.0,
            least=order.num_forced,
        )

    def _best(
        self, prices: StepPrices, order: Order, drafting: float = 0.0, *, least: int = 0
    ) -> Price:
        trust = self._trust_of_choices(prices.num)
        return prices.best(order.gains, order.branches, drafting, least=least, trust=trust)

    def _order(
        self, rows: Sequence[Row], proposals: Sequence[Proposal], forced: Mapping[int, int]
    ) -> Order:
        chances = [
            self.calibration.probabilities(
                row.sequence.key, own, sampled=row.sequence.params.is_sampled
            )
            for row, own in zip(rows, proposals, strict=True)
        ]
        branch = [self._costs.branch(row.sequence.num_cached) for row in rows]
        first = [forced.get(row.sequence.key, 0) for row in rows]
        return ordered(proposals, chances, branch, first)

    def _expect(
        self, step: _Step, rows: Sequence[Row], proposals: Sequence[Proposal], order: Order
    ) -> None:
        """Learn what the proposals of this step hold."""
        if step.offer is None:
            return
        found: list[list[int]] = [[] for _ in rows]
        for place, index in enumerate(order.rows):
            found[index].append(place)
        for row, proposal, own in zip(rows, proposals, found, strict=True):
            if row.sequence.key not in step.offer.keys:
                continue
            if not any(self._model_kind in name for name in proposal.sources):
                continue
            gains = [order.gains[place] for place in own]
            branches = [order.branches[place] > 0 for place in own]
            chances = dict(zip((order.nodes[place] for place in own), gains, strict=True))
            first = [chances[node] for node in proposal.tree.through([])]
            self._expectations.record(row, self._num_steps, gains, branches, first)

    def record(self, outcomes: Sequence[Outcome], seconds: Mapping[Phase, float]) -> None:
        """See `Policy`."""
        step, behind_drafts = self._step, self._behind_drafts
        self._step = None
        if step is None:
            return
        forward = sum(seconds.get(phase, 0.0) for phase in _FORWARD)
        drafted = step.offer is not None or (
            step.price is not None and step.price.num_candidates > 0
        )
        asked_free = seconds.get("free", 0.0) > 0.0
        if drafted or asked_free:
            # The more is proposed, the more there is to decide.
            deciding = sum(seconds.get(phase, 0.0) for phase in _DECIDING)
            self.account.book(deciding)
            if asked_free:
                prices = step.prices
                plain = prices.plain_seconds
                self._free_worth.record(prices.num, step.free_saves, deciding, plain)
        self._behind_drafts = drafted
        if step.offer is None:
            for trust in self._trust_of_limits.values():
                trust.fade(step.prices.num)
        if not drafted:
            self._trust_of_choices.fade(step.prices.num)
            if step.free:
                self._record_unverified(step, outcomes)
            self._record_plain(step, forward, behind_drafts)
            return
        self._num_drafted += 1
        self._rest = None
        self.account.count(drafted=True, is_control=False)
        num_kept = self._record_verdicts(step, outcomes)
        self._record_drafted(step, num_kept, forward, seconds)

    def _record_plain(self, step: _Step, seconds: float, behind_drafts: bool) -> None:
        expected = step.prices.plain_seconds
        self.account.count(drafted=False, is_control=not behind_drafts)
        # Prompt rows cost otherwise: only the last of them goes through the head.
        if step.prices.num_other_rows:
            return
        if behind_drafts:
            # It is slower, since the drafter's weights need room in the processor's cache too.
            most = _LARGEST_AFTERMATH * expected
            self.account.book(min(max(seconds - expected, -most), most))
        elif not step.is_idle or self._num_steps % _IDLE_STEPS == 0:
            self._costs.record_plain(step.prices.num, step.prices.num_keys, seconds)

    def _record_unverified(self, step: _Step, outcomes: Sequence[Outcome]) -> None:
        """Learn from the tokens of a plain step, or what is not verified is never learned."""
        for outcome in outcomes:
            sequence = outcome.row.sequence
            free = step.free[sequence.key]
            proposal, tree = free.proposal, free.proposal.tree
            if len(sequence.token_ids) <= free.num_tokens or not proposal:
                continue
            nodes = [node for node, depth in enumerate(tree.depths) if depth == 1]
            token_id = sequence.token_ids[free.num_tokens]
            right = [index for index, node in enumerate(nodes) if tree.tokens[node] == token_id]
            sampled = outcome.row.sequence.params.is_sampled
            self.calibration.record(sequence.key, proposal.only(nodes), right, sampled=sampled)

    def _record_verdicts(self, step: _Step, outcomes: Sequence[Outcome]) -> int:
        """Learn what was kept; returns how many candidates."""
        num_kept = 0
        for outcome in outcomes:
            if outcome.proposal:
                self.calibration.record(
                    outcome.row.sequence.key,
                    outcome.proposal,
                    outcome.kept_nodes,
                    sampled=outcome.row.sequence.params.is_sampled,
                )
                num_kept += len(outcome.kept_nodes)
        num = step.prices.num
        self._trust_of_choices.record(num, step.predicted, num_kept)
        if step.offer is not None and step.has_proposals and not step.forced:
            trust = self._trust_of_limits[step.has_free]
            trust.record(num, step.offer.predicted, num_kept)
        return num_kept

    def _record_drafted(
        self, step: _Step, num_kept: int, forward: float, seconds: Mapping[Phase, float]
    ) -> None:
        """Book the step, and learn what its parts cost."""
        prices, price, offer = step.prices, step.price, step.offer
        draft = sum(seconds.get(phase, 0.0) for phase in _DRAFT)
        project = seconds.get("project", 0.0)
        expected = prices.plain_seconds if price is None else price.forward
        worth = prices.plain_worth(prices.num + num_kept)
        if prices.num_other_rows:  # they cost otherwise
            lost = expected + (0.0 if offer is None else offer.drafting) - worth
            self._book(step, lost)
            return
        slower = 1.0
        if offer is not None and step.has_proposals:
            slower = self._costs.record_slowdown(forward / expected, draft / offer.draft)
            self._costs.record_draft(offer.num_slots, offer.draft, draft / slower)
            if offer.num_lagging:
                self._costs.record_project(offer.num_lagging, project)
        if price is not None and price.num_candidates:
            num_rows = prices.num + price.num_candidates
            self._costs.record_forward(prices.num, num_rows, expected, forward / slower)
        lost = min(forward + draft - worth * slower, _OUTLIER * prices.plain_seconds * slower)
        self._book(step, lost + project)

    def _book(self, step: _Step, lost: float) -> None:
        self.account.book(lost)
        if step.is_try and step.has_free and step.offer is not None:
            plain = step.prices.plain_seconds
            # A machine that stood still for a minute would put an end to tries for hours.
            lost = min(lost, _OUTLIER * max(step.offer.loss, plain))
            least = math.ceil(max(lost, 0.0) / (_TRY_SHARE * plain))
            self._tries.wait_until(self._num_steps + least)

    def close(self, key: int) -> None:
        """See `Policy`."""
        self._expectations.close(key)
        self.calibration.close(key)


def _asleep(prices: StepPrices) -> _Step:
    """A plain step about which nothing is asked."""
    plain = prices.plain_seconds
    price = Price(0, float(prices.num), plain, plain)
    return _Step(
        prices,
        {},
        of_free=(NO_CANDIDATES, price),
        least_rate=price.rate,
        is_plain=True,
        free_saves=0.0,
        is_idle=True,
    )


def _sizes(num: int) -> list[int]:
    """Numbers of rows that are looked at: 1, 4, 16 ... and all; each takes time in a crowd."""
    return sorted({num, *(4**power for power in range(num.bit_length()) if 4**power < num)})

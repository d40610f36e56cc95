"""The policy that takes the candidates with the most tokens per second. No torch.

A step of n sequences that verifies k candidates costs a target forward of n + k rows, and what was
drafted; it commits one token a sequence, and each candidate with its probability. `BestRate` learns
both, takes the candidates of all sequences in one order of probability, and of them the number that
gives the most expected tokens per second. None is plain decoding.

What drafting may lose is bounded by an account, whatever is believed (`account.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockdraft.allocation.account import Account
from blockdraft.allocation.calibration import Calibration
from blockdraft.allocation.candidates import (
    NO_CANDIDATES,
    FreeCandidates,
    Order,
    by_key,
    ordered,
    taken,
)
from blockdraft.allocation.costs import StepCosts
from blockdraft.allocation.expectation import Trust
from blockdraft.allocation.free_worth import FreeWorth
from blockdraft.allocation.model_drafts import IDLE, Decision, ModelDrafts
from blockdraft.allocation.policy import Asked, Outcome
from blockdraft.allocation.prices import Price, StepPrices
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.recorder import Phase
from blockdraft.core.sequence import Row

_FORWARD: tuple[Phase, ...] = ("forward", "capture", "choose", "commit")
_DECIDING: tuple[Phase, ...] = ("free", "controller")
"""What plain decoding does without."""
_DRAFT: tuple[Phase, ...] = ("draft", "draft_head", "guess")

_IDLE_STEPS = 4
"""Of steps in which nothing was weighed, only one of so many is learned from. Of those in which
nobody may propose, the others are not even watched."""
_OUTLIER = 4.0
"""A step loses at most so many plain ones: a machine that was suspended tells nothing."""
_LARGEST_AFTERMATH = 0.25
"""A plain step right behind a drafted one is slower, with cold caches. Drafting is charged for it
with at most this share of a plain step."""
_CHEAP_BRANCHES = 0.05
"""Where branches add less than this share to a step, it is not worth pricing chains as well."""


@dataclass(slots=True)
class _Step:
    """The step that was asked about last.

    free: what is known without a model. decision: who drafts. is_plain: nothing may be verified
    that is known without a model. num_steps: since the last watched step. price: of what is
    verified, once that is chosen. predicted: candidates that are expected to be kept of it.
    has_proposals: the model that was to draft has proposed something.
    """

    prices: StepPrices
    free: FreeCandidates
    decision: Decision
    is_plain: bool
    num_steps: int
    price: Price | None = None
    predicted: float = 0.0
    has_proposals: bool = False


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
        self._costs = costs
        self._model = ModelDrafts(costs, self.account, max_nodes, max_depth, lag, model_kind)
        self._trust = Trust()
        self._free_worth = FreeWorth()
        self._step: _Step | None = None
        self._num_steps = 0
        self._asks_model = False
        self._watched_at = 0
        """The number of the last step that was watched."""
        self._behind_drafts = False

    def ask(self, num_sequences: int) -> Asked:
        """See `Policy`."""
        self._num_steps += 1
        self._asks_model = self._model.is_weighed(num_sequences, self._num_steps)
        free = self.account.may_lose and self._free_worth.asks(num_sequences)
        is_watched = (
            free or self._asks_model or self._behind_drafts or self._num_steps % _IDLE_STEPS == 0
        )
        return Asked(free, self._asks_model, is_watched)

    def limit(
        self, rows: Sequence[Row], num_prompt_tokens: int, free: Sequence[Proposal]
    ) -> list[Row]:
        """See `Policy`."""
        self._step = None
        num_steps, self._watched_at = self._num_steps - self._watched_at, self._num_steps
        if not rows:
            return []
        num_keys = sum(row.sequence.num_cached for row in rows)
        prices = StepPrices(self._costs, len(rows), num_keys, num_prompt_tokens)
        self.account.open_step(prices.plain_seconds, num_steps)
        may_lose, has_free = self.account.may_lose, any(free)
        if has_free:
            order = self._order(rows, free, {})
            known = FreeCandidates(by_key(rows, free, order), order, self._best(prices, order))
        else:
            known = FreeCandidates({}, NO_CANDIDATES, prices.plain)
        decision = IDLE
        if self._asks_model and (may_lose or has_free):
            decision = self._model.decide(rows, self._num_steps, prices, known)
        is_plain = not may_lose or (self.account.wants_control and prices.shows_plain_cost)
        self._step = _Step(prices, known, decision, is_plain, num_steps)
        if decision.offer is None:
            return [row.limited(0) for row in rows]
        keys, depth = decision.offer.keys, decision.offer.depth
        return [
            row.limited(row.num_model_tokens, depth) if row.sequence.key in keys else row.limited(0)
            for row in rows
        ]

    def choose(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Proposal]:
        """See `Policy`. Where no model was to draft, `proposals` are what `limit` was given."""
        step = self._step
        if step is None:
            return [NOTHING] * len(rows)
        offer, forced = step.decision.offer, step.decision.forced
        if offer is None:
            if step.is_plain or not any(proposals):
                return [NOTHING] * len(rows)
            order, price = step.free.order, step.free.price
        else:
            step.has_proposals = any(map(self._model.has_part_in, proposals))
            order = self._order(rows, proposals, forced)
            price = self._best_of(step, order)
        branches = sum(order.branches[: price.num_candidates])
        if branches > _CHEAP_BRANCHES * price.seconds:
            chains = [proposal.first_chain() for proposal in proposals]
            order_of_chains = self._order(rows, chains, forced)
            price_of_chains = self._best_of(step, order_of_chains)
            if price_of_chains.rate > price.rate:
                price, order, proposals = price_of_chains, order_of_chains, chains
        if offer is not None:
            self._model.record_proposals(offer, rows, proposals, order)
        step.price = price
        step.predicted = sum(order.gains[: price.num_candidates])
        return taken(proposals, order, price.num_candidates)

    def _best_of(self, step: _Step, order: Order) -> Price:
        """The best number of candidates, now that all are proposed."""
        offer = step.decision.offer
        drafting = offer.drafting if offer is not None and step.has_proposals else 0.0
        return self._best(step.prices, order, drafting, least=order.num_forced)

    def _best(
        self, prices: StepPrices, order: Order, drafting: float = 0.0, *, least: int = 0
    ) -> Price:
        trust = self._trust(prices.num_sequences)
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

    def record(self, outcomes: Sequence[Outcome], seconds: Mapping[Phase, float]) -> None:
        """See `Policy`."""
        step, behind_drafts = self._step, self._behind_drafts
        self._step = None
        if step is None:
            return
        forward = sum(seconds.get(phase, 0.0) for phase in _FORWARD)
        offer, price, num = step.decision.offer, step.price, step.prices.num_sequences
        drafted = offer is not None or (price is not None and price.num_candidates > 0)
        asked_free = seconds.get("free", 0.0) > 0.0
        if drafted or asked_free:
            # The more is proposed, the more there is to decide.
            deciding = sum(seconds.get(phase, 0.0) for phase in _DECIDING)
            self.account.book(deciding)
            if asked_free:
                self._record_free_worth(step, deciding)
        self._behind_drafts = drafted
        if offer is None:
            self._model.record_no_offer(num, step.num_steps)
        if not drafted:
            self._trust.fade(num, step.num_steps)
            if step.free.by_key:
                self._record_unverified(step, outcomes)
            self._record_plain(step, forward, behind_drafts)
            return
        self._model.record_drafted()
        self.account.count(drafted=True, is_control=False)
        num_kept = self._record_verdicts(step, outcomes)
        lost = self._record_drafted(step, num_kept, forward, seconds)
        self.account.book(lost)
        if offer is not None and step.decision.is_try:
            self._model.record_try(offer, lost, outcomes, step.prices, step.free)

    def _record_free_worth(self, step: _Step, took: float) -> None:
        """Compare what it took to propose without a model with what that was expected to save."""
        prices, price = step.prices, step.free.price
        saved = prices.plain_worth(price.tokens) - price.seconds
        self._free_worth.record(prices.num_sequences, saved, took, prices.plain_seconds)

    def _record_plain(self, step: _Step, seconds: float, behind_drafts: bool) -> None:
        expected = step.prices.plain_seconds
        is_control = step.prices.shows_plain_cost and not behind_drafts
        self.account.count(drafted=False, is_control=is_control)
        if not step.prices.shows_plain_cost:
            return
        if behind_drafts:
            # It is slower, since the drafter's weights need room in the processor's cache too.
            most = _LARGEST_AFTERMATH * expected
            self.account.book(min(max(seconds - expected, -most), most))
        elif not step.decision.is_idle or self._num_steps % _IDLE_STEPS == 0:
            num, num_keys = step.prices.num_sequences, step.prices.num_keys
            if self._costs.record_plain(num, num_keys, seconds):
                self.account.control_soon()

    def _record_unverified(self, step: _Step, outcomes: Sequence[Outcome]) -> None:
        """Learn from the tokens of a plain step, or what is not verified is never learned."""
        for outcome in outcomes:
            sequence = outcome.row.sequence
            free = step.free.by_key[sequence.key]
            proposal, tree = free.proposal, free.proposal.tree
            if len(sequence.token_ids) <= free.num_tokens or not proposal:
                continue
            nodes = [node for node, depth in enumerate(tree.depths) if depth == 1]
            token_id = sequence.token_ids[free.num_tokens]
            right = [index for index, node in enumerate(nodes) if tree.tokens[node] == token_id]
            sampled = sequence.params.is_sampled
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
        num, decision = step.prices.num_sequences, step.decision
        self._trust.record(num, step.predicted, num_kept)
        if decision.offer is not None and step.has_proposals and not decision.forced:
            self._model.record_kept(decision.offer, num, num_kept, step.free.has_any)
        return num_kept

    def _record_drafted(
        self, step: _Step, num_kept: int, forward: float, seconds: Mapping[Phase, float]
    ) -> float:
        """Learn what the parts of a step cost; returns the seconds that it has lost."""
        prices, price, offer = step.prices, step.price, step.decision.offer
        draft = sum(seconds.get(phase, 0.0) for phase in _DRAFT)
        project = seconds.get("project", 0.0)
        expected = prices.plain_seconds if price is None else price.forward
        worth = prices.plain_worth(prices.num_sequences + num_kept)
        if prices.num_prompt_tokens:  # they cost otherwise
            return expected + (0.0 if offer is None else offer.drafting) - worth
        slower = 1.0
        if offer is not None and step.has_proposals:
            slower = self._costs.record_slowdown(forward / expected, draft / offer.draft)
            self._costs.record_draft(offer.num_slots, offer.draft, draft / slower)
            if offer.num_lagging:
                self._costs.record_project(offer.num_lagging, project)
        if price is not None and price.num_candidates:
            num_rows = prices.num_sequences + price.num_candidates
            self._costs.record_forward(prices.num_sequences, num_rows, expected, forward / slower)
        lost = min(forward + draft - worth * slower, _OUTLIER * prices.plain_seconds * slower)
        return lost + project

    def close(self, key: int) -> None:
        """See `Policy`."""
        self._model.close(key)
        self.calibration.close(key)

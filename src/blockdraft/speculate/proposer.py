"""Asks the drafters for proposals; what fails in them ends no request."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial

from torch import Tensor

from blockdraft.core.failures import FailureLog
from blockdraft.core.plan import NOTHING, ROOT, Proposal
from blockdraft.core.sequence import Batch, Row, Sequence
from blockdraft.speculate.drafters.base import Drafter, FreeDrafter
from blockdraft.speculate.merge import best_path, merge
from blockdraft.speculate.slot_rates import SlotRates

logger = logging.getLogger(__name__)

_BANNED = -100.0
"""The lowest bias of a token, which asks for an output without it."""


class Proposer:
    """Runs drafters. An exception in one is counted, drops its proposals, and ends no request.

    What fails for a batch is done again row by row, so that only the row at fault goes without.

    drafter: may run a model. free: run none, and propose first. vocab_size: of the target; drafts
    with other tokens are dropped. `joins_trees` may be set: proposals of several drafters then
    become one tree; unless it is set, the best of all paths is taken, and all proposals are chains.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, free: Items[FreeDrafter] = ()) -> None:
        self.drafter = drafter
        self.free = tuple(free)
        self.joins_trees = False
        self.failures = FailureLog("the drafter failed; its proposals are dropped", logger)
        self._vocab_size = vocab_size
        self._slot_rates = SlotRates()

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """All, in the order in which they propose."""
        return (*self.free, self.drafter)

    def free_depth(self, sequence: Sequence) -> int:
        """Tokens of the longest path that is proposed for a sequence without a model."""
        serving = (
            drafter.max_nodes
            for drafter in self.free
            if drafter.serves(sequence) and sequence.allows(drafter.kind)
        )
        return max(serving, default=0)

    def open(self, batch: Batch) -> None:
        """Tell all drafters of the sequences that begin, or begin again."""
        for row in batch:
            self._open_once(row)

    def propose_free(self, batch: Batch) -> list[Proposal]:
        """The proposals of free drafters, before it is decided for whom a model drafts."""
        drafting = [row for row in batch if row.num_draft_tokens]
        if not drafting:
            return [NOTHING] * len(batch)
        found: dict[int, list[Proposal]] = {row.sequence.key: [] for row in batch}
        for drafter in self.free:
            rows = [row for row in drafting if drafter.serves(row.sequence)]
            rows = [row.within(drafter.max_nodes) for row in rows]
            for row, proposal in self._ask(drafter, rows):
                allowed = self._allowed(row, proposal)
                if allowed:
                    found[row.sequence.key].append(allowed)
        merged = [self._merged(row, found[row.sequence.key]) for row in batch]
        return [
            own if self.joins_trees or own.tree.is_chain else best_path([own], row.num_slots)
            for row, own in zip(batch, merged, strict=True)
        ]

    def propose(self, batch: Batch, free: Items[Proposal]) -> list[Proposal]:
        """The proposal of each row: that in `free`, joined with the model's where it may draft."""
        rows = [row for row in batch if row.num_draft_tokens and row.num_model_tokens]
        if not rows:
            self._ask(self.drafter, [])  # it catches up with what must not wait longer
            return list(free)
        others = dict(zip((row.sequence.key for row in batch), free, strict=True))
        drafted = self._ask_model(rows, others)
        return [
            self._merged(row, [own, drafted[row.sequence.key]])
            if row.sequence.key in drafted
            else own
            for row, own in zip(batch, free, strict=True)
        ]

    def _ask_model(self, rows: list[Row], others: Mapping[int, Proposal]) -> dict[int, Proposal]:
        """The model's proposals by key."""
        # Rates are needed only where the model's proposals are compared with those of others.
        contested = {row.sequence.key for row in rows if self.free_depth(row.sequence)}
        for row in rows:
            if row.sequence.key in contested:
                self._slot_rates.learn(row)
        drafted = {}
        for row, proposal in self._ask(self.drafter, [row.for_model() for row in rows]):
            key = row.sequence.key
            if not proposal:
                continue
            if key in contested:
                self._slot_rates.note(row, proposal)
            drafted[key] = self._slot_rates.rated(row, proposal) if others[key] else proposal
        return drafted

    def _allowed(self, row: Row, proposal: Proposal) -> Proposal:
        """The part of a free proposal that the row's grammar allows. Models apply it themselves."""
        constraint, tree = row.sequence.constraint, proposal.tree
        if constraint is None or not proposal:
            return proposal
        allowed: set[int] = set()
        try:
            for leaf in tree.leaves:
                path = tree.path(leaf)
                tokens = [tree.tokens[node] for node in path]
                allowed.update(path[: constraint.num_allowed(row.sequence.output_ids, tokens)])
        except Exception as error:
            self.failures.note(error)
            return NOTHING
        return proposal.only(sorted(allowed))

    def _ask(self, drafter: Drafter, rows: list[Row]) -> list[tuple[Row, Proposal]]:
        """A drafter's proposals for those of the rows that it may draft for, with these rows."""
        rows = [row for row in rows if row.sequence.allows(drafter.kind)]
        proposals = self._proposed(drafter, rows)
        if proposals is None:
            alone = [self._proposed(drafter, [row]) for row in rows]
            proposals = [NOTHING if own is None else own[0] for own in alone]
        return [(row, _possible(row, own)) for row, own in zip(rows, proposals, strict=True)]

    def _merged(self, row: Row, proposals: list[Proposal]) -> Proposal:
        """One proposal of all; no more nodes than the largest of them has."""
        proposals = [proposal for proposal in proposals if proposal]
        if len(proposals) <= 1:
            return proposals[0] if proposals else NOTHING
        if self.joins_trees:
            return merge(proposals, max(map(len, proposals)))
        return best_path(proposals, row.num_slots)

    def _open_once(self, row: Row) -> None:
        sequence = row.sequence
        if not sequence.is_open_to_drafter:
            has_opened = [
                self._succeeds(partial(drafter.open, row, sequence.num_cached))
                for drafter in self.drafters
            ]
            sequence.is_open_to_drafter = True  # not before: an interrupted step is made again
            for drafter, is_open in zip(self.drafters, has_opened, strict=True):
                if not is_open:
                    self._lose(row, drafter)

    def _proposed(self, drafter: Drafter, rows: Items[Row]) -> list[Proposal] | None:
        """A drafter's proposals; None if it fails, or one of them is invalid."""
        try:
            proposals = drafter.propose(rows)
            for row, proposal in zip(rows, proposals, strict=True):
                self._check(row, proposal)
        except Exception as error:
            self.failures.note(error)
            return None
        return proposals

    def _check(self, row: Row, proposal: Proposal) -> None:
        """Refuse what would make a forward fail for all rows, or write outside reserved room."""
        if len(proposal) > row.num_draft_tokens:
            raise ValueError(
                f"{len(proposal)} tokens drafted, at most {row.num_draft_tokens} allowed"
            )
        depth = max(proposal.tree.depths, default=0)
        if depth > row.max_depth:
            raise ValueError(f"a path of {depth} tokens drafted, at most {row.max_depth} allowed")
        for token_id in proposal.tree.tokens:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"drafted token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )

    def committed(
        self, row: Row, token_ids: Items[int], take_features: Callable[[], Tensor] | None
    ) -> None:
        """See Drafter.committed. A drafter that fails here drafts no more for the sequence.

        Nor do those that read features, if `take_features` fails.
        """
        features, are_lost = None, False
        if take_features is not None:
            try:
                features = take_features()
            except Exception as error:
                self.failures.note(error)
                are_lost = True
        for drafter in self.drafters:
            if drafter.kind in row.sequence.lost_drafters:
                continue
            if are_lost and drafter.feature_layers:
                self._lose(row, drafter)
                continue
            try:
                drafter.committed(row, token_ids, features if drafter.feature_layers else None)
            except Exception as error:
                self.failures.note(error)
                self._lose(row, drafter)

    def _lose(self, row: Row, drafter: Drafter) -> None:
        """Let a drafter that failed draft no more for this sequence."""
        row.sequence.lost_drafters.add(drafter.kind)
        if drafter is self.drafter:
            row.sequence.has_lost_context = True
        self._succeeds(partial(drafter.close, row.sequence.key))

    def close(self, sequence: Sequence) -> None:
        """See Drafter.close; the drafters may be told of the sequence again."""
        sequence.is_open_to_drafter = False
        self._slot_rates.close(sequence.key)
        for drafter in self.drafters:
            self._succeeds(partial(drafter.close, sequence.key))

    def _succeeds(self, run: Callable[[], None]) -> bool:
        """Run it; a failure is counted, and the result is False."""
        try:
            run()
        except Exception as error:
            self.failures.note(error)
            return False
        return True


def _possible(row: Row, proposal: Proposal) -> Proposal:
    """Without what cannot be kept: tokens behind one that ends the sequence, or that are banned.

    To end it is banned before `min_tokens`.
    """
    tree, sequence = proposal.tree, row.sequence
    stop_ids, biases = sequence.stop_ids, sequence.params.logit_bias
    if not biases and stop_ids.isdisjoint(tree.tokens):
        return proposal
    num_too_early = sequence.params.min_tokens - sequence.num_output
    possible: list[int] = []
    may_go_on = {ROOT}
    for node, (token_id, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        ends = token_id in stop_ids
        is_banned = ends and tree.depths[node] <= num_too_early
        is_banned = is_banned or biases.get(token_id, 0.0) <= _BANNED
        if parent in may_go_on and not is_banned:
            possible.append(node)
            if not ends:
                may_go_on.add(node)
    return proposal if len(possible) == len(tree) else proposal.only(possible)

"""How far the first chain of a drafter is kept, learned by depth from what the target chose."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row
from blockdraft.speculate.drafters.rates import Rates, RequestRates

_PRIOR = 0.6
"""The rate of each depth before anything is learned."""
_MAX_DEPTH = 32
"""Deeper tokens have the rate of this depth."""


@dataclass(slots=True)
class _Guessed:
    """The first chain that was proposed last, behind the sequence's first `num_before` tokens."""

    num_before: int
    token_ids: list[int]


class SlotRates:
    """Bounds the probabilities of a drafter's proposals by how often earlier ones were right.

    A drafter may be overconfident, or give no probabilities. Without a bound it would then always
    win against the proposals of others. A token of a chain counts as right if the target has chosen
    it and all before it, verified or not.
    """

    def __init__(self) -> None:
        self._everyone = Rates([_PRIOR] * _MAX_DEPTH)
        self._rates: dict[int, RequestRates] = {}
        self._guessed: dict[int, _Guessed] = {}

    def learn(self, row: Row) -> None:
        """Compare the last chain with what the sequence has become."""
        guessed = self._guessed.pop(row.sequence.key, None)
        if guessed is None:
            return
        rates, chosen = self._of(row), row.sequence.token_ids[guessed.num_before :]
        for slot, (own, token_id) in enumerate(zip(guessed.token_ids, chosen, strict=False)):
            rates.record(slot, own == token_id)
            if own != token_id:
                return

    def note(self, row: Row, proposal: Proposal) -> None:
        """Remember the first chain of a proposal."""
        tree = proposal.tree
        chain = [tree.tokens[node] for node in tree.through([])][:_MAX_DEPTH]
        self._guessed[row.sequence.key] = _Guessed(len(row.sequence.token_ids), chain)

    def rated(self, row: Row, proposal: Proposal) -> Proposal:
        """The proposal with probabilities no larger than the rate of each node's depth so far."""
        depths = proposal.tree.depths
        path = self._path(row, max(depths, default=0))
        probabilities = tuple(
            min(own, path[depth - 1])
            for own, depth in zip(proposal.probabilities, depths, strict=True)
        )
        return Proposal(proposal.tree, probabilities, proposal.sources)

    def _path(self, row: Row, num: int) -> Sequence[float]:
        return self._of(row).path([min(slot, _MAX_DEPTH - 1) for slot in range(num)])

    def _of(self, row: Row) -> RequestRates:
        key = row.sequence.key
        if key not in self._rates:
            self._rates[key] = self._everyone.of_request()
        return self._rates[key]

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        self._rates.pop(key, None)
        self._guessed.pop(key, None)

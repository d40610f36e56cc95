"""Who is asked for proposals, what of them is used, and what becomes of drafters that fail."""

from collections.abc import Sequence as Items
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.speculate.drafters.base import DraftCost
from blockdraft.speculate.proposer import Proposer
from tests.samples import decoding_row, make_sample

VOCAB_SIZE = 50


class Told:
    """Proposes what it is given, and writes down what it is told."""

    cost: DraftCost = "none"

    def __init__(
        self,
        kind: str,
        proposal: Proposal = NOTHING,
        *,
        reads: bool = False,
        fails: bool = False,
        serves: bool = True,
    ) -> None:
        self.kind, self.proposal, self.fails = kind, proposal, fails
        self.serves = lambda sample: serves
        self.feature_layers: tuple[int, ...] = (0,) if reads else ()
        self.max_nodes = 4
        self.calls: list[Any] = []
        self.asked: list[Row] = []

    def open(self, row: Row, num_reused: int) -> None:
        self.calls.append("open")

    def lag(self, row: Row) -> int:
        return 0

    def propose(self, rows: Items[Row]) -> list[Proposal]:
        self.calls.append(len(rows))
        self.asked += rows
        return [self.proposal for _ in rows]

    def committed(self, row: Row, token_ids: Items[int], features: Tensor | None) -> None:
        if self.fails:
            raise RuntimeError("boom")
        self.calls.append((list(token_ids), features is not None))

    def close(self, key: int) -> None:
        self.calls.append("close")


def chain(*tokens: int, kind: str = "free") -> Proposal:
    return Proposal.chain(tokens, kind)


def make_row(num_draft_tokens: int = 6, *, key: int = 0, **params: Any) -> Row:
    return decoding_row(make_sample([1, 2], [3], key=key, **params), num_draft_tokens)


def take_features() -> Tensor:
    return torch.ones(1, 2)


def test_a_sequence_that_was_closed_is_opened_again():
    drafter, row = Told("model"), make_row()
    proposer = Proposer(drafter, VOCAB_SIZE)
    proposer.open([row])
    proposer.open([row])
    proposer.close(row.sequence)  # as when it is preempted
    proposer.open([row])
    assert drafter.calls == ["open", "close", "open"]


def test_nothing_is_kept_of_a_sequence_that_was_closed():
    """Where models and others compete, it is learned how good the model is for each sequence."""
    proposer = Proposer(Told("model", chain(4, 5)), VOCAB_SIZE, [Told("free", chain(4))])
    row = make_row()
    for _ in range(2):
        assert proposer.propose([row], proposer.propose_free([row])) != [NOTHING]
    assert proposer._slot_rates._rates
    proposer.close(row.sequence)
    assert not proposer._slot_rates._rates
    assert not proposer._slot_rates._guessed


def test_a_drafter_that_fails_to_take_tokens_drafts_no_more_for_their_sequence():
    bad, good = Told("bad", chain(4), fails=True), Told("good", chain(5))
    model, row, other = Told("model"), make_row(), make_row(key=1)
    proposer = Proposer(model, VOCAB_SIZE, [bad, good])
    for _ in range(2):
        proposer.committed(row, [3], None)
    assert proposer.failures.num_failures == 1
    assert (bad.calls, row.sequence.lost_drafters) == (["close"], {"bad"})
    assert good.calls == model.calls == [([3], False)] * 2
    assert not row.sequence.has_lost_context
    proposals = proposer.propose_free([row, other])
    assert [own.tree.tokens for own in proposals] == [(5,), (4,)]


def test_only_who_reads_features_gets_them():
    reading, other = Told("model", reads=True), Told("free")
    Proposer(reading, VOCAB_SIZE, [other]).committed(make_row(), [3], take_features)
    assert (reading.calls, other.calls) == ([([3], True)], [([3], False)])


def test_features_that_cannot_be_taken_concern_only_those_who_read_them():
    def fail() -> Tensor:
        raise MemoryError

    reading, other, row = Told("model", reads=True), Told("free"), make_row()
    Proposer(reading, VOCAB_SIZE, [other]).committed(row, [3], fail)
    assert (reading.calls, other.calls) == (["close"], [([3], False)])
    assert row.sequence.has_lost_context


def test_a_model_is_called_in_every_step_and_catches_up():
    model = Told("model")
    proposer = Proposer(model, VOCAB_SIZE)
    assert proposer.propose([make_row(0)], [NOTHING]) == [NOTHING]
    assert proposer.propose([make_row().limited(0)], [chain(7)]) == [chain(7)]
    assert model.calls == [0, 0]


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal(Tree((1, 2, 3, 4), (ROOT,) * 4), (0.1,) * 4, ("model",) * 4),  # too many
        chain(1, 2, 3),  # too long a path
        chain(VOCAB_SIZE),
        chain(-1),
    ],
    ids=["many", "long", "beyond", "negative"],
)
def test_proposals_that_would_fail_in_the_target_are_dropped(proposal: Proposal):
    proposer = Proposer(Told("model", proposal), VOCAB_SIZE)
    small = Row(make_row().sequence, [3], 3, max_depth=2)
    assert proposer.propose([small], [NOTHING]) == [NOTHING]
    assert proposer.failures.num_failures == 2  # with others, and alone


def test_each_drafter_sees_what_it_may_propose():
    free, model, idle = Told("free"), Told("model"), Told("idle", serves=False)
    proposer = Proposer(model, VOCAB_SIZE, [free, idle])
    row = make_row(6).limited(3, 2)
    proposer.propose([row], proposer.propose_free([row]))
    assert [own.num_draft_tokens for own in free.asked] == [free.max_nodes]
    assert not idle.asked
    assert [(own.num_draft_tokens, own.max_depth) for own in model.asked] == [(3, 2)]


def test_where_trees_are_not_verified_the_best_path_of_a_free_drafter_is_taken():
    tree = Proposal(Tree((4, 5, 6), (ROOT, ROOT, 1)), (0.5, 0.4, 0.3), ("free",) * 3)
    proposer = Proposer(Told("model"), VOCAB_SIZE, [Told("free", tree)])
    (path,) = proposer.propose_free([make_row()])
    assert path.tree == Tree((5, 6), (ROOT, 0))
    proposer.joins_trees = True
    assert proposer.propose_free([make_row()]) == [tree]


def test_joined_trees_have_no_more_nodes_than_the_largest_of_them():
    free, model = Told("free", chain(4, 5)), Told("model", chain(6, 7, 8, kind="model"))
    proposer = Proposer(model, VOCAB_SIZE, [free])
    proposer.joins_trees = True
    row = make_row()
    (joined,) = proposer.propose([row], proposer.propose_free([row]))
    assert len(joined) == 3


class Below:
    """Allows tokens below a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def allowed(self, output_ids: list[int], ahead: list[int]) -> None:
        return None

    def num_allowed(self, output_ids: list[int], ahead: list[int]) -> int:
        return next((i for i, token_id in enumerate(ahead) if token_id >= self.limit), len(ahead))


def test_of_free_proposals_what_the_grammar_allows_is_left():
    tree = Proposal(Tree((4, 9, 5, 9), (ROOT, ROOT, 0, 2)), (0.5, 0.4, 0.3, 0.2), ("free",) * 4)
    proposer = Proposer(Told("model"), VOCAB_SIZE, [Told("free", tree)])
    row = make_row()
    row.sequence.constraint = Below(9)
    (left,) = proposer.propose_free([row])
    assert left.tree == Tree((4, 5), (ROOT, 0))

"""Two drafters as bad as can be, at the cost of the real one: what an engine must survive."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from blockdraft.core.errors import ConfigError
from blockdraft.core.plan import Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.llm import LLM

Fault = Literal["noise", "wrong"]


def make_bad(llm: LLM, fault: Fault) -> None:
    """Make a loaded drafter bad, in place: it works as before, and something else is handed on.

    "noise": random tokens. "wrong": every guess becomes its neighbor in the vocabulary, so what was
    right is wrong. What drafts without a model, such as lookup, is left as it is.

    Raises:
        ConfigError: there is no drafter.
    """
    if llm.drafter_folder is None:
        raise ConfigError(f"there is no drafter to make {fault}; name one with --drafter")
    drafter, vocab_size = llm.engine.drafter, llm.engine.target.vocab_size
    draw = random.Random(0).randrange
    shifts: dict[Fault, Callable[[], int]] = {"noise": lambda: draw(vocab_size), "wrong": lambda: 1}
    propose, shift = drafter.propose, shifts[fault]

    def propose_badly(rows: Sequence[Row]) -> list[Proposal]:
        return [_shifted(proposal, shift, vocab_size, drafter.kind) for proposal in propose(rows)]

    drafter.propose = propose_badly  # type: ignore[method-assign]


def _shifted(
    proposal: Proposal, shift: Callable[[], int], vocab_size: int, source: str
) -> Proposal:
    """The same tree of other tokens, believed in as before.

    Siblings move alike, since no two of them may hold the same token.
    """
    shifts: defaultdict[int, int] = defaultdict(shift)
    tokens = [
        (token_id + shifts[parent]) % vocab_size
        for token_id, parent in zip(proposal.tree.tokens, proposal.tree.parents, strict=True)
    ]
    tree = Tree(tuple(tokens), proposal.tree.parents)
    return Proposal(tree, proposal.probabilities, (source,) * len(tree))

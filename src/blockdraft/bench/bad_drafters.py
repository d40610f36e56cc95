"""Two drafters as bad as can be, at the cost of the real one: what an engine must survive."""

import random
from collections.abc import Callable, Sequence
from typing import Literal

from blockdraft.core.errors import ConfigError
from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row
from blockdraft.llm import LLM

Fault = Literal["noise", "wrong"]


def make_bad(llm: LLM, fault: Fault) -> None:
    """Make a loaded drafter bad, in place: it works as before, and something else is handed on.

    "noise": random tokens. "wrong": every guess becomes its neighbor in the vocabulary, so what was
    right is wrong.

    Raises:
        ConfigError: there is no drafter.
    """
    if llm.drafter_folder is None:
        raise ConfigError(f"there is no drafter to make {fault}; name one with --drafter")
    drafter, vocab_size = llm.engine.drafter, llm.engine.target.vocab_size
    draw = random.Random(0).randrange
    changes: dict[Fault, Callable[[int], int]] = {
        "noise": lambda token_id: draw(vocab_size),
        "wrong": lambda token_id: (token_id + 1) % vocab_size,
    }
    propose, change = drafter.propose, changes[fault]

    def propose_badly(rows: Sequence[Row]) -> list[Proposal]:
        return [
            Proposal.chain([change(token_id) for token_id in proposal.tree.tokens], fault)
            for proposal in propose(rows)
        ]

    drafter.propose = propose_badly  # type: ignore[method-assign]

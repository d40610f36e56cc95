"""A drafter that knows the answer, errs at random, and drafts blocks of every width."""

import random
from collections.abc import Sequence as Ids

from blockdraft.core.sequence import Sequence
from tests.fakes import OracleDrafter


class ErringOracle(OracleDrafter):
    """Drafts from none to all tokens that it may, each right with one of some chances."""

    def __init__(
        self, max_draft_tokens: int, vocab_size: int, accuracies: Ids[float], seed: int
    ) -> None:
        super().__init__(max_draft_tokens)
        self.vocab_size = vocab_size
        self.accuracies = tuple(accuracies)
        self.random = random.Random(f"oracle {seed}")

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        length = num if self.random.random() < 0.15 else self.random.randint(0, num)
        accuracy = self.random.choice(self.accuracies)
        return [
            token_id if self.random.random() < accuracy else self.random.randrange(self.vocab_size)
            for token_id in super().guess(sequence, length)
        ]

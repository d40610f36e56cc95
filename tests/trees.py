"""Trees of candidates around a known answer, and a drafter that proposes them."""

import random
from collections.abc import Sequence

from blockdraft.core.plan import ROOT, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from tests.fakes import OracleDrafter
from tests.tiny import VOCAB_SIZE

MAX_NODES = 8


def tree_around(
    future: Sequence[int], draw: random.Random, num_nodes: int, vocab_size: int = VOCAB_SIZE
) -> Tree:
    """Random branches, of which some follow `future`; the true child may come after others."""
    tokens: list[int] = []
    parents: list[int] = []
    on_path = {ROOT: 0}
    while len(tokens) < num_nodes:
        parent = draw.choice([ROOT, *range(len(tokens)), *on_path, *on_path])
        depth = on_path.get(parent, len(future))
        is_right = depth < len(future) and draw.random() < 0.6
        token = future[depth] if is_right else draw.randrange(vocab_size)
        if (token, parent) in zip(tokens, parents, strict=True):
            continue
        if depth < len(future) and token == future[depth]:
            on_path[len(tokens)] = depth + 1
        tokens.append(token)
        parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


class TreeDrafter(OracleDrafter):
    """Knows the plain output of each sequence, and proposes trees around it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(MAX_NODES)
        self.draw = random.Random(seed)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [self._tree(row.sequence, row.num_draft_tokens) for row in rows]

    def _tree(self, sequence: Sample, num: int) -> Proposal:
        future = self.known[sequence.key][sequence.num_output :]
        tree = tree_around(future, self.draw, self.draw.randint(min(3, num), num))
        return Proposal(tree, (1.0,) * len(tree), (self.kind,) * len(tree))

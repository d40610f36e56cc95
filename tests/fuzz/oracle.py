"""A drafter that knows the answer, errs at random, and drafts chains and trees of every width."""

import random
from collections.abc import Sequence as Ids

from blockdraft.core.plan import ROOT, Proposal, Tree
from blockdraft.core.sequence import Row, Sequence
from tests.fakes import OracleDrafter


class ErringOracle(OracleDrafter):
    """Drafts from none to all tokens that it may, each right with one of some chances."""

    def __init__(self, max_nodes: int, vocab_size: int, accuracies: Ids[float], seed: int) -> None:
        super().__init__(max_nodes)
        self.vocab_size = vocab_size
        self.accuracies = tuple(accuracies)
        self.random = random.Random(f"oracle {seed}")

    def propose(self, rows: Ids[Row]) -> list[Proposal]:
        """Chains, and every third time a tree around one."""
        return [
            self._branched(proposal, row.num_draft_tokens)
            if len(proposal) and self.random.random() < 0.3
            else proposal
            for row, proposal in zip(rows, super().propose(rows), strict=True)
        ]

    def _branched(self, chain: Proposal, most: int) -> Proposal:
        """The chain's nodes and random ones beside and below them, in random order."""
        tokens, parents = list(chain.tree.tokens), list(chain.tree.parents)
        pairs = set(zip(parents, tokens, strict=True))
        for _ in range(self.random.randint(0, most - len(tokens))):
            pair = self.random.randrange(ROOT, len(tokens)), self.random.randrange(self.vocab_size)
            if pair not in pairs:
                pairs.add(pair)
                parents.append(pair[0])
                tokens.append(pair[1])
        tree = _shuffled(Tree(tuple(tokens), tuple(parents)), self.random)
        return Proposal(tree, (1.0,) * len(tree), (self.kind,) * len(tree))

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        length = num if self.random.random() < 0.15 else self.random.randint(0, num)
        accuracy = self.random.choice(self.accuracies)
        return [
            token_id if self.random.random() < accuracy else self.random.randrange(self.vocab_size)
            for token_id in super().guess(sequence, length)
        ]


def _shuffled(tree: Tree, draw: random.Random) -> Tree:
    """The same tree with its nodes in another order, parents still before their children."""
    order: list[int] = []
    ready = [node for node, parent in enumerate(tree.parents) if parent == ROOT]
    while ready:
        node = ready.pop(draw.randrange(len(ready)))
        order.append(node)
        ready += [child for child, parent in enumerate(tree.parents) if parent == node]
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(order)}
    return Tree(
        tuple(tree.tokens[node] for node in order),
        tuple(place[tree.parents[node]] for node in order),
    )

"""A machine whose costs and drafter are known, for the allocation to be measured against."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from blockdraft.allocation.best_rate import BestRate
from blockdraft.allocation.costs import KeyCosts, StepCosts
from blockdraft.allocation.policy import Outcome, Policy
from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.core.sequence import Row
from tests.samples import make_sample

KIND = "sim"
"""The source of what is drafted."""
Rates = Callable[[int, float], Sequence[float]]
"""Acceptance by position, each given that all before were accepted, of a sequence at a time."""
Believed = Callable[[float], float]
"""What the drafter believes of a token that is right with a probability."""


@dataclass
class Machine:
    """Seconds of a step, without noise. The defaults are those of a small model on two cores."""

    base: float = 0.016
    row: float = 0.00045
    draft_base: float = 0.005
    slot: float = 0.0002
    project_base: float = 0.0003
    project_row: float = 0.00002
    branch: float = 0.0
    aftermath: float = 1.0
    """Of drafts, on a step behind them that has none: so many times its seconds."""
    slowdown: Callable[[float], float] = lambda now: 1.0

    def forward(self, num_rows: int, num_branches: int = 0) -> float:
        return self.base + self.row * (num_rows - 1) + self.branch * num_branches

    def draft(self, num_slots: int) -> float:
        return self.draft_base + self.slot * num_slots if num_slots else 0.0

    def project(self, num_tokens: int) -> float:
        return self.project_base + self.project_row * num_tokens if num_tokens else 0.0

    def costs(self, error: float = 0.0) -> StepCosts:
        """What is measured at load; `error` tilts the costs of rows."""
        rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return StepCosts(
            [(n, self.forward(n)) for n in rows[:4]],
            [(n, self.forward(n) * (1 + error * (n > 1))) for n in rows],
            [(n, self.draft(n)) for n in (2, 6, 16, 32, 96, 192, 512)],
            [(n, self.project(n)) for n in (1, 256)],
            KeyCosts(branch=self.branch),
        )


@dataclass
class Text:
    """What a drafter makes of texts: tokens right by `rates`, and `width` - 1 others beside each.

    believed: its own probability of a token that is right with some probability.
    """

    rates: Rates
    width: int = 1
    believed: Believed = lambda rate: rate

    def proposal(self, row: Row, now: float) -> tuple[Proposal, list[float]]:
        """As many nodes as may be, and the true probability of each given its parent."""
        rates = self.rates(row.sequence.key, now)[: row.num_slots]
        tokens, parents, chances, beliefs = [], [], [], []
        parent, above = ROOT, 1.0
        for rate in rates:
            first = len(tokens)
            for rank in range(self.width):
                if len(tokens) < row.num_draft_tokens:
                    chance = rate if rank == 0 else (1 - rate) * 0.4**rank
                    tokens.append(rank)
                    parents.append(parent)
                    chances.append(chance)
                    beliefs.append(above * min(self.believed(chance), 1.0))
            parent, above = first, beliefs[first]
        sources = (KIND,) * len(tokens)
        return Proposal(Tree(tuple(tokens), tuple(parents)), tuple(beliefs), sources), chances


@dataclass
class Result:
    seconds: float = 0.0
    num_tokens: int = 0
    plain_seconds: float = 0.0
    """What plain decoding takes for as many tokens."""
    limits: list[list[int]] = field(default_factory=list)
    plans: list[list[int]] = field(default_factory=list)
    """Candidates that were verified, by row."""

    @property
    def over_plain(self) -> float:
        return self.seconds / self.plain_seconds

    @property
    def share_drafted(self) -> float:
        return sum(map(any, self.limits)) / len(self.limits)


def make_row(key: int, limit: int, depth: int = 5, *, num_cached: int = 1, **params) -> Row:
    sample = make_sample([0], [0] * num_cached, key=key, **{"max_tokens": 1000, **params})
    sample.num_cached = num_cached
    return Row(sample, [0], limit, max_depth=depth)


def best_rate(
    machine: Machine, max_nodes: int = 5, error: float = 0.0, max_depth: int = 5
) -> BestRate:
    return BestRate(machine.costs(error), max_nodes, max_depth, model_kind=KIND)


def always(*rates: float) -> Rates:
    return lambda key, now: rates


def walk(
    proposal: Proposal, verified: Proposal, chances: Sequence[float], luck: random.Random
) -> list[int]:
    """The path of verified nodes that the target keeps."""
    place = {}
    for node in range(len(verified)):
        path = tuple(verified.tree.tokens[i] for i in verified.tree.path(node))
        place[path] = node
    kept: list[int] = []
    path: tuple[int, ...] = ()
    parent = ROOT
    while True:
        children = [i for i, above in enumerate(proposal.tree.parents) if above == parent]
        draw, choice = luck.random(), None
        for child in children:
            draw -= chances[child]
            if draw < 0:
                choice = child
                break
        if choice is None:
            return kept
        path = (*path, proposal.tree.tokens[choice])
        if path not in place:
            return kept
        kept.append(place[path])
        parent = choice


def limited(
    policy: Policy,
    rows: list[Row],
    num_prompt_tokens: int = 0,
    free: Sequence[Proposal] | None = None,
) -> list[Row]:
    """The rows as a policy limits them that is asked first; nothing is free unless given."""
    if not policy.ask(len(rows)).is_watched:
        return [row.limited(0) for row in rows]
    return policy.limit(rows, num_prompt_tokens, [NOTHING] * len(rows) if free is None else free)


def num_branches(proposal: Proposal) -> int:
    return max(0, len(proposal.tree.leaves) - 1)


def simulate(
    policy: Policy,
    machine: Machine,
    text: Text | Rates,
    num_sequences: int,
    *,
    seconds: float = 60.0,
    limit: int = 5,
    depth: int = 5,
    noise: float = 0.05,
    outliers: float = 0.005,
    limits: Sequence[int] | None = None,
    seed: int = 0,
) -> Result:
    """Decode with `num_sequences` sequences that never end. Outliers are steps of 4 times."""
    text = text if isinstance(text, Text) else Text(text)
    luck, result = random.Random(seed), Result()
    asked = [limit if limits is None else limits[key] for key in range(num_sequences)]
    lag = [0] * num_sequences
    if isinstance(policy, BestRate):
        policy._model._lag = lambda row: lag[row.sequence.key]
    rows = [make_row(key, most, depth) for key, most in enumerate(asked)]
    while result.seconds < seconds:
        drafting = [row.for_model() for row in limited(policy, rows)]
        found = [row.num_draft_tokens for row in drafting]
        result.limits.append(found)
        slowdown = machine.slowdown(result.seconds)
        made = [
            text.proposal(row, result.seconds) if row.num_draft_tokens else (NOTHING, [])
            for row in drafting
        ]
        verified = policy.choose(drafting, [own for own, _ in made])
        result.plans.append([len(own) for own in verified])
        kept = [
            walk(own, chosen, chances, luck)
            for (own, chances), chosen in zip(made, verified, strict=True)
        ]
        blocks = [row.num_slots for row in drafting if row.num_draft_tokens]
        num_slots = len(blocks) * (1 + max(blocks, default=0))
        projected = 0
        for key, num in enumerate(found):
            if num:
                projected, lag[key] = projected + lag[key], 0
            lag[key] += 1 + len(kept[key])
        num_tokens = sum(1 + len(own) for own in kept)

        def noisy(exact: float) -> float:
            factor = luck.lognormvariate(0.0, noise) * slowdown  # noqa: B023
            return exact * factor * (4.0 if luck.random() < outliers else 1.0)

        forward = machine.forward(
            num_sequences + sum(map(len, verified)), sum(map(num_branches, verified))
        )
        for before, now in pairwise(result.limits[-2:]):
            if any(before) and not any(now):
                forward *= machine.aftermath
        outcomes = [
            Outcome(row, own, nodes)
            for row, own, nodes in zip(drafting, verified, kept, strict=True)
        ]
        times = {
            "controller": 0.0002,
            "forward": noisy(forward),
            "draft": noisy(machine.draft(num_slots)),
            "project": noisy(machine.project(projected)),
        }
        policy.record(outcomes, times)
        # Noise and outliers fall on plain decoding too, so seconds without them are compared.
        exact = forward + machine.draft(num_slots) + machine.project(projected)
        result.seconds += exact * slowdown
        result.num_tokens += num_tokens
        plain = machine.forward(num_sequences) / num_sequences
        result.plain_seconds += plain * num_tokens * slowdown
    return result

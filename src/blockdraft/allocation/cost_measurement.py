"""What the phases of a step cost on this machine, measured once when an engine is loaded."""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sizes
from contextlib import contextmanager
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from blockdraft.allocation.costs import NO_KEY_COSTS, KeyCosts, StepCosts
from blockdraft.allocation.policy import DEFAULT_NUM_DRAFT_TOKENS
from blockdraft.core.errors import ModelError
from blockdraft.core.machine import OtherWork, num_cpus
from blockdraft.core.plan import NOTHING, ROOT, ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.remembered import once
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.core.threads import others_at_start
from blockdraft.models.target.interface import Target
from blockdraft.speculate.drafters.base import Drafter

FORWARD_ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 48)
PLAIN_SEQUENCES = (1, 2, 4, 8)
DRAFT_SEQUENCES = (1, 2, 8)
"""The sizes that are timed, which takes two seconds on two cores. Costs of other sizes are
interpolated or extrapolated, and then learned."""
NUM_BRANCHES = 15
"""Of the tree that is timed, one node each."""
NUM_KEYS = 256
"""Tokens of the context behind which keys and branches are timed; fewer if the target takes fewer.
"""
FEWEST_KEYS = 32
"""With fewer, what keys add is lost in the noise, and taken to be nothing."""
MOST_BUSY = 0.1
"""The share of the cores that other programs may keep busy for costs to serve every later start."""
_KEYS = range(-100, -100 + max(PLAIN_SEQUENCES))
"""Keys of the sequences that are timed; those of the engine are not negative."""

logger = logging.getLogger(__name__)

_Size = TypeVar("_Size")
_Part = Literal["plain", "forward", "draft"]


def measure_costs(target: Target, drafter: Drafter) -> StepCosts:
    """Time plain steps, forwards with chains and trees, draft forwards and projections.

    Where other programs compute meanwhile, some times are too long, and not those of all sizes
    alike. Such times serve later starts only while others keep as many cores busy.
    """
    _, (plain, forward, draft, project, keys) = once(
        "costs", lambda: _measure_beside_others(target, drafter), _still_hold
    )
    by_level = drafter.cost == "level"
    return StepCosts(plain, forward, draft, project, KeyCosts(*keys), drafts_by_level=by_level)


def _measure_beside_others(target: Target, drafter: Drafter) -> list[Any]:
    """How many cores others kept busy, and what `_measure` found."""
    others = OtherWork()
    costs = _measure(target, drafter)
    busy = others.busy_cores() or 0.0
    if not _is_calm(busy):
        logger.info(
            "other programs kept %.1f of %d cores busy while steps were timed: "
            "these timings may be off; restart on an idle machine to measure again",
            *(busy, num_cpus()),
        )
    return [busy, costs]


def _still_hold(found: list[Any]) -> bool:
    busy: float = found[0]
    return _is_calm(busy) or _is_calm(busy - others_at_start())


def _is_calm(busy: float) -> bool:
    return busy <= MOST_BUSY * num_cpus()


def _measure(target: Target, drafter: Drafter) -> list[Any]:
    """What `StepCosts` takes, as JSON has it."""
    key_costs, project_points = _context_costs(target, drafter)
    sequences = _sequences(len(_KEYS))
    longest, *others = sequences
    with (
        _opened(target, drafter, [longest], 1 + max(FORWARD_ROWS)),
        _opened(target, drafter, others),
    ):
        rows = [_drafting_row(sequence, drafter) for sequence in sequences]
        # One sequence whose rows are all candidates but one; the logits of all are computed.
        long_row = Row(longest, [0], 0)
        plain = [PlannedRow(row) for row in rows]
        output = target.forward(ForwardPlan(plain))
        for index, planned in enumerate(plain):
            target.keep(planned, [])
            drafter.open(planned.row, 0)
            drafter.committed(planned.row, [0], output.features_of(index))
            planned.row.sequence.token_ids.append(0)
            planned.row.sequence.num_cached = 1
        drafter.propose(rows)  # catches up with the features, which is no part of a draft
        runs: dict[_Part, Callable[[int], object]] = {
            "plain": lambda num: _forward(target, plain[:num]),
            "forward": lambda num: _forward(target, [PlannedRow(long_row, _chain(num - 1))]),
            "draft": lambda num: drafter.propose(rows[:num]),
        }
        points = measure_points(lambda run: runs[run[0]](run[1]), list(_runs()))
    plain_points, forward_points, draft_points = (
        [(num, seconds) for (part, num), seconds in points if part == wanted]
        for wanted in get_args(_Part)
    )
    if drafter.cost == "level":
        draft_points = [(num, seconds / drafter.max_nodes) for num, seconds in draft_points]
    else:
        num_slots = 1 + drafter.max_nodes
        draft_points = [(num * num_slots, seconds) for num, seconds in draft_points]
    keys = [key_costs.key, key_costs.branch, key_costs.branch_key]
    return [plain_points, forward_points, draft_points, project_points, keys]


def _drafting_row(sequence: Sequence, drafter: Drafter) -> Row:
    """A row that drafts as deep as the drafter goes; a tree, if that needs other forwards."""
    num = drafter.max_nodes
    if drafter.cost == "level":
        num = max(num, DEFAULT_NUM_DRAFT_TOKENS)
    return Row(sequence, [0], num, max_depth=drafter.max_nodes)


def _runs() -> Iterator[tuple[_Part, int]]:
    """All that is timed, in the order of a round.

    Plain steps follow each other. Forwards and drafts take turns, as in decoding, because weights
    that were read last are read faster.
    """
    for num in PLAIN_SEQUENCES:
        yield "plain", num
    for num, num_drafting in zip_longest(FORWARD_ROWS, DRAFT_SEQUENCES):
        yield "forward", num
        if num_drafting is not None:
            yield "draft", num_drafting


def _context_costs(target: Target, drafter: Drafter) -> tuple[KeyCosts, list[tuple[int, float]]]:
    """What keys and branches add to a forward, and what the features of a context cost.

    One row, a chain and a tree of as many nodes are timed behind one token, and behind a context.
    """
    num_keys = min(NUM_KEYS, target.max_context - max(FORWARD_ROWS))
    if num_keys < FEWEST_KEYS:
        return NO_KEY_COSTS, []
    other, sequence = _sequences(2)
    sequence.token_ids *= num_keys
    trees = [NOTHING, _chain(NUM_BRANCHES), _star(NUM_BRANCHES)]
    with (
        _opened(target, drafter, [other], 1 + NUM_BRANCHES),
        _opened(target, drafter, [sequence], num_keys + 1 + NUM_BRANCHES),
    ):
        prompt = PlannedRow(Row(sequence, list(sequence.token_ids), 0))
        short = Row(other, [0], 0)
        near = _medians(lambda tree: _forward(target, [PlannedRow(short, tree)]), trees)
        features = target.forward(ForwardPlan([prompt])).features_of(0)
        target.keep(prompt, [])
        sequence.token_ids.append(0)
        sequence.num_cached = num_keys
        row = Row(sequence, [0], drafter.max_nodes)
        far = _medians(lambda tree: _forward(target, [PlannedRow(row, tree)]), trees)
        # The first time tells nothing: for a card kernels are compiled then, which takes seconds.
        for token_id in (1, 0):
            project = _project_seconds(drafter, row, token_id, features)
    near_branch, far_branch = (
        max(0.0, tree - chain) / (NUM_BRANCHES - 1) for _, chain, tree in (near, far)
    )
    costs = KeyCosts(
        key=max(0.0, (far[0] - near[0]) / num_keys),
        branch=near_branch,
        branch_key=max(0.0, far_branch - near_branch) / num_keys,
    )
    # Taken to be proportional; that few tokens take longer is learned in the first steps.
    return costs, [(1, project / num_keys), (num_keys, project)] if project > 0 else []


def _project_seconds(drafter: Drafter, row: Row, token_id: int, features: Tensor | None) -> float:
    """By how much a draft takes longer that has to project the features of all that is cached.

    token_id: of all these tokens. Another one than before: a drafter may keep what it has computed.
    """
    sequence, num_keys = row.sequence, row.sequence.num_cached
    prompt = Row(sequence, [token_id] * num_keys, 0)
    drafter.close(sequence.key)
    sequence.token_ids[:num_keys] = prompt.new_ids
    sequence.num_cached = 0
    drafter.open(prompt, 0)
    drafter.committed(prompt, prompt.new_ids, features)
    sequence.num_cached = num_keys
    start = perf_counter()
    drafter.propose([row])
    projected = perf_counter()
    drafter.propose([row])
    return 2 * projected - start - perf_counter()


def _medians(run: Callable[[Proposal], object], trees: Sizes[Proposal]) -> list[float]:
    points = measure_points(lambda place: run(trees[place]), range(len(trees)))
    return [seconds for _, seconds in points]


def _chain(num: int) -> Proposal:
    return Proposal.chain([0] * num, "none")


def _star(num: int) -> Proposal:
    """Nodes that are all leaves."""
    return Proposal(Tree(tuple(range(num)), (ROOT,) * num), (0.0,) * num, ("none",) * num)


def _forward(target: Target, rows: list[PlannedRow]) -> None:
    output = target.forward(ForwardPlan(rows))
    output.logits[-1, 0].item()  # waits for a device that works on after the call
    for planned in rows:
        target.truncate(planned.row.sequence.key, planned.row.sequence.num_cached)


def _sequences(number: int) -> list[Sequence]:
    params = SamplingParams(max_tokens=max(FORWARD_ROWS))
    return [
        Sequence(key, params, 0, 0, frozenset(), token_ids=[0], num_prompt=1)
        for key in _KEYS[:number]
    ]


@contextmanager
def _opened(
    target: Target, drafter: Drafter, sequences: list[Sequence], num_tokens: int = 1
) -> Iterator[None]:
    """With room for so many tokens of each."""
    try:
        for sequence in sequences:
            target.memory.open(sequence.key, sequence.token_ids, with_context=True)
            if not target.memory.reserve(sequence.key, num_tokens):
                raise ModelError(
                    f"the KV cache of {target.memory.num_tokens} tokens is too small to time a "
                    "step; give more --memory"
                )
        yield
    finally:
        for sequence in sequences:
            target.close(sequence.key)
            drafter.close(sequence.key)


def measure_points(
    run: Callable[[_Size], object],
    sizes: Sizes[_Size],
    clock: Callable[[], float] = perf_counter,
) -> list[tuple[_Size, float]]:
    """Median seconds of `run(size)` for each size, of five runs.

    The sizes take turns, so that a busy moment of the machine falls on all of them.
    """
    seconds: dict[_Size, list[float]] = {size: [] for size in sizes}
    for _ in range(5):
        for size in sizes:
            start = clock()
            run(size)
            seconds[size].append(clock() - start)
    return [(size, median(times)) for size, times in seconds.items()]

"""The choices of many rows together. Each is what `reference.choose_row` says of its row alone."""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as IdSequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import overload

import numpy as np
import torch
from torch import Tensor

from blockdraft.core.plan import Tree
from blockdraft.core.sequence import Sequence
from blockdraft.kernels.backends import first_largest, sampled, widened
from blockdraft.speculate.sampler.filters import filters
from blockdraft.speculate.sampler.logits import Place, Scores, processed
from blockdraft.speculate.sampler.noise import MIN_NOISE, large_noise
from blockdraft.speculate.sampler.race import winners
from blockdraft.speculate.sampler.reference import (
    NO_CHOICE,
    Undecided,
    choose_row,
    of_processed,
    without_noise,
)

TILE_BYTES = 16 * 2**20
"""Logits in float32 that are copied at once, or one row if that has more."""

Choice = int | Exception
"""A token id, NO_CHOICE, or why there is none for this row."""

logger = logging.getLogger(__name__)


Chooser = Callable[[int], int]
"""The choice at a row of a walk: a token id or NO_CHOICE. Raises what keeps this row from one."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Rows of one sequence at which a caller asks for choices: `logits` [rows, V] and their places.

    The tokens ahead of a place may become known while choices are asked for. skips: the caller will
    probably not ask for most rows behind the first.
    """

    logits: Tensor
    sequence: Sequence
    places: list[Place]
    skips: bool = False

    @classmethod
    def chain(cls, logits: Tensor, sequence: Sequence, ahead: list[int]) -> "Walk":
        """Row i of `logits` follows `ahead[:i]`; `ahead` may grow while the choices are read."""
        return cls(logits, sequence, [Place(sequence, i, ahead) for i in range(logits.shape[0])])

    @classmethod
    def tree(cls, logits: Tensor, sequence: Sequence, tree: Tree) -> "Walk":
        """Row 0 follows the anchor, row `1 + i` the path to node i. Paths are read when needed.

        Without places where every choice is the argmax.
        """
        if sequence.params.is_greedy_argmax:
            return cls(logits, sequence, [], skips=True)
        places = [Place(sequence, 0, [])]
        for node, depth in enumerate(tree.depths):
            places.append(Place(sequence, depth, _Path(tree, node)))
        return cls(logits, sequence, places[: logits.shape[0]], skips=True)

    @property
    def first(self) -> "Walk":
        """Its first row alone."""
        return Walk(self.logits[:1], self.sequence, self.places[:1])

    @property
    def needs_path(self) -> bool:
        """True if it matters which tokens are ahead, and not only how many."""
        sequence = self.sequence
        limits = sequence.constraint, sequence.thinking
        return sequence.params.uses_penalties or any(limit is not None for limit in limits)

    @property
    def is_plain(self) -> bool:
        """True if every choice is of the logits as they are, over the temperature, with noise."""
        params = self.sequence.params
        return params.is_sampled and not (params.changes_logits or filters(params))

    @property
    def is_greedy(self) -> bool:
        """True if every choice is the argmax of the logits as they are."""
        return self.sequence.params.is_greedy_argmax


class _Path(IdSequence[int]):
    """The tokens on the way to a node, found when the first of them is looked at."""

    def __init__(self, tree: Tree, node: int) -> None:
        self._tree, self._node = tree, node

    @cached_property
    def _tokens(self) -> list[int]:
        return [self._tree.tokens[node] for node in self._tree.path(self._node)]

    def __len__(self) -> int:
        return self._tree.depths[self._node]

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]


def choose(walks: list[Walk]) -> list[Chooser]:
    """For each walk a function that tells the choice at one of its rows.

    Rows that do not depend on the tokens ahead are chosen at once, except those that a walk on a
    CPU may skip. Other rows are chosen when they are asked for, so that a caller who stops early
    pays for no more. An error at a row concerns no other walk.
    """
    walks = _noisy_on_host(walks)
    are_greedy = [walk.is_greedy for walk in walks]
    at_once = [walk.first if _is_lazy(walk) else walk for walk in walks]
    pairs = list(zip(at_once, are_greedy, strict=True))
    greedy = iter(_argmaxes([walk.logits for walk, is_greedy in pairs if is_greedy]))
    others = iter(_sampled([w for w, is_greedy in pairs if not is_greedy and not w.needs_path]))
    choosers: list[Chooser] = []
    for walk, is_greedy in zip(walks, are_greedy, strict=True):
        if is_greedy:
            choosers.append(partial(_argmax_at, walk, next(greedy)))
        elif walk.needs_path:
            choosers.append(partial(_choice_at, walk))
        else:
            choosers.append(partial(_found_at, walk, next(others)))
    return choosers


def _noisy_on_host(walks: list[Walk]) -> list[Walk]:
    """The walks, with the logits of sampled ones on the CPU, where noise is drawn and added.

    They are copied together, with one wait for another device.
    """
    are_far = [not walk.is_greedy and walk.logits.device.type != "cpu" for walk in walks]
    far = [walk.logits for walk, is_far in zip(walks, are_far, strict=True) if is_far]
    if not far:
        return walks
    copied = iter(torch.split(torch.cat(far).cpu(), [own.shape[0] for own in far]))
    return [
        replace(walk, logits=next(copied)) if is_far else walk
        for walk, is_far in zip(walks, are_far, strict=True)
    ]


def _is_lazy(walk: Walk) -> bool:
    """On another device one wait for all rows costs less than one for each."""
    return walk.skips and walk.logits.device.type == "cpu"


def choices(logits: Tensor, sequence: Sequence, ahead: list[int]) -> Iterator[int]:
    """Yield the choice of each row of `logits` [rows, V], lazily; see Walk.chain.

    Ties go to the lowest id. No choice is NO_CHOICE.

    Raises:
        RequestError: nothing may be chosen there, or a grammar cannot be followed any further.
    """
    walk = Walk.chain(logits, sequence, ahead)
    if walk.is_greedy:
        yield from argmax_ids(logits)
        return
    for index in range(logits.shape[0]):
        yield _choice_at(walk, index)


def choose_processed(scores: Scores, place: Place) -> tuple[int, Scores]:
    """The choice at a place, given its logits [V], and these as the request leaves them.

    Raises:
        RequestError: as `choices`.
    """
    changed = processed(scores, place)
    # No number, or none but -inf: no processing may hide it.
    if not scores.max() > -np.inf:
        return NO_CHOICE, changed
    found = of_processed(changed, int(changed.argmax()), place)
    return (winners([found])[0] if isinstance(found, Undecided) else found), changed


def _argmax_at(walk: Walk, found: list[int], index: int) -> int:
    """found: of the first rows."""
    return found[index] if index < len(found) else argmax_ids(walk.logits[index : index + 1])[0]


def _found_at(walk: Walk, found: list[Choice], index: int) -> int:
    """found: of the first rows."""
    return _told(found, index) if index < len(found) else _choice_at(walk, index)


def _choice_at(walk: Walk, index: int) -> int:
    found = _by_kernel(walk, index)
    if found is not None:
        return found
    return _told(_chosen([(widened(walk.logits[index]), walk.places[index])]), 0)


def _by_kernel(walk: Walk, index: int) -> int | None:
    """The same in one call; None where that cannot be."""
    if not walk.is_plain:
        return None
    stream, logits = walk.places[index].stream, walk.logits[index]
    try:
        large = large_noise(stream, logits.shape[0])
        temperature, known = walk.sequence.params.temperature, (large.ids, large.noise, large.bound)
        return sampled(logits, temperature, stream.address(), known, MIN_NOISE)
    except Exception:
        logger.exception("a token could not be chosen by kernels; it is chosen without them")
        return None


def _told(found: list[Choice], index: int) -> int:
    choice = found[index]
    if isinstance(choice, Exception):
        raise choice
    return choice


def argmax_ids(logits: Tensor) -> list[int]:
    """The id of the largest logit in each row of [rows, V], the lowest of several.

    NO_CHOICE where one is NaN, or all are -inf.
    """
    found = first_largest(logits)
    if found is not None:
        return found
    if logits.device.type == "cpu":
        return [token_id for tile in _tiles(logits) for token_id in _argmax_ids(tile)]
    # NaN counts as the largest.
    values, ids = logits.float().max(dim=-1)
    token_ids: list[int] = ids.masked_fill(~(values > -torch.inf), NO_CHOICE).tolist()
    return token_ids


def _argmax_ids(scores: Scores) -> list[int]:
    found: list[int] = scores.argmax(axis=-1).tolist()
    # A NaN counts as the largest, and is not above anything.
    return [i if row[i] > -np.inf else NO_CHOICE for i, row in zip(found, scores, strict=True)]


def _tiles(logits: Tensor) -> Iterator[Scores]:
    """Rows [.., V] of logits [rows, V] in float32, as many as may be copied at once.

    For numpy: it finds the largest of a row several times as fast as torch.
    """
    num_rows = _tile_rows(logits.shape[-1])
    for tile in [logits] if logits.shape[0] <= num_rows else torch.split(logits, num_rows):
        yield widened(tile)


def _tile_rows(vocab_size: int) -> int:
    return max(1, TILE_BYTES // (4 * vocab_size))


def _argmaxes(logits: list[Tensor]) -> list[list[int]]:
    """The same of each of these [rows, V]; with one wait for another device."""
    if not logits or logits[0].device.type == "cpu":
        return [argmax_ids(own) for own in logits]
    found = iter(argmax_ids(torch.cat(logits)))
    return [[next(found) for _ in own] for own in logits]


def _sampled(walks: list[Walk]) -> list[list[Choice]]:
    """The choices of all rows of each walk, none of which needs its path."""
    by_kernel = [[_by_kernel(walk, i) for i in range(walk.logits.shape[0])] for walk in walks]
    rest = [walk for walk, own in zip(walks, by_kernel, strict=True) if None in own]
    others = iter(_sampled_by_numpy(rest))
    known: list[list[Choice]] = [[one for one in own if one is not None] for own in by_kernel]
    return [next(others) if None in own else one for own, one in zip(by_kernel, known, strict=True)]


def _sampled_by_numpy(walks: list[Walk]) -> list[list[Choice]]:
    """The same without kernels."""
    found: list[Choice] = []
    waiting: list[tuple[Scores, Place]] = []
    for walk in walks:
        places = iter(walk.places)
        for tile in _tiles(walk.logits):
            if waiting and len(waiting) + tile.shape[0] > _tile_rows(tile.shape[1]):
                found += _chosen(waiting)
                waiting = []
            waiting += [(row, next(places)) for row in tile]
    if waiting:
        found += _chosen(waiting)
    each = iter(found)
    return [[next(each) for _ in range(walk.logits.shape[0])] for walk in walks]


def _chosen(rows: list[tuple[Scores, Place]]) -> list[Choice]:
    """The choices at some places, given their logits [V]."""
    try:
        return _together(rows)
    except Exception:
        logger.exception("%d rows could not be chosen together; each is chosen alone", len(rows))
    return [_alone(scores, place) for scores, place in rows]


def _together(rows: list[tuple[Scores, Place]]) -> list[Choice]:
    found = [_without_noise(scores, place) for scores, place in rows]
    won = iter(winners([each for each in found if isinstance(each, Undecided)]))
    return [next(won) if isinstance(each, Undecided) else each for each in found]


def _without_noise(scores: Scores, place: Place) -> Choice | Undecided:
    try:
        return without_noise(scores, place)
    except Exception as error:  # whatever it is, the other rows have nothing to do with it
        return error


def _alone(scores: Scores, place: Place) -> Choice:
    try:
        return choose_row(scores, place)
    except Exception as error:
        return error

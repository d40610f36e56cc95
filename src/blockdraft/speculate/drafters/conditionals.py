"""What a drafter thinks of the tokens behind a path.

DFlash 2 has candidates, scored behind the token before them. DSpark and Domino have the logits of
all tokens behind every path.

The rule of the choice is the one of the target (`sampler.choose`): scores over the temperature and
the request's own noise, among the tokens that its filters leave.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.models.draft.candidate_selector import CandidateSelector
from blockdraft.speculate.drafters.branches import Slot, Successors
from blockdraft.speculate.drafters.slots import (
    Guessable,
    chosen_slots,
    noise_of,
    slot_of,
    slots_of,
)
from blockdraft.speculate.sampler.choose import choose_processed
from blockdraft.speculate.sampler.filters import survivors
from blockdraft.speculate.sampler.logits import Place, Scores
from blockdraft.speculate.sampler.noise import Noise
from blockdraft.speculate.sampler.philox import Ids
from blockdraft.speculate.sampler.reference import NO_CHOICE

Values = NDArray[np.float64]

OUTSIDE = 1e5
"""What is taken off the logits of tokens that are no candidates: one of them is chosen only where a
request forbids all candidates."""


class Conditionals(Successors, Protocol):
    """Successors with the drafter's choice behind every path.

    max_depth: the number of slots; once the chain is known, its length, which may be less.
    """

    max_depth: int

    def choice(self, path: Sequence[int]) -> int:
        """The drafter's choice behind a path.

        Raises:
            RequestError: nothing may be chosen there.
        """

    def scores(self, path: Sequence[int]) -> tuple[Ids, Values]:
        """Tokens behind a path, and their scores before the request changes any."""


@dataclass(slots=True)
class Candidates:
    """The candidates of a sample's slots, scored on the host.

    token_ids, logits: [s, k]; table: [s, k, k], see Lattice.scores; log_total: [s].
    """

    token_ids: Ids
    logits: Values
    table: Values
    log_total: Values

    def behind(self, path: Sequence[int]) -> Values:
        """The scores [k] of the candidates behind a path of candidates."""
        depth, place = len(path), 0
        if depth:
            place = int(np.flatnonzero(self.token_ids[depth - 1] == path[-1])[0])
        found: Values = self.table[depth, place]
        return found

    def log_rest(self, depth: int) -> float:
        """The logarithm of the weights of all tokens of a slot that are no candidates."""
        logits, total = self.logits[depth], self.log_total[depth]
        share = np.exp(logits - total).sum()
        return float(total + np.log1p(-share)) if share < 1.0 else -np.inf


class PlainCandidates:
    """For a sample whose logits nothing changes: only candidates can be chosen."""

    def __init__(self, candidates: Candidates, sample: Sample, num_slots: int) -> None:
        self.max_depth = num_slots
        self._candidates = candidates
        self._params = sample.params
        self._noise: Noise = noise_of(candidates.token_ids[:num_slots], sample)

    def scores(self, path: Sequence[int]) -> tuple[Ids, Values]:
        """See Conditionals."""
        return self._candidates.token_ids[len(path)], self._candidates.behind(path)

    def choice(self, path: Sequence[int]) -> int:
        """See Conditionals."""
        ids, scores = self.scores(path)
        noisy = scores + self._noise[len(path)]
        if self._params.is_sampled and np.isfinite(scores.max()):
            left = survivors(scores.astype(np.float32), self._params)
            if left is not None:
                return int(ids[left[noisy[left].argmax()]])
        return int(ids[noisy.argmax()])

    def children(self, path: Sequence[int]) -> Slot:
        """See Successors."""
        ids, scores = self.scores(path)
        if not np.isfinite(scores.max()):
            return Slot([self.choice(path)], [0.0])
        rest = self._candidates.log_rest(len(path))
        log_total = np.logaddexp.reduce([*scores, rest]) - scores.max()
        noise = self._noise[len(path)]
        return slot_of(scores, noise, ids, log_total, self.choice(path))


class PlainLogits:
    """The same with logits of all guessable tokens.

    logits_of: of a path, [n]; before it, it was asked for the path without its last token.
    """

    def __init__(
        self,
        logits_of: Callable[[Sequence[int]], Tensor],
        sample: Sample,
        num_slots: int,
        guessable: Guessable,
    ) -> None:
        self.max_depth = num_slots
        self._logits_of, self._sample, self._guessable = logits_of, sample, guessable
        self._slots: dict[tuple[int, ...], Slot] = {}

    def scores(self, path: Sequence[int]) -> tuple[Ids, Values]:
        """See Conditionals."""
        return _scored(self._logits_of(path), self._guessable)

    def choice(self, path: Sequence[int]) -> int:
        """See Conditionals."""
        return self.children(path).token_ids[0]

    def children(self, path: Sequence[int]) -> Slot:
        """See Successors."""
        key = tuple(path)
        if key not in self._slots:
            (self._slots[key],) = chosen_slots(
                self._logits_of(path)[None], self._sample, self._guessable, num_ahead=len(path)
            )
        return self._slots[key]


class ChangedConditionals(ABC):
    """For a sample whose request changes logits: penalties, bias, grammar."""

    def __init__(self, sample: Sample, num_slots: int) -> None:
        self.max_depth = num_slots
        self._sample = sample
        self._chosen: dict[tuple[int, ...], tuple[int, Scores]] = {}

    @abstractmethod
    def scores(self, path: Sequence[int]) -> tuple[Ids, Values]:
        """See Conditionals."""

    @abstractmethod
    def _row(self, path: Sequence[int]) -> Scores:
        """[V] behind a path, before the request changes any."""

    def choice(self, path: Sequence[int]) -> int:
        """See Conditionals."""
        return self._choice(path)[0]

    def children(self, path: Sequence[int]) -> Slot:
        """See Successors; none where a grammar cannot be followed."""
        try:
            first, scores = self._choice(path)
        except RequestError:
            return Slot([], [])
        changed = torch.from_numpy(scores)
        (slot,) = slots_of(
            changed[None], [first], self._sample, Guessable(changed.shape[0]), len(path)
        )
        return slot

    def _choice(self, path: Sequence[int]) -> tuple[int, Scores]:
        """The choice behind a path, and the logits [V] that it was made from.

        Both are kept: the chain is chosen first, and its children are asked for afterwards.
        """
        key = tuple(path)
        if key not in self._chosen:
            found, scores = choose_processed(self._row(path), Place(self._sample, len(path), key))
            # Not even a broken drafter may give the target what is no token.
            self._chosen[key] = 0 if found == NO_CHOICE else found, scores
        return self._chosen[key]


class ChangedCandidates(ChangedConditionals):
    """The request may forbid every candidate, so other tokens can be chosen too, after all of them.

    All tensors but `logits` [s, V] are on the device of `hidden` [s, D].
    """

    def __init__(
        self,
        selector: CandidateSelector,
        hidden: Tensor,
        logits: Tensor,
        candidates: Candidates,
        sample: Sample,
        num_slots: int,
    ) -> None:
        super().__init__(sample, num_slots)
        self._selector = selector
        self._hidden = hidden
        self._logits = logits.float().cpu().numpy()
        self._candidates = candidates

    def scores(self, path: Sequence[int]) -> tuple[Ids, Values]:
        """See Conditionals. The token before may be any."""
        depth = len(path)
        before = path[-1] if path else self._sample.token_ids[-1]
        ids = self._candidates.token_ids[depth]
        device = self._hidden.device
        with torch.inference_mode():
            added = self._selector(
                self._hidden[depth],
                torch.tensor([before], device=device),
                torch.from_numpy(ids).to(device),
            )
        return ids, self._candidates.logits[depth] + added[0].double().cpu().numpy()

    def _row(self, path: Sequence[int]) -> Scores:
        row: Scores = self._logits[len(path)] - np.float32(OUTSIDE)
        ids, scores = self.scores(path)
        row[ids] = scores
        return row


class ChangedLogits(ChangedConditionals):
    """With logits of all guessable tokens; see PlainLogits."""

    def __init__(
        self,
        logits_of: Callable[[Sequence[int]], Tensor],
        sample: Sample,
        num_slots: int,
        guessable: Guessable,
    ) -> None:
        super().__init__(sample, num_slots)
        self._logits_of, self._guessable = logits_of, guessable

    def scores(self, path: Sequence[int]) -> tuple[Ids, Values]:
        """See Conditionals."""
        return _scored(self._logits_of(path), self._guessable)

    def _row(self, path: Sequence[int]) -> Scores:
        whole = self._guessable.over_whole_vocabulary(self._logits_of(path))
        row: Scores = whole.float().cpu().numpy()
        return row


def _scored(logits: Tensor, guessable: Guessable) -> tuple[Ids, Values]:
    """The ids of tokens with logits [n], and these."""
    return guessable.ids_at(np.arange(len(logits))), logits.double().cpu().numpy()


def chain_of(conditionals: Conditionals) -> list[int]:
    """The drafter's choices, each behind those before, until nothing may be chosen."""
    chain: list[int] = []
    try:
        while len(chain) < conditionals.max_depth:
            chain.append(conditionals.choice(chain))
    except RequestError:
        conditionals.max_depth = len(chain)
    return chain

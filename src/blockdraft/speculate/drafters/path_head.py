"""DSpark, Domino and DFly at work: a forward fills a block, then a head corrects slots' logits.

What the head adds depends on the tokens of the path before the slot. The chains of all rows are
found side by side, with one product for each slot; each branch of a tree takes one of its own.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.sequence import Row
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.draft.context import DraftContexts
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.path_heads import PathLogits
from blockdraft.models.layers.packed import linear_of, rows_of
from blockdraft.speculate.drafters.coherent import CoherentDrafter
from blockdraft.speculate.drafters.conditionals import ChangedLogits, Conditionals, PlainLogits


class PathHeadDrafter(CoherentDrafter):
    """Drafts with a model that has a path head; see DFlashDrafter."""

    def __init__(
        self,
        model: DraftModel,
        embed_weight: Tensor | GroupWeight,
        lm_head_weight: Tensor | GroupWeight,
        contexts: DraftContexts | None = None,
        *,
        in_int8: bool = False,
    ) -> None:
        super().__init__(model, embed_weight, lm_head_weight, contexts, in_int8=in_int8)
        head = self.model.path_head(self.embed_weight)
        assert head is not None
        self._path_head = head
        self._weigh = self._head
        if (weights := head.successors) is not None:
            ids = self.vocabulary_ids
            self._weigh = linear_of(
                weights if ids is None else rows_of(weights, ids), in_int8=in_int8
            )

    def _conditionals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Conditionals]:
        """See CoherentDrafter."""
        anchors = [row.sequence.token_ids[-1] for row in rows]
        known = _KnownPaths(PathLogits(self._path_head, self._weigh, hidden, logits), anchors)
        every: list[Conditionals] = []
        for index, row in enumerate(rows):
            behind = ChangedLogits if row.sequence.params.changes_logits else PlainLogits
            about = row.sequence, row.num_slots, self.guessable
            every.append(behind(partial(known.logits, index), *about))
        _choose_chains(every, known)
        return every


class _KnownPaths:
    """Logits behind paths of several sequences, each path once the one before it was asked for.

    States are kept, logits until they are asked for.
    """

    def __init__(self, behind: PathLogits, anchors: Sequence[int]) -> None:
        self._behind, self._anchors = behind, anchors
        self._states: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._found: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def logits(self, index: int, path: Sequence[int]) -> Tensor:
        """[n] behind a path of a sequence."""
        key = index, tuple(path)
        if key not in self._found:
            self.find({index: path})
        return self._found.pop(key)

    def find(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Those behind a path of each of these sequences, all of one length, in one product."""
        if not paths:
            return
        depth = len(next(iter(paths.values())))
        before, states = [], []
        for index, path in paths.items():
            before.append(path[-1] if path else self._anchors[index])
            states.append(self._states[index, tuple(path[:-1])] if path else self._behind.start)
        device = self._behind.hidden.device
        rows, last = torch.tensor([[*paths], before], device=device)
        with torch.inference_mode():
            found = self._behind.step(rows, depth, torch.stack(states), last)
        for (index, path), state, logits in zip(paths.items(), *found, strict=True):
            self._states[index, tuple(path)] = state
            self._found[index, tuple(path)] = logits


def _choose_chains(every: Sequence[Conditionals], known: _KnownPaths) -> None:
    """Make the choices along all chains, which keep them: one slot of all after another."""
    chains: dict[int, list[int]] = {index: [] for index in range(len(every))}
    for depth in range(max(own.max_depth for own in every)):
        chains = {i: chain for i, chain in chains.items() if every[i].max_depth > depth}
        known.find(chains)
        for index, chain in list(chains.items()):
            try:
                chain.append(every[index].choice(chain))
            except RequestError:  # nothing may be chosen there
                del chains[index]

"""DFlash drafters whose paths are coherent: a slot's tokens are scored behind those before them.

Everything up to the logits of the slots is DFlash.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row
from blockdraft.speculate.drafters.conditionals import Conditionals, chain_of
from blockdraft.speculate.drafters.dflash import DFlashDrafter


class CoherentDrafter(DFlashDrafter):
    """Chooses a chain token by token, and branches in the same way; see DFlashDrafter."""

    @abstractmethod
    def _conditionals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Conditionals]:
        """What is thought of the tokens behind every path of each row; arguments as below."""

    def _proposals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Proposal]:
        """From hidden states [b, slots, D] and logits [b, slots, guessable tokens]."""
        with self.recorder.phase("guess"):
            every = self._conditionals(hidden, logits, rows)
            chains = [chain_of(own) for own in every]
            if self.watch is not None:
                self.watch(rows, self._scores_along(chains, every, logits))
            return [self._proposal(row, own) for row, own in zip(rows, every, strict=True)]

    def _scores_along(
        self, chains: list[list[int]], every: list[Conditionals], logits: Tensor
    ) -> Tensor:
        """[b, slots, V]: the scores behind the guesses before; -inf for what is not scored."""
        size = self.embed_weight.shape[0]
        shown = logits.new_full((*logits.shape[:2], size), -torch.inf, dtype=torch.float32)
        for own, chain, conditionals in zip(shown, chains, every, strict=True):
            for slot in range(conditionals.max_depth):
                ids, scores = conditionals.scores(chain[:slot])
                own[slot, torch.from_numpy(ids)] = torch.from_numpy(scores).to(own)
        return shown

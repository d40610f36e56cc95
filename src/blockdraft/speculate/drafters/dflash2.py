"""The DFlash 2 drafter at work: one forward fills a block, then a selector finds paths through it.

Everything up to the logits of the slots is DFlash. A path is coherent: each of its tokens is scored
behind the one before it. So is every branch of a tree.
"""

import torch
from torch import Tensor

from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row
from blockdraft.models.draft.candidate_selector import Lattice, lattice_of
from blockdraft.speculate.drafters.conditionals import (
    Candidates,
    ChangedConditionals,
    Conditionals,
    PlainConditionals,
    chain_of,
)
from blockdraft.speculate.drafters.dflash import DFlashDrafter


class DFlash2Drafter(DFlashDrafter):
    """Drafts with a DFlash 2 model; see DFlashDrafter."""

    kind = "dflash2"

    def _proposals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Proposal]:
        """From hidden states [b, slots, D] and logits [b, slots, guessable tokens]."""
        with self.recorder.phase("guess"):
            every = self._conditionals(hidden, logits, rows)
            chains = [chain_of(own) for own in every]
            if self.watch is not None:
                self.watch(rows, self._scores_along(chains, every, logits))
            return [self._proposal(row, own) for row, own in zip(rows, every, strict=True)]

    def _conditionals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Conditionals]:
        selector = self.model.candidate_selector
        assert selector is not None
        anchors = torch.tensor([row.sequence.token_ids[-1] for row in rows], device=hidden.device)
        lattice = lattice_of(selector, hidden, logits, anchors, self.vocabulary_ids)
        found: list[Conditionals] = []
        for index, (row, candidates) in enumerate(zip(rows, _on_host(lattice), strict=True)):
            sample, num_slots = row.sequence, row.num_slots
            if sample.params.changes_logits:
                own = self.guessable.over_whole_vocabulary(logits[index, :num_slots])
                found.append(
                    ChangedConditionals(selector, hidden[index], own, candidates, sample, num_slots)
                )
            else:
                found.append(PlainConditionals(candidates, sample, num_slots))
        return found

    def _scores_along(
        self, chains: list[list[int]], every: list[Conditionals], logits: Tensor
    ) -> Tensor:
        """[b, slots, V]: the scores behind the guesses before; -inf for what is no candidate."""
        size = self.embed_weight.shape[0]
        shown = logits.new_full((*logits.shape[:2], size), -torch.inf, dtype=torch.float32)
        for own, chain, conditionals in zip(shown, chains, every, strict=True):
            for slot in range(conditionals.max_depth):
                ids, scores = conditionals.scores(chain[:slot])
                own[slot, torch.from_numpy(ids)] = torch.from_numpy(scores).to(own)
        return shown


def _on_host(lattice: Lattice) -> list[Candidates]:
    """The candidates of each sequence; what is no number counts as impossible."""
    ids = lattice.token_ids.cpu().numpy()
    logits, table, log_total = (
        values.double().nan_to_num_(-torch.inf, torch.inf, -torch.inf).cpu().numpy()
        for values in (lattice.logits, lattice.scores, lattice.log_total)
    )
    return [Candidates(*each) for each in zip(ids, logits, table, log_total, strict=True)]

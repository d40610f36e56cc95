"""The DFlash 2 drafter at work: one forward fills a block, then a selector finds paths through it.

A path is coherent: each of its tokens is scored behind the one before it. So is every branch of a
tree.
"""

import torch
from torch import Tensor

from blockdraft.core.sequence import Row
from blockdraft.models.draft.candidate_selector import Lattice, lattice_of
from blockdraft.speculate.drafters.coherent import CoherentDrafter
from blockdraft.speculate.drafters.conditionals import (
    Candidates,
    ChangedCandidates,
    Conditionals,
    PlainCandidates,
)


class DFlash2Drafter(CoherentDrafter):
    """Drafts with a DFlash 2 model; see DFlashDrafter."""

    def _conditionals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Conditionals]:
        """See CoherentDrafter."""
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
                    ChangedCandidates(selector, hidden[index], own, candidates, sample, num_slots)
                )
            else:
                found.append(PlainCandidates(candidates, sample, num_slots))
        return found


def _on_host(lattice: Lattice) -> list[Candidates]:
    """The candidates of each sequence; what is no number counts as impossible."""
    ids = lattice.token_ids.cpu().numpy()
    logits, table, log_total = (
        values.double().nan_to_num_(-torch.inf, torch.inf, -torch.inf).cpu().numpy()
        for values in (lattice.logits, lattice.scores, lattice.log_total)
    )
    return [Candidates(*each) for each in zip(ids, logits, table, log_total, strict=True)]

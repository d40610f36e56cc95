"""The candidate selector of DFlash 2: which token of a slot fits behind which one before it.

A drafter's logits say of each slot what is likely there, whatever its neighbors say. The selector
looks at the most likely tokens of each slot, its candidates, and adds to the logit of a candidate
how well it follows the token before it: a product of two vectors of low rank, one of each token,
weighted by the slot's hidden state.

Shapes: b sequences, s slots behind the anchor, k candidates, r rank, D hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.models.draft.config import DFlash2Config

INIT_STD = 0.02


class CandidateSelector(nn.Module):
    """Scores tokens behind tokens; a fresh one adds nothing to the logits."""

    def __init__(self, hidden_size: int, vocab_size: int, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(hidden_size, config.selector_rank, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let no token follow another better than the rest."""
        nn.init.normal_(self.predecessor_codebook, std=1.0)
        nn.init.zeros_(self.successor_codebook)
        nn.init.normal_(self.hidden_projection.weight, std=INIT_STD)

    def forward(self, hidden: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """What follows from the token before, to be added to the logits: [.., p, k].

        hidden: [.., D]. predecessors: [.., p], each tried. candidates: [.., k]. All are token ids.
        """
        weights = self.hidden_projection(hidden)
        before = self.predecessor_codebook[predecessors] * weights[..., None, :]
        scores: Tensor = before @ self.successor_codebook[candidates].transpose(-1, -2)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Scores of the candidates of some slots, behind the anchor and behind each other.

    token_ids: [b, s, k]. scores: [b, s, k, k], of the last behind the token of the third, which is
    a candidate of the slot before; in the first slot all are behind the anchor. logits: [b, s, k],
    and log_total: [b, s], of the weights exp(logit) of all tokens, candidates or not.
    """

    token_ids: Tensor
    scores: Tensor
    logits: Tensor
    log_total: Tensor

    def greedy_path(self) -> Tensor:
        """[b, s] token ids: from the anchor on, always the candidate with the highest score."""
        place = torch.zeros_like(self.token_ids[:, 0, 0])
        rows = torch.arange(len(place), device=place.device)
        path = []
        for slot in range(self.token_ids.shape[1]):
            place = self.scores[rows, slot, place].argmax(dim=-1)
            path.append(self.token_ids[rows, slot, place])
        return torch.stack(path, dim=1)


def lattice_of(
    selector: CandidateSelector,
    hidden: Tensor,
    logits: Tensor,
    anchors: Tensor,
    vocabulary_ids: Tensor | None = None,
) -> Lattice:
    """The candidates of slots with hidden states [b, s, D] and logits [b, s, n], all scored.

    anchors: [b] token ids. vocabulary_ids: [n], of the tokens that have logits; None if all have.
    """
    top, places = logits.float().topk(min(selector.top_k, logits.shape[-1]))
    token_ids = places if vocabulary_ids is None else vocabulary_ids[places]
    first = anchors[:, None, None].expand_as(token_ids[:, :1])
    predecessors = torch.cat((first, token_ids[:, :-1]), dim=1)
    scores = selector(hidden, predecessors, token_ids).float() + top[..., None, :]
    return Lattice(token_ids, scores, top, logits.float().logsumexp(dim=-1))

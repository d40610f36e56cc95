"""Heads that correct a slot by the tokens drafted before it: DSpark, Domino and DFly.

The layers of a DFlash drafter say what is likely in each slot, whatever its neighbors say. A path
head reads the path, the anchor and the drafted tokens behind it, and adds to the slot's logits a
product of low rank: a latent vector of the path, times one vector of each token.

* DSpark (arXiv 2607.05147): a Markov head. The latent vector is one of the token before
  ("vanilla"), weighted by a gate that also sees the slot's hidden state ("gated"), or comes from a
  state that all tokens of the path went through ("rnn").
* Domino (arXiv 2605.29707): a gated recurrent unit reads the embeddings of the path; two layers
  turn its state and the slot's hidden state into the correction. The first slots may do without.
* DFly (AngelSpec): a gated network adds to the slot's hidden state, which it reads beside the
  embedding of the token before. The target's head is linear, so its product with what is added is
  the correction of the logits: the latent vector is that, and the vectors of the tokens are the
  head's.

Shapes: b sequences, s drafted slots, m paths of one length, D hidden size, r rank, S size of the
state behind a path, n tokens that have logits, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.models.draft.config import DominoConfig, DraftConfig, DSparkConfig
from blockdraft.models.draft.modules import RMSNorm

INIT_STD = 0.02


class PathHead(Protocol):
    """What corrects logits."""

    @property
    def num_uncorrected(self) -> int:
        """First drafted slots whose logits stay as they are."""

    @property
    def state_size(self) -> int:
        """S; 0 if nothing but the last token of a path counts."""

    @property
    def successors(self) -> Tensor | None:
        """[V, r], a vector of each token; None for those of the head that gives the logits."""

    def step(self, state: Tensor, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The state [m, S] and the latent vector [m, r] behind paths that are one token longer.

        state: [m, S] behind the paths without that token, zeros before the anchor. before: [m],
        that token. hidden: [m, D] of the slots behind it.
        """


class MarkovHead(nn.Module):
    """That of DSpark; its parameters carry the published names."""

    num_uncorrected = 0

    def __init__(self, hidden_size: int, vocab_size: int, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        self.joint_proj: nn.Linear | None = None
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    @property
    def state_size(self) -> int:
        """See PathHead."""
        return 0 if self.joint_proj is None else self.markov_w1.embedding_dim

    @property
    def successors(self) -> Tensor:
        """See PathHead."""
        return self.markov_w2.weight

    def step(self, state: Tensor, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See PathHead.step."""
        token: Tensor = self.markov_w1(before)
        if self.gate_proj is not None:
            return state, torch.sigmoid(self.gate_proj(torch.cat((hidden, token), -1))) * token
        if self.joint_proj is None:
            return state, token
        joint = self.joint_proj(torch.cat((state, token, hidden), -1))
        gate, candidate, latent = joint.chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return kept * state + (1.0 - kept) * torch.tanh(candidate), torch.tanh(latent)


class PrefixGRU(nn.Module):
    """A gated recurrent unit without biases, with the names and the order of torch's."""

    def __init__(self, input_size: int, state_size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state_size, state_size))
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.normal_(weight, std=INIT_STD)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """The state [m, S] behind inputs x [m, D]."""
        reset, update, new = F.linear(x, self.weight_ih_l0).chunk(3, dim=-1)
        own_reset, own_update, own_new = F.linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        kept = torch.sigmoid(update + own_update)
        new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
        return kept * state + (1.0 - kept) * new


def domino_projection(hidden_size: int, vocab_size: int, config: DominoConfig) -> nn.Sequential:
    """From hidden state and the GRU's state, side by side, to what is added to the logits."""
    return nn.Sequential(
        nn.Linear(hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
        nn.SiLU(),
        nn.Linear(config.emb_dim, vocab_size, bias=False),
    )


@dataclass(frozen=True, eq=False)
class DominoHead:
    """That of Domino, whose checkpoints keep its parts beside the layers.

    projection: see `domino_projection`. embed: token ids [1, m] -> [1, m, D].
    """

    gru: PrefixGRU
    projection: nn.Sequential
    num_uncorrected: int
    embed: Callable[[Tensor], Tensor]

    @property
    def state_size(self) -> int:
        """See PathHead."""
        return self.gru.weight_hh_l0.shape[1]

    @property
    def successors(self) -> Tensor:
        """See PathHead."""
        last = self.projection[2]
        assert isinstance(last, nn.Linear)
        return last.weight

    def step(self, state: Tensor, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See PathHead.step."""
        state = self.gru(self.embed(before[None])[0], state)
        latent: Tensor = self.projection[:2](torch.cat((hidden, state), dim=-1))
        return state, latent


class HiddenCorrection(nn.Module):
    """That of DFly; its parameters carry the published names."""

    def __init__(self, config: DraftConfig, inner_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.embed_norm = RMSNorm(size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(2 * size, inner_size, bias=False)
        self.up_proj = nn.Linear(2 * size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, size, bias=False)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """What is added to hidden states [m, D] behind tokens with embeddings [m, D]."""
        x = torch.cat((self.hidden_norm(hidden), self.embed_norm(embeddings.to(hidden))), dim=-1)
        added: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return added


@dataclass(frozen=True, eq=False)
class CorrectionHead:
    """A hidden correction as a path head. embed: token ids [1, m] -> [1, m, D]."""

    correction: HiddenCorrection
    embed: Callable[[Tensor], Tensor]
    num_uncorrected: int = 0
    state_size: int = 0
    successors: None = None

    def step(self, state: Tensor, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See PathHead.step."""
        return state, self.correction(hidden, self.embed(before[None])[0])


@dataclass(frozen=True, eq=False)
class PathLogits:
    """The logits of blocks' slots behind paths.

    weigh: of latent vectors [m, r] what they add to the logits [m, n]. hidden: [b, s, D]. logits:
    [b, s, n], of the layers alone.
    """

    head: PathHead
    weigh: Callable[[Tensor], Tensor]
    hidden: Tensor
    logits: Tensor

    @property
    def start(self) -> Tensor:
        """The state [S] before the anchor."""
        return self.hidden.new_zeros(self.head.state_size)

    def step(
        self, rows: Tensor, depth: int, state: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States [m, S] and logits [m, n] behind paths of `depth` drafted tokens.

        rows: [m], whose paths they are. state: [m, S] behind all but the last token of each path.
        before: [m], that token; the anchor where nothing is drafted yet.
        """
        state, latent = self.head.step(state, before, self.hidden[rows, depth])
        logits = self.logits[rows, depth].float()
        if depth >= self.head.num_uncorrected:
            logits = logits + self.weigh(latent).float()
        return state, logits

    def greedy_path(self, anchors: Tensor, vocabulary_ids: Tensor | None = None) -> Tensor:
        """[b, s] token ids: from the anchors [b] on, always the token with the highest logit.

        vocabulary_ids: [n], of the tokens that have logits; None if all have.
        """
        rows, before = torch.arange(len(anchors), device=anchors.device), anchors
        state, path = self.start.expand(len(anchors), -1), []
        for depth in range(self.logits.shape[1]):
            state, logits = self.step(rows, depth, state, before)
            before = logits.argmax(dim=-1)
            before = before if vocabulary_ids is None else vocabulary_ids[before]
            path.append(before)
        return torch.stack(path, dim=1)

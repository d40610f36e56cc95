"""What followed what in one sequence's own text, to correct a table of n-grams by. No torch.

A text repeats its own words and phrases far more than others do. So the tokens that it holds count
more (a cache of words: Kuhn and De Mori, "A cache-based natural language model", 1990), and what
followed the same one to three tokens in it is counted, each length with the shorter one as its
Dirichlet prior (MacKay and Peto, "A hierarchical Dirichlet language model", 1995).
"""

from collections.abc import Sequence

from blockdraft.kernels.ngram_interface import OwnTextBelief
from blockdraft.speculate.drafters.ngram_table import LONGEST, Shares

MAX_READ = 8_192
"""The last tokens of a prompt, so many, are read; each takes some 750 bytes."""
MAX_REMEMBERED = 32
"""The last successors of a context, so many, count."""

BESIDE_TABLE = OwnTextBelief(known_token=3.0, priors=(8.0, 4.0, 2.0))
BESIDE_GUESS = OwnTextBelief(known_token=1.5, priors=(64.0, 32.0, 16.0))
"""A head that has looked back at the text knows most of what its n-grams say."""


class OwnText:
    """Counts a text as it grows, and mixes what it finds with what a table says."""

    def __init__(self) -> None:
        self._num_read = 0
        self._tokens: set[int] = set()
        self._followed: dict[tuple[int, ...], list[int]] = {}

    def read(self, token_ids: Sequence[int]) -> None:
        """Count what is new of a text that only grows; the first call, its last MAX_READ tokens."""
        first = self._num_read if self._num_read else max(0, len(token_ids) - MAX_READ)
        for place in range(first, len(token_ids)):
            token_id = token_ids[place]
            self._tokens.add(token_id)
            for length in range(1, min(LONGEST, place) + 1):
                followed = self._followed.setdefault(tuple(token_ids[place - length : place]), [])
                followed.append(token_id)
                if len(followed) > MAX_REMEMBERED:
                    del followed[0]
        self._num_read = len(token_ids)

    def mixed(
        self, ending: tuple[int, ...], known: Shares, belief: OwnTextBelief = BESIDE_TABLE
    ) -> Shares:
        """Probabilities of the next token behind a text that ends so.

        known: what others say of it, beside whom the text is believed so far.
        """
        found = self._favored(known, belief.known_token)
        for length, prior in zip(range(1, len(ending) + 1), belief.priors, strict=False):
            followed = self._followed.get(ending[-length:])
            if followed is None:  # nor did anything follow a longer context
                break
            total = len(followed) + prior
            for token_id in found:
                found[token_id] *= prior / total
            for token_id in followed:
                found[token_id] = found.get(token_id, 0.0) + 1 / total
        return found

    def _favored(self, known: Shares, known_token: float) -> Shares:
        """The same successors; those that the text holds are more probable, all others less."""
        weights = {
            token_id: share * (known_token if token_id in self._tokens else 1.0)
            for token_id, share in known.items()
        }
        total = sum(weights.values()) + max(0.0, 1.0 - sum(known.values()))
        return {token_id: weight / total for token_id, weight in weights.items()}

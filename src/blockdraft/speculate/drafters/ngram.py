"""Drafts from n-grams: what usually follows the last few tokens, in the target's answers and here.

No model runs. A table knows the target's answers to others; what followed in the sequence's own
text corrects it (`own_text.py`). The most probable paths are found best first, as from a block
(`branches.py`): their probability is the product along the path. For a sampled request the noise
decides that will choose the target's token, as far as it is known which tokens can win.
"""

from blockdraft.core.plan import NOTHING, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.kernels.interface import TokenNoise
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.branches import noise_temperature
from blockdraft.speculate.drafters.ngram_search import ngram_search
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.noise import large_noise

MAX_NODES = 8
LARGE_DEPTHS = 3
"""Tokens ahead for which those of large noise are looked at. The target asks for the same ones."""


class NGramDrafter(ModelFree):
    """Proposes trees of the most probable paths; nothing where nothing is likely."""

    kind = "ngram"
    max_nodes = MAX_NODES

    def __init__(self, table: NGramTable, vocab_size: int) -> None:
        """vocab_size: of the target, among whose tokens those of large noise are looked at."""
        self._search = ngram_search(table)
        self._vocab_size = vocab_size

    def _propose(self, row: Row) -> Proposal:
        sample = row.sequence
        noise = self._noise_of(sample, min(row.num_slots, LARGE_DEPTHS))
        found = self._search.paths(
            sample.key, sample.token_ids, noise, row.num_draft_tokens, row.num_slots
        )
        if not found.tokens:
            return NOTHING
        tree = Tree(found.tokens, found.parents)
        return Proposal(tree, found.probabilities, (self.kind,) * len(found.tokens))

    def close(self, key: int) -> None:
        """See Drafter.close."""
        self._search.close(key)

    def _noise_of(self, sample: Sample, num_large: int) -> TokenNoise | None:
        """What decides between tokens behind a sample's own; None where nothing does."""
        temperature = noise_temperature(sample.params)
        if temperature == 0.0:
            return None
        stream = Place(sample, 0, []).stream
        places = (Place(sample, depth, []) for depth in range(num_large))
        found = [large_noise(place.stream, self._vocab_size) for place in places]
        large = [(own.ids, own.noise) for own in found]
        return TokenNoise(stream.seed, stream.sample_index, stream.position, temperature, large)

"""Drafts from n-grams: what usually follows the last few tokens, in the target's answers and here.

No model runs. A table knows the target's answers to others; what followed in the sequence's own
text corrects it (`own_text.py`). The most probable paths are found best first, as from a block
(`branches.py`): their probability is the product along the path. For a sampled request the noise
decides that will choose the target's token, as far as it is known which tokens can win.
"""

from blockdraft.core.plan import NOTHING, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.kernels.ngram_interface import TokenNoise
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.branches import noise_temperature
from blockdraft.speculate.drafters.ngram_search import ngram_search
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.sampler.filters import filters
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.noise import large_noise

MAX_NODES = 8


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
        found = self._search.paths(
            sample.key, sample.token_ids, self._noise(sample), row.num_draft_tokens, row.num_slots
        )
        if not found.tokens:
            return NOTHING
        tree = Tree(found.tokens, found.parents)
        return Proposal(tree, found.probabilities, (self.kind,) * len(found.tokens))

    def close(self, key: int) -> None:
        """See Drafter.close."""
        self._search.close(key)

    def _noise(self, sample: Sample) -> TokenNoise | None:
        """What decides between tokens behind a sample's own; None where nothing does."""
        temperature = noise_temperature(sample.params)
        if temperature == 0.0:
            return None
        stream = Place(sample, 0, []).stream
        large = None
        # Filters leave few tokens that are unlikely. Else the target asks for the same when it
        # chooses here; places further on gain less by them than they cost.
        if not filters(sample.params):
            found = large_noise(stream, self._vocab_size)
            large = found.ids, found.noise
        return TokenNoise(stream.seed, stream.sample_index, stream.position, temperature, large)

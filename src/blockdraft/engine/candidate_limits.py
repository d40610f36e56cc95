"""How many candidates each row of a step may have. No torch."""

from collections.abc import Callable

from blockdraft.cache.memory import Memory
from blockdraft.core.sequence import Batch, Row, Sequence


def least(limit: int, *others: int | None) -> int:
    """The least of several limits; None is none."""
    return min([limit, *(other for other in others if other is not None)])


class CandidateLimits:
    """Limits of candidates, and room for them where there is some: nobody is preempted for it.

    A drafter that runs a model, of the kind `model_kind`, proposes paths of at most `model_depth`
    tokens. The others propose paths of at most `free_depth(sequence)`. The engine sets the rest:
    both propose trees of at most `num_tree_nodes` nodes, or chains if that is 0. `num_draft_tokens`
    and `draft_depth` bound all of them, as those of a request do.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        model_depth: int,
        model_kind: str,
        free_depth: Callable[[Sequence], int],
    ) -> None:
        self.memory = memory
        self.model_depth = model_depth
        self._model_kind = model_kind
        self._free_depth = free_depth
        self.num_tree_nodes = 0
        self.num_draft_tokens: int | None = None
        self.draft_depth: int | None = None

    def apply(self, batch: Batch) -> Batch:
        """The rows of a step, those that decode with room for candidates."""
        return [row if row.is_prompt else self._with_candidates(row) for row in batch]

    def _with_candidates(self, row: Row) -> Row:
        sequence, params = row.sequence, row.sequence.params
        # The bonus takes the last place, so no draft can be kept there.
        num_left = params.max_tokens - sequence.num_output - 1
        most = self.num_draft_tokens, params.max_draft_tokens
        longest = least(num_left, *most, self.draft_depth, params.draft_depth)
        if longest <= 0:
            return row
        may_model = sequence.allows(self._model_kind)
        model_depth = min(self.model_depth, longest) if may_model else 0
        depth = max(model_depth, min(self._free_depth(sequence), longest))
        if depth <= 0:
            return row
        num_model_tokens = max(model_depth, self.num_tree_nodes) if model_depth > 0 else 0
        # Branches need no more depth, so short paths leave room for them whoever proposes.
        return Row(
            sequence,
            row.new_ids,
            self._with_room(sequence, least(max(depth, self.num_tree_nodes), *most)),
            max_depth=depth,
            num_model_tokens=num_model_tokens,
            max_model_depth=model_depth,
        )

    def _with_room(self, sequence: Sequence, limit: int) -> int:
        """The most candidates to verify of it, at most `limit`; room is reserved for them."""
        num_tokens = len(sequence.token_ids)
        if not self.memory.reserve(sequence.key, num_tokens + limit):
            limit = min(limit, self.memory.room(sequence.key) - num_tokens)
        return limit

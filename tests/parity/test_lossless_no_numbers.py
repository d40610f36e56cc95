"""A drafted token whose embedding is no number is rejected, and leaves no mark on what is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Batch, DraftBlock, Row
from blockdraft.models.exact import supports_bfloat16
from tests.parity.checks import generate, generate_plain
from tests.parity.targets import WAYS, Way, make_target
from tests.tiny import KINDS, tiny_target

pytestmark = pytest.mark.usefixtures("either_way")

BROKEN_ID = 50
PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 20
DTYPES = [torch.float32, torch.float64, *([torch.bfloat16] if supports_bfloat16() else [])]


class Guesses:
    """Drafts what a function says."""

    max_draft_tokens = 5
    layer_ids = ()

    def __init__(self, guess: Callable[[Row], list[int]]) -> None:
        self._guess = guess

    def prepare(self, batch: Batch) -> None: ...

    def draft(self, batch: Batch) -> DraftBlock:
        return [self._guess(row) for row in batch]

    def absorb(self, *args: Any) -> None: ...

    def close(self, key: int) -> None: ...


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf], ids=str)
def test_a_rejected_token_that_is_no_number(
    broken: float, way: Way, kind: str, dtype: torch.dtype
) -> None:
    model = tiny_target(kind, dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN_ID] = broken
    params = SamplingParams(max_tokens=NUM_TOKENS, logit_bias={BROKEN_ID: -100.0})
    with make_target(way, model).released_after() as target:
        plain = generate_plain(target, PROMPT, params)
        assert plain.error is None

        def mostly_right(row: Row) -> list[int]:
            at = row.sequence.num_output
            right = plain.token_ids[at : at + row.num_draft_tokens]
            return [BROKEN_ID if i % 3 == 2 else token for i, token in enumerate(right)]

        for guess in (lambda row: [BROKEN_ID] * row.num_draft_tokens, mostly_right):
            assert generate(target, Guesses(guess), PROMPT, params) == plain

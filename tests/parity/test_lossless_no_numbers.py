"""A drafted token whose embedding is no number is rejected, and leaves no mark on what is kept."""

from collections.abc import Callable

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from tests.fakes import FakeDrafter
from tests.parity.checks import generate, generate_plain
from tests.parity.targets import WAYS, Way, make_target
from tests.tiny import KINDS, tiny_target

pytestmark = pytest.mark.usefixtures("either_way")

BROKEN_ID = 50
PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 20
DTYPES = [torch.float32, torch.float64, *([torch.bfloat16] if supports_bfloat16() else [])]


class Guesses(FakeDrafter):
    """Drafts what a function says."""

    def __init__(self, guess: Callable[[Sequence, int], list[int]]) -> None:
        super().__init__(max_nodes=5)
        self.guess = guess


@pytest.mark.one_in(6)
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

        def mostly_right(sequence: Sequence, num: int) -> list[int]:
            at = sequence.num_output
            right = plain.token_ids[at : at + num]
            return [BROKEN_ID if i % 3 == 2 else token for i, token in enumerate(right)]

        for guess in (lambda sequence, num: [BROKEN_ID] * num, mostly_right):
            assert generate(target, Guesses(guess), PROMPT, params) == plain

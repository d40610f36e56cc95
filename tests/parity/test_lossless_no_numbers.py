"""What is no number leaves no mark: in rejected drafts, and in pages that were used before."""

from collections.abc import Callable

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.engine.engine import Engine
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.models.target.paged import PagedTarget
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_held_no_numbers(kind: str, dtype: torch.dtype) -> None:
    """Pages are not cleared; several sequences of different lengths share their products."""
    model, params = tiny_target(kind, dtype), SamplingParams(max_tokens=PAGE_SIZE)
    prompts = [[3 + 7 * i % 40 for i in range(num)] for num in (5, 70, PAGE_SIZE)]
    found = []
    for fill in (0.0, torch.nan):
        with PagedTarget(model, Pages(17), layer_ids=()).released_after() as target:
            for pool in target.kv.pools:
                pool.fill_(fill)
            drafter = Guesses(lambda sequence, num: sequence.token_ids[-num:])
            engine = Engine(target, drafter, prefill_chunk=PAGE_SIZE + 5)
            keys = [engine.add(prompt, params) for prompt in prompts]
            while engine.has_work:
                engine.step()
            found.append([engine.take(key).sequence for key in keys])
    for clean, other in zip(*found, strict=True):
        assert (other.error, other.output_ids) == (None, clean.output_ids)

"""In bfloat16 too: drafted equals plain bit for bit, on tiny random targets."""

import random

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from tests.fakes import NoisyOracleDrafter, OracleDrafter, RandomDrafter
from tests.parity.checks import check_drafted_equals_plain
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import KINDS, VOCAB_SIZE, tiny_drafter, tiny_target

pytestmark = pytest.mark.skipif(
    not supports_bfloat16(), reason="this CPU does not multiply bfloat16"
)


def make_drafters(target: SequentialTarget | PagedTarget, num: int) -> list[Drafter]:
    dflash = make_dflash(target, tiny_drafter(torch.bfloat16, block_size=16))
    dflash.max_nodes = num
    return [
        OracleDrafter(num),
        NoisyOracleDrafter(num, VOCAB_SIZE),
        RandomDrafter(num, VOCAB_SIZE),
        dflash,
    ]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_equals_plain(
    kind: str, num_draft_tokens: int, temperature: float, way: Way
) -> None:
    """Tokens and the float32 log-probabilities of the eight likeliest."""
    draw = random.Random(num_draft_tokens)
    target = make_target(way, tiny_target(kind, torch.bfloat16))
    target.check_row_invariance()
    for drafter in make_drafters(target, num_draft_tokens):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 5, 40, 70]))]
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, logprobs=8)
        check_drafted_equals_plain(
            target, drafter, prompt, params, engine_options={"prefill_chunk": draw.choice([7, 512])}
        )

"""Every family through everything that a request can meet, in float64, against transformers.

Blocks of 16; a text beyond the windows and 300 tokens long; five at once that share beginnings;
prompts in chunks; memory so short that requests make room; and requests that go away.
"""

import random
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.models.layers.recurrent import is_recurrent
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged
from blockdraft.models.target.sequential import SequentialTarget
from tests.batched import Answer, Request, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity.checks import stock_greedy
from tests.parity.test_architectures import OTHER_STEPS
from tests.tiny import VOCAB_SIZE
from tools import families

LONG = 300
NUM_SLOTS = 15
FEW_PAGES = 9
"""Enough for the long text, and not for all beside it."""
QUICK = ("Gemma3", "Laguna")

Target = PagedTarget | SequentialTarget


def model_of(family: str) -> PreTrainedModel:
    model = families.make(family).double()
    model.set_experts_implementation("eager")  # the default one has no float64
    return model


def target_of(model: PreTrainedModel, num_pages: int) -> Target:
    """On the path that an engine would take."""
    try:
        return PagedTarget(model, Pages(num_pages))
    except NotPaged:
        return SequentialTarget(model)


def requests(max_tokens: int) -> list[Request]:
    """Greedy and sampled; three have a beginning of a page that the first one has too."""
    draw = random.Random(0)
    first, short, long = (
        tuple(draw.randrange(VOCAB_SIZE) for _ in range(n)) for n in (PAGE_SIZE + 6, 3, 130)
    )
    shared = first[:PAGE_SIZE]
    prompts = [first, (*shared, 5, 9), short, (*shared, *long[:20]), long]
    params = [
        SamplingParams(max_tokens=max_tokens, logprobs=0),
        SamplingParams(max_tokens=24, temperature=1.5, seed=11, logprobs=0),
    ]
    return [
        Request(prompt, params[index % 2], arrival=4 * index)
        for index, prompt in enumerate(prompts)
    ]


def drafted(target: Target, alone: list[Answer], wanted: list[Request], chunk: int) -> int:
    """All at once with drafts, as alone; returns how often a request made room."""
    drafter = NoisyOracleDrafter(NUM_SLOTS, VOCAB_SIZE, seed=3)
    known = [answer.token_ids for answer in alone]
    batched = run_batched(target, drafter, wanted, known=known, prefill_chunk=chunk)
    assert batched.answers == alone
    assert batched.engine.proposer.failures.num_failures == 0
    accepted = sum(answer.acceptance.num_accepted for answer in batched.answers)
    assert 0 < accepted < sum(answer.acceptance.num_drafted for answer in batched.answers)
    return batched.engine.scheduler.num_preempted


def check_aborts(target: Target, alone: list[Answer], wanted: list[Request]) -> None:
    """Two go away after some steps; what they had, and what the others get, is as alone."""
    drafter = NoisyOracleDrafter(NUM_SLOTS, VOCAB_SIZE, seed=5)
    engine = Engine(target, drafter, prefill_chunk=64)
    keys = [engine.add(request.prompt, request.params) for request in wanted]
    drafter.known = {k: answer.token_ids for k, answer in zip(keys, alone, strict=True)}
    for _ in range(5):
        engine.step()
    found = {key: engine.take(key).sequence.output_ids for key in keys[:2]}
    while engine.has_work:
        engine.step()
    found |= {key: engine.take(key).sequence.output_ids for key in keys[2:]}
    for index, (key, answer) in enumerate(zip(keys, alone, strict=True)):
        expected = answer.token_ids
        assert found[key] == (expected if index >= 2 else expected[: len(found[key])])


def check_family(family: str) -> None:
    model = model_of(family)
    with target_of(model, 40).released_after() as target:
        alone = run_alone(target, requests(24))
        for chunk in (1, 64, 512):
            drafted(target, alone, requests(24), chunk)
        check_aborts(target, alone, requests(24))
        if isinstance(target, PagedTarget):
            assert target.memory.num_reused_tokens >= PAGE_SIZE
    with target_of(model, FEW_PAGES).released_after() as target:
        wanted = requests(24)
        # Both grow until there is no room for both.
        wanted[0], wanted[4] = requests(LONG)[0], replace(requests(200)[4], arrival=0)
        alone = run_alone(target, wanted)
        num_preempted = drafted(target, alone, wanted, 7)
        assert num_preempted > 0 or not isinstance(target, PagedTarget)
    num_distinct = [len(set(answer.token_ids)) for answer in alone]
    assert max(num_distinct) >= families.MIN_DISTINCT
    # Greedy, random weights may say the same token for ever behind one prompt.
    varied = max((0, 4), key=lambda index: num_distinct[index])
    tokens = alone[varied].token_ids
    assert num_distinct[varied] > 2
    if type(model).__name__ not in OTHER_STEPS:
        # States are kept in float32, and scanned in another order there.
        num_equal = 24 if is_recurrent(model) else len(tokens)
        expected = stock_greedy(model, wanted[varied].prompt, num_equal)
        assert tokens[:num_equal] == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", QUICK)
def test_drafted_equals_plain_and_transformers(family: str) -> None:
    check_family(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families.families() if name not in QUICK])
def test_drafted_equals_plain_and_transformers_in_all_others(family: str) -> None:
    check_family(family)

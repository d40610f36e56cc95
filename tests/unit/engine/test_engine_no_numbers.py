"""Logits that are no numbers end their request, and nothing else.

What a broken weight or an overflow makes must stay in its row, step and pages.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.speculate.drafters.none import NoDrafter
from tests.fakes import ConstantDrafter, NoisyOracleDrafter, TableTarget
from tests.parity.checks import check_drafted_equals_plain, generate, generate_plain, joined, run
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

TABLE = TableTarget.random(VOCAB_SIZE).table
GREEDY = SamplingParams(max_tokens=24)


def bad_table(prompt: list[int], index: int) -> tuple[torch.Tensor, list[int]]:
    """A table without numbers behind the output's token `index`, and the tokens before."""
    params = SamplingParams(max_tokens=24)
    tokens = generate_plain(TableTarget(TABLE), prompt, params).token_ids
    table, held = TABLE.clone(), prompt + tokens
    end = len(prompt) + index
    table[held[end - 2], held[end - 1], 5] = math.nan
    return table, tokens[:index]


@pytest.mark.parametrize("index", [0, 1, 7])
def test_no_number_ends_that_request_only_and_keeps_its_tokens(index: int) -> None:
    prompts = [[1, 2, 3], [50, 51, 52], [4] * 9]
    table, kept = bad_table(prompts[1], index)
    engine = Engine(TableTarget(table), ConstantDrafter(4, 7))
    keys = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs = run(engine)
    for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        sequence = engine.take(key).sequence
        assert joined(outputs[key]) == sequence.output_ids
        if number == 1:
            assert sequence.output_ids == kept
            assert sequence.finish_reason == outputs[key][-1].finish_reason == "error"
            assert f"at position {3 + index} are not numbers" in str(sequence.error)
        else:
            alone = generate_plain(TableTarget(TABLE), prompt, GREEDY)
            assert (sequence.output_ids, sequence.finish_reason) == (alone.token_ids, "length")


@pytest.mark.parametrize("index", [0, 1, 2, 7, 13])
@pytest.mark.parametrize("options", [{}, {"logit_bias": {3: 0.5}, "logprobs": 2}], ids=str)
def test_no_number_ends_drafted_and_plain_decoding_alike(
    index: int, options: dict[str, Any]
) -> None:
    table, kept = bad_table([50, 51, 52], index)
    params = SamplingParams(max_tokens=24, **options)
    for drafter in (NoisyOracleDrafter(6, VOCAB_SIZE), ConstantDrafter(3, 9)):
        result = check_drafted_equals_plain(TableTarget(table), drafter, [50, 51, 52], params)
        if not options:
            assert result.token_ids == kept
            assert result.finish_reason == "error"


BAD_TOKEN = 92


def broken_target(way: Way, num_pages: int = 17) -> Any:
    """A target that has no numbers for one token: neither keys and values nor logits."""
    model = tiny_target(dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = math.nan
    return make_target(way, model, num_pages=num_pages)


@pytest.mark.parametrize("num_bad", [3, 40, 2 * PAGE_SIZE + 9])
@pytest.mark.parametrize("way", WAYS)
def test_keys_that_are_no_numbers_do_not_outlive_their_sequence(way: Way, num_bad: int) -> None:
    """Masked keys take part in the products: 0 times no number is no number."""
    oracle = make_target("sequential", tiny_target(dtype=torch.float64))
    target = broken_target(way, num_pages=5)
    assert generate_plain(target, [BAD_TOKEN] * num_bad, GREEDY).finish_reason == "error"
    for prompt in ([1, 2, 3], [4] * 70, [*range(60)]):
        expected = generate_plain(oracle, prompt, GREEDY)
        assert BAD_TOKEN not in prompt + expected.token_ids
        assert generate_plain(target, prompt, GREEDY) == expected


def test_pages_without_numbers_are_not_handed_on() -> None:
    """A bad token damages what shares its forward, the page before it too."""
    model = tiny_target(dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = math.nan
    engine = Engine(make_target("paged", model), NoDrafter())
    for last, reason in ((BAD_TOKEN, "error"), (5, "length")):
        key = engine.add([*range(1, PAGE_SIZE + 1), last, 6], GREEDY)
        run(engine)
        assert engine.take(key).sequence.finish_reason == reason


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts", [False, True])
def test_keys_that_are_no_numbers_do_not_leave_their_row(drafts: bool, way: Way) -> None:
    """Sequences of many lengths, that share their products, with bad ones among and behind them."""
    oracle = make_target("sequential", tiny_target(dtype=torch.float64))
    target = broken_target(way)
    draft = make_dflash(target, tiny_drafter(torch.float64))
    engine = Engine(target, draft if drafts else NoDrafter())
    good = [list(range(1, 1 + num % 80)) + [7] * (num - num % 80) for num in (3, 150, 200)]
    keys = [engine.add(prompt, GREEDY) for prompt in good]
    bad = []
    for num_steps in itertools.count():
        if not engine.has_work:
            break
        engine.step()
        if num_steps in (0, 3, 6):
            bad.append(engine.add([7, 8] + [BAD_TOKEN] * (1 + num_steps), GREEDY))
    for key in bad:
        assert engine.take(key).sequence.finish_reason == "error"
    for key, prompt in zip(keys, good, strict=True):
        sequence, expected = engine.take(key).sequence, generate_plain(oracle, prompt, GREEDY)
        assert BAD_TOKEN not in expected.token_ids
        assert (sequence.error, sequence.output_ids) == (None, expected.token_ids)


def test_a_drafter_without_numbers_changes_nothing() -> None:
    target = make_target("paged", tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    with torch.no_grad():
        drafter.model.norm.weight.fill_(math.nan)
    for options in ({}, {"temperature": 1.0, "seed": 2}):
        params = SamplingParams(max_tokens=12, **options)
        plain = generate_plain(target, [1, 2, 3], params)
        assert plain.finish_reason == "length"
        assert generate(target, drafter, [1, 2, 3], params) == plain

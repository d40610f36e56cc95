"""Planted faults of grammars are caught, and the same checks pass without them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blockdraft import LLM, Grammar, SamplingParams
from blockdraft.core.plan import ForwardPlan
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.verify import verify
from tests.parity import faults
from tests.parity.checks import check_distribution
from tests.small_llm import load_llm
from tests.tiny import tiny_drafter_folder, tiny_target_folder

Fault = Callable[[], AbstractContextManager[None]]

LIST = Grammar.regex(r"\[(abc|the|[0-9]{2})(, (abc|the|[0-9]{2})){6}\]")
SETTINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 2}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    root = tmp_path_factory.mktemp("pair")
    return load_llm((tiny_target_folder(root), tiny_drafter_folder(root)))


def check_drafted_equals_plain(llm: LLM, name: str) -> None:
    params = replace(SamplingParams(grammar=LIST), **SETTINGS[name])
    drafted = llm.generate("abc", params).completions[0]
    plain = llm.generate("abc", replace(params, num_draft_tokens=0)).completions[0]
    found, expected = (drafted.token_ids, drafted.error), (plain.token_ids, plain.error)
    assert found == expected, "drafted differs from plain"
    assert drafted.acceptance.num_passes < drafted.acceptance.num_tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_the_equality_check_passes_without_a_fault(llm: LLM, name: str) -> None:
    check_drafted_equals_plain(llm, name)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "fault", [faults.grammar_advanced_by_rejected_drafts, faults.one_mask_for_the_block]
)
def test_the_equality_check_finds(llm: LLM, fault: Fault, name: str) -> None:
    with fault(), pytest.raises(AssertionError, match="drafted differs from plain"):
        check_drafted_equals_plain(llm, name)


class AllBut:
    """Allows all tokens but one."""

    def __init__(self, vocab_size: int, token_id: int) -> None:
        self.mask = np.arange(vocab_size) != token_id

    def allowed(self, output_ids: list[int], ahead: list[int]) -> NDArray[np.bool_]:
        return self.mask


@pytest.mark.one_in(3)
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("fault", [nullcontext, faults.grammar_after_the_choice])
def test_the_distribution_check_finds_a_grammar_that_comes_too_late(
    fault: Fault, params: dict[str, float]
) -> None:
    """The chances of the tokens that are left are those of the softmax over them, filtered."""
    logits = torch.tensor([[1.0, 1.5, 0.5, 0.0, -1.0]])
    chances = logits[0].double().index_fill(0, torch.tensor([1]), -torch.inf).softmax(0)
    kept = {"top_k": [0, 2, 3], "top_p": [0, 2, 3]}.get(next(iter(params), ""), [0, 2, 3, 4])
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = chances[kept] / chances[kept].sum()
    counts = torch.zeros(5)
    wanted = replace(SamplingParams(temperature=1.0, grammar=LIST, seed=1), **params)
    with fault():
        for index in range(4000):
            sequence = Sequence(0, wanted, 1, index, frozenset(), [1], 1, constraint=AllBut(5, 1))
            (verdict,) = verify(ForwardPlan.of_chains([Row(sequence, [1], 0)], [[]]), logits)
            counts[verdict.token_ids[0]] += 1
    broken = fault is not nullcontext
    with pytest.raises(AssertionError) if broken else nullcontext():
        check_distribution(counts, expected)

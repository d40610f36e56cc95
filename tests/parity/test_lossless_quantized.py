"""Quantized targets: drafted equals their own plain decoding, and planted faults are found."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.core.config import Quantize
from blockdraft.core.request import SamplingParams
from blockdraft.kernels.cpu.products import GroupProduct
from blockdraft.kernels.torch.groups import GroupLinear
from blockdraft.kernels.weights import GROUP, GroupWeight
from blockdraft.models.layers import experts
from blockdraft.models.layers.quantized import dequantize, quantize_model
from blockdraft.speculate.drafters.base import Drafter
from tests.fakes import NoisyOracleDrafter, OracleDrafter
from tests.parity.checks import (
    check_drafted_equals_plain,
    check_fault_is_found,
    check_together_equals_alone,
    generate_plain,
    stock_greedy,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target
from tests.trees import TreeDrafter

KINDS = ("llama", "qwen3", "gemma3", "qwen2", "qwen3_moe", "gpt_oss")
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6) * 6
PARAMS = {
    "greedy": SamplingParams(max_tokens=32, logprobs=4),
    "sampled": SamplingParams(max_tokens=32, logprobs=4, temperature=1.0, seed=11),
}


def quantized(
    kind: str = "llama", quantize: Quantize = "int4", dtype: torch.dtype = torch.float32
) -> Any:
    # Experts of a width that can be rounded.
    sizes = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}
    model = tiny_target(kind, dtype, **sizes)
    quantize_model(model, quantize)
    return model


@pytest.mark.usefixtures("either_way")
@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_drafted_equals_plain(way: Way, kind: str, quantize: Quantize, name: str) -> None:
    """Chains and trees, the answer in two pages, with the bits of log-probabilities."""
    with make_target(way, quantized(kind, quantize)).released_after() as target:
        target.check_row_invariance()
        drafters: list[Drafter] = [TreeDrafter()]
        drafters.append(make_dflash(target, tiny_drafter(block_size=8)))
        for drafter in drafters:
            result = check_drafted_equals_plain(target, drafter, PROMPT, PARAMS[name])
            assert len(set(result.token_ids)) >= (8 if name == "sampled" else 3)
            assert result.acceptance.num_drafted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_in_other_precisions_too(way: Way, dtype: torch.dtype) -> None:
    target = make_target(way, quantized("qwen3", "int4", dtype))
    check_drafted_equals_plain(target, OracleDrafter(7), PROMPT, PARAMS["sampled"])


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_together_equals_alone(quantize: Quantize, name: str) -> None:
    """Also with the bits of the sequential path, and of prompts that share their beginning."""
    target = make_target("paged", quantized(quantize=quantize))
    oracle = make_target("sequential", quantized(quantize=quantize))
    prompts = [PROMPT, [*PROMPT, 7], [*PROMPT * 2], [1], [*range(90)]]
    drafter = NoisyOracleDrafter(7, VOCAB_SIZE)
    for chunk in (7, 512):
        check_together_equals_alone(
            target, drafter, oracle, prompts, PARAMS[name], prefill_chunk=chunk
        )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_it_answers_what_transformers_answers_with_the_rounded_weights(kind: str) -> None:
    stock = quantized(kind, "int8")
    dequantize(stock)
    expected = stock_greedy(stock, PROMPT, 12)
    target = make_target("paged", quantized(kind, "int8"))
    found = generate_plain(target, PROMPT, SamplingParams(max_tokens=12)).token_ids
    assert found == expected


def test_other_weights_answer_otherwise() -> None:
    answers = [
        tuple(generate_plain(make_target("paged", model), PROMPT, PARAMS["greedy"]).token_ids)
        for model in (quantized(quantize="int4"), quantized(quantize="int8"), tiny_target())
    ]
    assert len(set(answers)) == 3


Product = Callable[[Tensor], Tensor]


@contextmanager
def beside_other_products(
    change: Callable[[GroupWeight], GroupWeight],
    choose: Callable[[Product, Product, Tensor], Tensor],
) -> Iterator[None]:
    """Products become what `choose` makes of them, those of a changed weight, and the input."""
    make, product = GroupProduct.__init__, GroupProduct.__call__

    def init(self: Any, kernels: Any, weight: GroupWeight, bias: Any) -> None:
        make(self, kernels, weight, bias)
        self.other = GroupLinear(change(weight), bias)

    def call(self: Any, x: Tensor) -> Tensor:
        return choose(partial(product, self), self.other, x)

    with patch.object(GroupProduct, "__init__", init), patch.object(GroupProduct, "__call__", call):
        yield


def scales_of_another_group() -> AbstractContextManager[None]:
    """The rows behind the first are multiplied with the scales of a neighboring group."""

    def change(weight: GroupWeight) -> GroupWeight:
        return GroupWeight(weight.numbers, weight.scales.roll(1, 1), weight.minimums, weight.dtype)

    def behind_the_first(right: Product, wrong: Product, x: Tensor) -> Tensor:
        rows, others = right(x).flatten(0, -2), wrong(x).flatten(0, -2)
        return torch.cat((rows[:1], others[1:])).view(*x.shape[:-1], -1)

    return beside_other_products(change, behind_the_first)


def the_next_expert_for_many_rows() -> AbstractContextManager[object]:
    """A share of several rows goes to the next expert."""
    run = experts._run

    def wrong(module: Any, expert: int, rows: Tensor) -> Tensor:
        if rows.shape[0] > module.blockdraft_row_multiple:
            expert = (expert + 1) % module.num_experts
        return run(module, expert, rows)

    return patch.object(experts, "_run", wrong)


def order_by_the_number_of_rows() -> AbstractContextManager[None]:
    """The groups of many rows are added up from the last to the first."""

    def turned(weight: GroupWeight) -> GroupWeight:
        minimums = None if weight.minimums is None else weight.minimums.flip(1)
        return GroupWeight(weight.numbers.flip(1), weight.scales.flip(1), minimums, weight.dtype)

    def of_many_rows(forwards: Product, backwards: Product, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() <= 4:
            return forwards(x)
        return backwards(x.unflatten(-1, (-1, GROUP)).flip(-2).flatten(-2))

    return beside_other_products(turned, of_many_rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", [scales_of_another_group, order_by_the_number_of_rows])
def test_a_planted_fault_is_found(fault: Any, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the test at load, and by the comparison of drafted with plain output."""
    # In one call a layer does not ask these products.
    monkeypatch.setattr("blockdraft.kernels.cpu.backend.NativeBackend.layer", lambda *_: None)
    target = make_target(way, quantized())
    head = vars(target.model.get_output_embeddings()).get("forward")
    if not isinstance(getattr(head, "linear", None), GroupProduct):
        pytest.skip("no products with groups by kernels on this machine")
    check_drafted_equals_plain(target, OracleDrafter(7), PROMPT, PARAMS["greedy"])
    with fault():
        target = make_target(way, quantized())
        check_fault_is_found(target, PROMPT, PARAMS["greedy"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_fault_of_quantized_experts_is_found(kind: str, way: Way) -> None:
    target = make_target(way, quantized(kind))
    check_drafted_equals_plain(target, OracleDrafter(7), PROMPT, PARAMS["greedy"])
    with the_next_expert_for_many_rows():
        check_fault_is_found(target, PROMPT, PARAMS["greedy"])


def test_the_tiny_models_have_several_groups() -> None:
    assert tiny_target().config.hidden_size > GROUP

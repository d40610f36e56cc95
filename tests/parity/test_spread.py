"""Targets whose layers lie on several devices, on a second device that the CPU plays."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import load_target_model
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.spread import spread
from tests.batched import Request, paged_pair, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.second_device import SECOND, move, second_device
from tests.small_llm import load_llm
from tests.tiny import (
    VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

FIRST = torch.device("cpu")
REQUESTS = [
    Request(tuple(range(PAGE_SIZE + 6)), SamplingParams(max_tokens=16, logprobs=0)),
    Request(
        (*range(PAGE_SIZE), 9),
        SamplingParams(max_tokens=12, temperature=1.5, seed=3, logprobs=0),
        arrival=4,
    ),
    Request((8, 3, 20), SamplingParams(max_tokens=20, logprobs=0), arrival=2),
]


@contextmanager
def over_two(kind: str, there: tuple[int, ...]) -> Iterator[PreTrainedModel]:
    """A model some of whose layers lie on the second device."""
    model = tiny_target(kind, torch.float64)
    with second_device():
        for index in there:
            move(decoder_layers(model)[index])
        yield model


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "there"), [("llama", (0, 3)), ("gemma3", (1, 2)), ("qwen3_moe", (2, 3))]
)
def test_drafted_equals_plain_and_one_device(kind: str, there: tuple[int, ...]) -> None:
    draft_model = tiny_drafter(torch.float64)
    target, drafter = paged_pair(tiny_target(kind, torch.float64), draft_model, Pages(20))
    with target.released_after():
        alone = run_alone(target, REQUESTS)
        expected = run_batched(target, drafter, REQUESTS).answers
    with over_two(kind, there) as model:
        spread(model)
        target, drafter = paged_pair(model, draft_model, Pages(20))
        with target.released_after():
            places = [pool.device for pool in target.kv.pools]
            assert places == [SECOND if i in there else FIRST for i in range(len(places))]
            target.check_row_invariance()
            assert run_alone(target, REQUESTS) == alone == expected
            found = run_batched(target, drafter, REQUESTS).answers
            assert found == alone
            # It read the same features.
            assert [a.acceptance for a in found] == [a.acceptance for a in expected]
            oracle = NoisyOracleDrafter(15, VOCAB_SIZE, seed=3)
            known = [answer.token_ids for answer in alone]
            batched = run_batched(target, oracle, REQUESTS, known=known)
            assert batched.answers == alone
            assert sum(answer.acceptance.num_accepted for answer in batched.answers) > 0
            assert target.memory.num_reused_tokens >= PAGE_SIZE
    assert len({token for answer in alone for token in answer.token_ids}) >= 8


def test_keys_on_the_wrong_device_are_noticed() -> None:
    with over_two("llama", (1,)) as model:
        spread(model)
        with PagedTarget(model, Pages(20)).released_after() as target:
            target.kv.pools[1] = torch.zeros_like(target.kv.pools[0])
            with pytest.raises(RuntimeError, match="two devices"):
                run_alone(target, REQUESTS)


@pytest.mark.parametrize(
    ("places", "first"),
    [({"model.layers.0": "disk"}, "model.layers.0"), ({"lm_head": "cpu", "model": 0}, "lm_head")],
)
def test_weights_without_a_device_are_refused(places: dict[str, object], first: str) -> None:
    model = tiny_target()
    model.hf_device_map = {"model.embed_tokens": "cpu"} | places
    with pytest.raises(ModelError, match=r"leaves (model|lm_head).*use more devices") as error:
        spread(model)
    assert "\n" not in str(error.value)


def test_hooks_of_another_library_are_taken_off(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "lm_head"), "cpu")
    places["model.rotary_emb"] = "cpu"
    model = load_target_model(folder, torch.float32, device_map=places)
    dispatch_model(model, places, force_hooks=True)
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    assert len(hooked) > 4
    assert spread(model) == "cpu"
    assert not [module for module in model.modules() if hasattr(module, "_hf_hook")]
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_an_llm_with_a_map_answers_as_without(tmp_path: Path) -> None:
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    answers = [
        load_llm(folders, device_map=ways)
        .generate("the abc of it", params)
        .completions[0]
        .token_ids
        for ways in (None, "auto")
    ]
    assert answers[0] == answers[1]
    assert len({*answers[0]}) >= 8

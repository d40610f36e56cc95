"""Ends, special token ids, positions, caches: the places where engines go wrong."""

import itertools
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.models.supported import MIN_CONTEXT
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.fakes import (
    AlwaysWrongDrafter,
    NoisyOracleDrafter,
    OracleDrafter,
    RandomDrafter,
    TableTarget,
)
from tests.parity.checks import (
    check_draft_context,
    check_drafted_equals_plain,
    generate,
    generate_plain,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import KINDS, NUM_LAYERS, VOCAB_SIZE, tiny_drafter, tiny_target

PROMPT = (11, 7, 5, 3, 2)
LENGTH = 24


def float64_drafter(
    target: SequentialTarget | PagedTarget, block_size: int = 8, **changes: Any
) -> DFlashDrafter:
    return make_dflash(target, tiny_drafter(torch.float64, block_size=block_size, **changes))


@lru_cache
def float64_oracle(kind: str) -> SequentialTarget:
    return SequentialTarget(tiny_target(kind, torch.float64))


def make_drafters(target: Any, num: int) -> list[Drafter]:
    return [
        OracleDrafter(num),
        AlwaysWrongDrafter(num, VOCAB_SIZE),
        NoisyOracleDrafter(num, VOCAB_SIZE),
        RandomDrafter(num, VOCAB_SIZE),
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", ["normal", "stop", "pad"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_id_may_be_any_token(kind: str, role: str, way: Way) -> None:
    """The target emits the mask id; it may be the stop id, or the padding id, too."""
    plain = generate_plain(float64_oracle(kind), PROMPT, SamplingParams(max_tokens=LENGTH))
    mask_id = plain.token_ids[LENGTH // 2]
    params = SamplingParams(max_tokens=LENGTH, stop_token_ids=(mask_id,) if role == "stop" else ())
    expected = plain.token_ids
    if role == "stop":
        expected = expected[: expected.index(mask_id) + 1]
    model = tiny_target(kind, torch.float64)
    if role == "pad":
        model.config.pad_token_id = model.generation_config.pad_token_id = mask_id
        model.get_input_embeddings().padding_idx = mask_id
    target = make_target(way, model)
    drafters = [float64_drafter(target, mask_token_id=mask_id), *make_drafters(target, 7)]
    for drafter in drafters:
        prompt = PROMPT
        result = generate(target, drafter, prompt, params, known=plain.token_ids)
        assert result.token_ids == expected


@lru_cache
def table_output() -> tuple[int, ...]:
    params = SamplingParams(max_tokens=LENGTH)
    return tuple(generate_plain(TableTarget.random(), PROMPT, params).token_ids)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("end", range(18))
def test_nothing_follows_a_stop_token_wherever_it_falls(end: int, block_size: int) -> None:
    """From the first token to each slot of a block; the oracle's later drafts match too."""
    truth = list(table_output())
    expected = truth[: truth.index(truth[end]) + 1]
    target = TableTarget.random()
    unused = next(i for i in range(VOCAB_SIZE) if i not in truth)
    for eos_ids, stop_ids in [
        ({truth[end]}, ()),
        (set(), (truth[end],)),
        ({truth[end], unused}, (truth[-1] if truth[-1] not in expected else unused,)),
    ]:
        params = SamplingParams(max_tokens=LENGTH, stop_token_ids=stop_ids, logprobs=2)
        for drafter in make_drafters(target, block_size - 1):
            result = generate(
                target, drafter, PROMPT, params, known=truth, eos_ids=frozenset(eos_ids)
            )
            assert result.token_ids == expected
            assert result.finish_reason == "stop"
            assert len(result.logprobs) == len(expected)
            assert not target.cached


def test_ignore_eos_ignores_eos_and_not_the_stop_ids() -> None:
    truth = list(table_output())
    eos_ids = frozenset({truth[3]})
    for stop_ids, expected in (((), truth), ((truth[9],), truth[: truth.index(truth[9]) + 1])):
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop_token_ids=stop_ids)
        result = check_drafted_equals_plain(
            TableTarget.random(), OracleDrafter(7), PROMPT, params, eos_ids=eos_ids
        )
        assert result.token_ids == expected


def make_scanner(stops: list[str]) -> Callable[[int], bool]:
    """Text is one letter a token; true when it ends with one of `stops`."""
    text = ""

    def scan(token_id: int) -> bool:
        nonlocal text
        text += chr(0x100 + token_id)
        return any(text.endswith(stop) for stop in stops)

    return scan


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_stop_string_ends_the_text_on_either_side_of_a_blocks_edge(size: int) -> None:
    truth = list(table_output())
    text = "".join(chr(0x100 + token_id) for token_id in truth)
    for start, block_size in itertools.product(range(16), (1, 3, 4, 8)):
        stop = text[start : start + size]
        expected = truth[: text.index(stop) + size]
        for drafter in make_drafters(None, block_size - 1):
            result = generate(
                TableTarget.random(),
                drafter,
                PROMPT,
                SamplingParams(max_tokens=LENGTH),
                known=truth,
                make_scan=lambda stop=stop: make_scanner([stop, "never"]),
            )
            assert result.token_ids == expected
            assert result.finish_reason == "stop"


class PositionRecorder:
    """Every position id that a model embeds."""

    def __init__(self, model: nn.Module, argument: str | int) -> None:
        self.seen: set[int] = set()
        self.argument = argument
        self.hook = model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source: Any = args if isinstance(self.argument, int) else kwargs
        self.seen |= set(source[self.argument].flatten().tolist())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 20])
@pytest.mark.parametrize("num_prompt", [1, 2, 30, 70])
def test_no_position_past_the_end_is_embedded(num_prompt: int, max_tokens: int, way: Way) -> None:
    """The last token is never fed back, by target or drafter; also where the context ends."""
    size = num_prompt + max_tokens
    context = max(size, MIN_CONTEXT)
    model = tiny_target("gemma3", torch.float64, max_position_embeddings=context)
    target = make_target(way, model)
    if isinstance(target, PagedTarget):
        # What is taken over is not embedded again.
        target.memory.reuse = False
    prompt = [(7 * i) % VOCAB_SIZE for i in range(num_prompt)]
    drafters = [float64_drafter(target), *make_drafters(target, 7)]
    params = SamplingParams(max_tokens=max_tokens)
    known = generate_plain(target, prompt, params).token_ids
    for drafter in drafters:
        recorders = [PositionRecorder(model, "position_ids")]
        if isinstance(drafter, DFlashDrafter):
            recorders.append(PositionRecorder(drafter.model, 1))
        result = generate(target, drafter, prompt, params, known=known)
        assert result.token_ids == known
        for recorder in recorders:
            recorder.hook.remove()
            assert recorder.seen <= set(range(size - 1))
        assert recorders[0].seen == set(range(size - 1))


@torch.inference_mode()
def cached_keys(target: SequentialTarget | PagedTarget, engine: Engine, key: int) -> list[Tensor]:
    """Keys and values of the cached tokens in every layer, each [kv_heads, tokens, head_dim]."""
    length = engine.progress[key].sequence.num_cached
    if isinstance(target, SequentialTarget):
        cache = target._caches[key]
        assert cache.length == length
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    else:
        page_ids = torch.tensor(target.memory.page_ids(key))
        layers = [target.kv.gather(layer, page_ids).clone() for layer in range(NUM_LAYERS)]
    return [kv[:, :length].clone() for layer in layers for kv in layer]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_target_cache_equals_a_plain_runs_after_every_cycle(
    kind: str, dtype: torch.dtype, way: Way
) -> None:
    """A plain run of the sequential target, which takes no page over."""
    oracle = make_target("sequential", tiny_target(kind, dtype))
    target = make_target(way, tiny_target(kind, dtype))
    last: list[Tensor] = []

    def keep(engine: Engine, key: int) -> None:
        if engine.has_work:
            last[:] = cached_keys(oracle, engine, key)

    prompt = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(50)]
    params = SamplingParams(max_tokens=40)
    known = generate_plain(oracle, prompt, params, after_step=keep).token_ids

    num_compared = 0

    def compare(engine: Engine, key: int) -> None:
        nonlocal num_compared
        if not engine.has_work:
            return
        num_compared += 1
        for found, expected in zip(cached_keys(target, engine, key), last, strict=True):
            assert torch.equal(found, expected[:, : found.shape[1]])

    for drafter in make_drafters(target, 7):
        options = {"prefill_chunk": 9}
        params = SamplingParams(max_tokens=30)
        generate(
            target,
            drafter,
            prompt,
            params,
            known=known,
            engine_options=options,
            after_step=compare,
        )
    assert num_compared > 50


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_block_may_change_within_a_generation(temperature: float, way: Way) -> None:
    """Drafting may stop for a while, too: the features of those tokens wait."""
    target = make_target(way, tiny_target("gemma3", torch.float64))
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=8)
    plain = generate_plain(float64_oracle("gemma3"), PROMPT, params)
    sizes: list[int] = []

    def shrink(engine: Engine, key: int) -> None:
        num_output = engine.progress[key].sequence.num_output
        depths = (15, 7, 0, 3)
        engine.candidates.model_depth = depths[min(3, num_output // 14)]
        sizes.append(engine.candidates.model_depth)
        if isinstance(engine.drafter, DFlashDrafter):
            check_draft_context(engine, key)

    noisy = NoisyOracleDrafter(15, VOCAB_SIZE)
    for drafter in (OracleDrafter(15), noisy, float64_drafter(target, block_size=16)):
        sizes.clear()
        drafted = generate(
            target, drafter, PROMPT, params, known=plain.token_ids, after_step=shrink
        )
        assert drafted == plain
        assert set(sizes) == {15, 7, 0, 3}

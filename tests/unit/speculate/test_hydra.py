"""Guesses of a Hydra head beside a table of n-grams: by kernels and without, and its file."""

import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockdraft.core.errors import ModelError
from blockdraft.kernels.backends import native_ngrams
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.ngrams import NativeNGrams
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.ngram_interface import NGramPaths, NGramQuery, NGramSearch, TokenNoise
from blockdraft.models.draft.hydra_head import (
    EPS,
    HEAD_NAME,
    MOST_LEVEL,
    HeadShape,
    HydraHead,
    logits_of,
)
from blockdraft.speculate.drafters import ngram_search as search_module
from blockdraft.speculate.drafters.guesses import DEPTH, LEAST_TEMPERATURE, WEIGHT, HeadReader
from blockdraft.speculate.drafters.ngram_search import (
    LEAST_PROBABILITY,
    PlainSearch,
    ngram_search,
    rules_for,
)
from blockdraft.speculate.drafters.ngram_table import NGramTable
from tests.unit.speculate.test_ngram_search import noise_with_large, paths, text_of

SIZE, INNER, VOCAB_SIZE, LAYERS = 48, 36, 300, (1, 4)
FEATURE_LAYERS = (4, 2, 1)
CLEARLY = 1.01 * LEAST_PROBABILITY
WINDOW = 24
ATTENTION = {"num_heads": 4, "num_keys": 2, "head_dim": 16, "window": WINDOW}
SHAPE = HeadShape(SIZE, INNER, LAYERS, 0.9, **ATTENTION)

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels on this machine")


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one for all there is none to work ahead."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def random_head(seed: int = 0) -> HydraHead:
    """Knows every second token; sure enough of some to be heard."""
    torch.manual_seed(seed)
    head = HydraHead(SHAPE, torch.arange(0, VOCAB_SIZE, 2))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        head.last_norm.add_(1.0)
    return head


def ends(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of a target."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(VOCAB_SIZE, SIZE, generator=generator).to(dtype),
        0.5 * torch.randn(VOCAB_SIZE, SIZE, generator=generator).to(dtype),
    )


def layers_of(head: HydraHead, dtype: torch.dtype = torch.float32) -> HydraLayers:
    return head.layers(*ends(dtype), FEATURE_LAYERS)


def features(seed: int, num_rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, len(FEATURE_LAYERS) * SIZE, generator=generator)


def small_table() -> NGramTable:
    draw = random.Random(3)
    return NGramTable.count([(text_of(draw, 60, 6), 3) for _ in range(40)])


def native(table: NGramTable, layers: HydraLayers | None = None) -> NGramSearch:
    search = native_ngrams(rules_for(table), layers)
    assert search is not None
    return search


def is_close(found: NGramPaths, expected: NGramPaths) -> bool:
    """The same paths, but for those that are hardly likely enough."""
    one, other = (
        {path: p for path, p in zip(_paths(own), own.probabilities, strict=True) if p > CLEARLY}
        for own in (found, expected)
    )
    return one.keys() == other.keys() and one == pytest.approx(other, rel=2e-3)


def _paths(found: NGramPaths) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.one_in(3)
@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.2, 0.8, 1.0, 3.0])
def test_kernels_guess_the_same(temperature: float | None, dtype: torch.dtype) -> None:
    table, layers = small_table(), layers_of(random_head(), dtype)
    kernels, plain = native(table, layers), PlainSearch(table, layers)
    draw, num_changed, num_alike = random.Random(5), 0, 0
    for key in range(20):
        text = text_of(draw, 30, 6)
        noise = None
        if temperature is not None:
            noise = noise_with_large(draw, list(range(20)), len(text), temperature)
        for step in range(6):
            # Some features are missing between these and those before, as behind a batch.
            num_rows = len(text) if step == 0 else draw.choice([1, 2, 3])
            own = features(100 * key + step, num_rows).to(dtype)
            found = paths(kernels, key, text, noise, 40, 5, own)
            num_alike += is_close(found, paths(plain, key, text, noise, 40, 5, own))
            text += text_of(draw, draw.choice([1, 2, 3, 5]), 6)
        without = paths(kernels, key, text, noise, 40, 3)
        assert is_close(without, paths(PlainSearch(table), key, text, noise, 40, 3))
        num_changed += found.tokens != without.tokens
    assert num_changed > 5
    # Sums round differently, and a path may be just likely enough to guess behind.
    assert num_alike >= 0.97 * 20 * 6


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num", [2, 9])
def test_texts_are_guessed_together_as_alone(num: int) -> None:
    """Whatever is known of each, and however far it is searched: the head reads all at once."""
    table, layers, draw = small_table(), layers_of(random_head()), random.Random(6)
    together, alone = (native(table, layers) for _ in range(2))
    texts = [text_of(draw, 20 + key, 6) for key in range(num)]
    for step in range(12):
        queries = []
        for key, text in enumerate(texts):
            num_rows = len(text) if step == 0 else draw.choice([1, 2, 3])
            own = features(100 * key + step, num_rows) if draw.random() < 0.8 else None
            if own is not None and draw.random() < 0.1:
                own[0, 0] = draw.choice([torch.nan, torch.inf])
            noise = TokenNoise(key, 0, len(text), draw.choice([0.0, 0.3, 1.0]))
            nodes, depth = draw.choice([1, 8, 12]), draw.choice([1, 2, 3, 5])
            queries.append(
                NGramQuery(key, text, noise, nodes, depth, own, draw.choice([1, 2, DEPTH]))
            )
        together.search_ahead(queries[: draw.randrange(num + 1)])
        assert together.paths(queries) == [alone.paths([query])[0] for query in queries]
        for text in texts:
            text += text_of(draw, draw.choice([1, 2, 3]), 6)


def query_of(text: list[int], seed: int, **changes: Any) -> NGramQuery:
    """Of the text 0, with features that the seed gives."""
    return replace(NGramQuery(0, text, None, 40, 3, features(seed), DEPTH), **changes)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_found_ahead_is_what_would_be_found(dtype: torch.dtype) -> None:
    table, layers, draw = small_table(), layers_of(random_head()), random.Random(7)
    ahead, later = (native(table, layers) for _ in range(2))
    text = text_of(draw, 20, 6)
    for seed in range(60):
        num_rows = 1 + (seed - 1) % 3 if seed else len(text)
        noise = noise_with_large(draw, list(range(20)), len(text), draw.choice([0.0, 0.7, 1.0]))
        query = query_of(
            text, 0, noise=noise, num_nodes=8, features=features(seed, num_rows).to(dtype)
        )
        ahead.search_ahead([replace(query)])
        if draw.random() < 0.5:
            sleep(0.002)  # done by then; else it may be withdrawn
        assert ahead.paths([query]) == later.paths([query])
        text += text_of(draw, 1 + seed % 3, 6)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_a_search_ahead_answers_its_own_question_once() -> None:
    """The features of the query are others here, which tells who searched."""
    table, layers = small_table(), layers_of(random_head())
    search, other = (native(table, layers) for _ in range(2))
    text = text_of(random.Random(8), 20, 6)
    query = query_of(text, 1)
    search.search_ahead([query_of(text, 0)])  # of a text that is not known: nothing
    first, second = (other.paths([query_of(text, seed)]) for seed in (0, 1))
    assert first != second
    assert search.paths([query]) == second

    def is_found_ahead(asked: NGramQuery) -> bool:
        """Whether the search of `query` with other features is the answer to `asked`."""
        search.search_ahead([query_of(text, 0)])
        sleep(0.01)  # a busy machine may let it wait until it is withdrawn
        return search.paths([asked]) != other.paths([asked])

    assert any(is_found_ahead(query) for _ in range(200))
    assert search.paths([query]) == second  # not a second time
    noise = TokenNoise(0, 0, len(text), 1.0)
    for changes in (
        *({"num_nodes": 3}, {"max_depth": 1}, {"guess_depth": 1}),
        *({"features": None}, {"noise": noise}),
    ):
        assert not any(is_found_ahead(replace(query, **changes)) for _ in range(3))


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_text_and_noise_are_part_of_the_question() -> None:
    table, text = small_table(), text_of(random.Random(8), 20, 6)
    search = native(table, layers_of(random_head()))
    noise = noise_with_large(random.Random(1), list(range(20)), len(text), 1.0)
    query = query_of(text, 0, noise=noise)
    search.paths([query])
    asked = search._texts[0]
    assert asked._is_asked(replace(query, noise=replace(noise)))
    text += [3]
    assert not asked._is_asked(query)
    text.pop()
    for changes in (
        *({"seed": 5}, {"sample_index": 0}, {"position": 7}, {"temperature": 0.5}),
        {"large": None},
    ):
        assert not asked._is_asked(replace(query, noise=replace(noise, **changes)))


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_texts_may_end_while_they_are_guessed() -> None:
    """And the search with them: what is read meanwhile must stay."""
    head = HydraHead(
        HeadShape(SIZE, 200_000, LAYERS, 0.9, **ATTENTION), torch.arange(0, VOCAB_SIZE, 2)
    )
    search = native(small_table(), layers_of(head))
    del head
    for key in range(20):
        text = text_of(random.Random(key), 12, 6)
        paths(search, key, text, None, 4, 2)
        for _ in range(1 + key % 3):
            search.search_ahead([query_of(text, key, key=key)])
            sleep(0.001 * (key % 2))
        if key < 19:
            search.close(key)
    del search


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("function", ["take_ahead", "ngrams"])
def test_an_interrupt_does_not_let_a_text_count_twice(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, rules = library(), rules_for(NGramTable([]))
    assert kernels is not None
    search, other = NativeNGrams(kernels, rules), NativeNGrams(kernels, rules)
    text = [1, 2, 3, 1, 2]
    for own in (search, other):
        paths(own, 0, text, None, 8, 2)
    text += [4, 1, 2]
    if function == "take_ahead":
        search.search_ahead([query_of(text, 0, features=None)])
        sleep(0.01)
    real = getattr(kernels, function)

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            paths(search, 0, text, None, 8, 4)
    assert paths(search, 0, text, None, 8, 4) == paths(other, 0, text, None, 8, 4)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_texts_outlive_their_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the garbage collector ends all at once, the texts first."""
    kernels = library()
    assert kernels is not None
    gc.collect()  # what other tests have left is not to be noted
    ended: list[str] = []

    def noted(name: str, end: Callable[[int], None]) -> Callable[[int], None]:
        def noting(address: int) -> None:
            ended.append(name)
            end(address)

        return noting

    for name in ("text_delete", "ahead_delete"):
        monkeypatch.setattr(kernels, name, noted(name, getattr(kernels, name)))
    search = NativeNGrams(kernels, rules_for(small_table()), layers_of(random_head()))
    text = text_of(random.Random(8), 20, 6)
    search.paths([query_of(text, 0)])
    inner, owner = search._texts[0], SimpleNamespace(search=search)
    owner.own = owner
    del search
    gc.collect()  # what is only reached from others, as the search now, goes behind the text
    owner.search.search_ahead([query_of([*text, 3], 0)])
    del inner, owner
    gc.collect()
    assert ended == ["ahead_delete", "text_delete"]


ENDING = """
import os
import sys
import torch
from tests.unit.speculate.test_hydra import *

torch.get_num_threads = lambda: 2
head = HydraHead(
    HeadShape(SIZE, 400_000, LAYERS, 0.9, **ATTENTION), torch.arange(0, VOCAB_SIZE, 2)
)
search = native_ngrams(rules_for(small_table()), layers_of(head))
text = text_of(random.Random(0), 200_000, 250)
paths(search, 0, [1, 2, 3], None, 4, 2, features(0))
search.search_ahead([query_of(text[:100_000], 0, features=features(0, 24))])
sleep(0.005)
if (child := os.fork()) == 0:
    sys.exit(7)
for _ in range(100):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    sleep(0.1)
else:
    os.kill(child, 9)
print("child:", os.waitstatus_to_exitcode(status))
search.search_ahead([query_of(text, 0, features=features(0, 24))])
"""
"""Ends while a text is searched, once in a process that was forked off."""


@needs_kernels
def test_a_process_may_end_while_texts_are_searched() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "child: 7\n"), done.stderr


@needs_kernels
@pytest.mark.usefixtures("two_threads")
def test_features_that_do_not_fit_are_refused() -> None:
    search = native(small_table(), layers_of(random_head()))
    with pytest.raises(ValueError, match=r"3 features in torch\.float32, not 144"):
        paths(search, 0, [1, 2, 3], None, 4, 4, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"144 features in torch\.float64"):
        paths(search, 0, [1, 2, 3], None, 4, 4, torch.zeros(1, 144).double())
    with pytest.raises(ValueError, match="do not lie one behind another"):
        paths(search, 0, [1, 2, 3], None, 4, 4, torch.zeros(1, 288)[:, ::2])
    for wrong in (torch.zeros(144), torch.zeros(0, 144), torch.zeros(4, 144)):
        with pytest.raises(ValueError, match="before 3 tokens"):
            paths(search, 0, [1, 2, 3], None, 4, 4, wrong)
    for text in ([1, 2, 300], [1, 300, 3]):
        with pytest.raises(ValueError, match="token 300 of 300"):
            paths(search, 0, text, None, 4, 4, features(0, 2))
    paths(search, 0, [1, 300, 3], None, 4, 4, features(0))
    with pytest.raises(ValueError, match="token 300 of 300"):
        search.search_ahead([query_of([1, 2, 3, 300], 0)])


@needs_kernels
def test_a_head_without_guesses_is_refused() -> None:
    """The kernels look at the least of those that they keep."""
    rules = replace(rules_for(small_table()), num_guesses=0)
    with pytest.raises(ValueError, match="0 guesses of a head; give at least one"):
        native_ngrams(rules, layers_of(random_head()))


@needs_kernels
def test_kernels_leave_out_a_head_that_they_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    odd = HydraHead(HeadShape(SIZE, 35, LAYERS, 0.9, **ATTENTION), torch.arange(4))
    table = small_table()
    search = native(table, layers_of(odd))
    assert "draft without it" in caplog.text
    text = text_of(random.Random(2), 30, 6)
    without = native(table)
    found = paths(search, 0, text, None, 8, 4, features(0))
    assert found == paths(without, 0, text, None, 8, 4)


def says(head: HydraHead, x: torch.Tensor, before: list[torch.Tensor], place: int) -> torch.Tensor:
    """The state of a place, from what was joined there; `before` has the places that it sees.

    One head at a time, in the order of the formulas.
    """
    dim, num_heads, num_keys = SHAPE.head_dim, SHAPE.num_heads, SHAPE.num_keys

    def turned(own: torch.Tensor, at: int) -> torch.Tensor:
        parts = torch.complex(own[: dim // 2], own[dim // 2 :])
        angles = at * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        parts = parts * torch.polar(torch.ones(dim // 2), angles)
        return torch.cat((parts.real, parts.imag))

    seen = [(place - len(before) + at, own) for at, own in enumerate((*before, x))]
    split = [
        (at, (head.heads.weight @ rms(own, head.attention_norm)).view(-1, dim)) for at, own in seen
    ]
    found = []
    for index in range(num_heads):
        other = num_heads + index // (num_heads // num_keys)
        query = turned(split[-1][1][index], place)
        scores = torch.stack([query @ turned(own[other], at) for at, own in split]) / dim**0.5
        found.append(
            sum(
                w * own[other + num_keys]
                for w, (_, own) in zip(scores.softmax(0), split, strict=True)
            )
        )
    x = x + head.out.weight @ torch.cat(found)
    gates, values = (head.gate_up.weight @ rms(x, head.norm)).chunk(2)
    return x + head.down.weight @ (torch.nn.functional.silu(gates) * values)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.9, 1.0, 2.0])
def test_a_guess_is_the_softmax_of_the_targets_head(temperature: float) -> None:
    """Behind a text, and behind a token more."""
    head, (embedding, lm_head) = random_head(), ends(torch.float32)
    own, text = features(3, 4), [5, 8, 17, 4]
    joined = [
        head.join.weight
        @ torch.cat(
            (
                *(
                    rms(row.view(3, -1)[k], w)
                    for k, w in zip((2, 0), head.feature_norms, strict=True)
                ),
                rms(embedding[token], head.embedding_norm),
            )
        )
        for row, token in zip(own, text, strict=True)
    ]
    state = says(head, joined[-1], joined[:-1], 3)
    on = head.join_on.weight @ torch.cat(
        (rms(state, head.state_norm), rms(embedding[9], head.next_norm))
    )
    reader = HeadReader(layers_of(head))
    end = reader.read(own, text)
    found_states = end, reader.read_on(end, 9)
    divisor = min(1.0, max(LEAST_TEMPERATURE, temperature))
    for found_state, right in zip(found_states, (state, says(head, on, joined, 4)), strict=True):
        logits = lm_head[head.token_ids] @ rms(right, head.last_norm) + head.bias
        expected = SHAPE.covered * torch.softmax(logits / divisor, -1)
        found = reader.guess(found_state, temperature)
        assert found is not None
        # The layers at work are in int8.
        difference = np.log(found) - expected.detach().log().numpy()
        assert np.abs(difference).max() < 0.4
        assert np.abs(difference).mean() < 0.1


def test_a_head_that_is_sure_is_heard_as_far_as_it_was_trained_for() -> None:
    head = random_head()
    with torch.no_grad():
        head.bias[11] += 60.0
    search = ngram_search(NGramTable([]), layers_of(head))
    found = paths(search, 0, [1, 2, 3], None, 8, 9, features(0))
    assert found.tokens == (22,) * DEPTH
    # Beside a head that covers it all an empty table has nothing, and its share stays open.
    share = WEIGHT * SHAPE.covered
    assert found.probabilities == pytest.approx(
        [share**depth for depth in range(1, DEPTH + 1)], rel=1e-3
    )
    assert not paths(search, 1, [1, 2, 3], None, 8, 4).tokens


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    ("guess_depth", "limits", "lengths"),
    [
        (DEPTH, {}, [1, 1, 2, 2, 2, 2]),
        (DEPTH, {"NUM_GUESSED_ON": 1}, [1, 1, 2, 2]),
        (DEPTH, {"LEAST_GUESSED_ON": 0.5}, [1, 1]),
        (1, {}, [1, 1]),
    ],
)
def test_a_head_goes_on_behind_likely_paths_only(
    guess_depth: int,
    limits: dict[str, float],
    lengths: list[int],
    is_native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a table that knows nothing, what is found further on is the head's."""
    head = random_head()
    with torch.no_grad():
        head.last_norm.zero_()
        head.bias[[11, 40]] += 30.0  # half each: paths have 0.36, 0.13 and 0.05
    for name, value in limits.items():
        monkeypatch.setattr(search_module, name, value)
    layers, table = layers_of(head), NGramTable([])
    search = native_ngrams(rules_for(table), layers) if is_native else PlainSearch(table, layers)
    if search is None:
        pytest.skip("no kernels on this machine")
    query = query_of([1, 2, 3], 0, max_depth=9, guess_depth=guess_depth)
    found = _paths(*search.paths([query]))
    assert sorted(map(len, found)) == lengths
    assert set(sum(found, ())) == {22, 80}


def test_kept_in_a_file(tmp_path: Path) -> None:
    head = random_head()
    head.save(tmp_path)
    found = HydraHead.load(tmp_path, SIZE, VOCAB_SIZE)
    assert found is not None
    assert found.shape == head.shape
    assert torch.equal(found.token_ids, head.token_ids)
    for name, value in head.state_dict().items():
        own = found.state_dict()[name]
        if name.endswith(".weight"):
            assert own.allclose(value, atol=0.51 * float(value.abs().max()) / MOST_LEVEL)
        else:
            assert torch.equal(own, value.bfloat16().float())
    found.save(tmp_path)  # nothing more is lost
    again = HydraHead.load(tmp_path, SIZE, VOCAB_SIZE)
    assert again is not None
    for name, value in found.state_dict().items():
        assert torch.allclose(again.state_dict()[name], value, rtol=1e-6)
    assert HydraHead.load(tmp_path / "nowhere", SIZE, VOCAB_SIZE) is None


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    random_head().save(tmp_path)
    path = tmp_path / HEAD_NAME
    with pytest.raises(ModelError, match="not a Hydra head for a target with hidden size 64"):
        HydraHead.load(tmp_path, 64, VOCAB_SIZE)
    with pytest.raises(ModelError, match="not ascending ids below 298"):
        HydraHead.load(tmp_path, SIZE, 298)
    broken = random_head()
    broken.bias.data[3] = torch.nan
    broken.save(tmp_path)
    with pytest.raises(ModelError, match="some weights are not finite"):
        HydraHead.load(tmp_path, SIZE, VOCAB_SIZE)
    for wrong in (
        {"window": 0}, {"num_keys": 0}, {"num_keys": 3}, {"head_dim": 15}, {"window": 24.0},
        {"window": 10**18}, {"covered": np.nan}, {"target_layer_ids": ()},
    ):  # fmt: skip
        random_head().save(tmp_path)
        with safe_open(path, "pt") as file:
            told = json.loads(file.metadata()["shape"])
        save_file(load_file(path), path, {"shape": json.dumps(told | wrong)})
        with pytest.raises(ModelError, match="not a Hydra head"):
            HydraHead.load(tmp_path, SIZE, VOCAB_SIZE)
    save_file(load_file(path), path)  # without its shape
    with pytest.raises(ModelError, match="delete it to draft without"):
        HydraHead.load(tmp_path, SIZE, VOCAB_SIZE)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="not a Hydra head"):
        HydraHead.load(tmp_path, SIZE, VOCAB_SIZE)


def test_noise_decides_between_guesses() -> None:
    """At temperature 1 the token wins whose share and noise are largest together."""
    layers, own, text = layers_of(random_head()), features(1), [1, 2, 3]
    search = ngram_search(NGramTable([]), layers)
    firsts = {
        paths(search, seed, text, TokenNoise(seed, 0, 3, 1.0), 1, 1, own).tokens
        for seed in range(30)
    }
    assert len(firsts) > 3


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("is_native", [True, False])
def test_features_that_are_no_numbers_guess_nothing_and_harm_no_later_guess(
    broken: float, is_native: bool
) -> None:
    table, layers, own = small_table(), layers_of(random_head()), features(0, 4)
    own[1, 2 * SIZE + 5] = own[3, 7] = broken
    text = text_of(random.Random(1), 30, 6)
    search, other = (
        ngram_search(table, layers) if is_native else PlainSearch(table, layers) for _ in range(2)
    )
    found = paths(search, 0, text, None, 8, 1, own)
    assert found == paths(search, 1, text, None, 8, 1)
    assert found.tokens
    # As if those places had never been read.
    for place in (0, 2):
        paths(other, 0, text[: len(text) - 3 + place], None, 8, 1, own[place : place + 1])
    longer = [*text, 3, 4]
    assert is_close(
        paths(search, 0, longer, None, 40, 4, features(1, 1)),
        paths(other, 0, longer, None, 40, 4, features(1, 1)),
    )


@needs_kernels
def test_heads_of_different_sizes_may_work_side_by_side() -> None:
    """What a thread keeps for one is too small for the next."""
    texts, draw = [], random.Random(4)
    for num_tokens, inner in ((4, 16), (150, 80), (20, 32)):
        shape = HeadShape(SIZE, inner, LAYERS, 0.9, **ATTENTION)
        head = HydraHead(shape, torch.arange(0, 2 * num_tokens, 2))
        with torch.no_grad():
            head.last_norm.zero_()
            head.bias[3] += 40.0
        search = native(NGramTable([]), layers_of(head))
        text = text_of(draw, 9, 6)
        texts.append(paths(search, 0, text, None, DEPTH, 5, features(1, len(text))).tokens)
    assert texts == [(6,) * DEPTH] * 3


@pytest.mark.parametrize("window", [1, 5, 40])
def test_what_is_read_at_work_is_what_is_trained(window: int) -> None:
    shape = HeadShape(SIZE, INNER, LAYERS, 0.9, **(ATTENTION | {"window": window}))
    torch.manual_seed(3)
    head = HydraHead(shape, torch.arange(0, VOCAB_SIZE, 2))
    embedding, lm_head = ends(torch.float32)
    layers = replace(
        head.layers(embedding, lm_head, FEATURE_LAYERS),
        **{
            name: getattr(head, name)
            for name in ("join", "join_on", "heads", "out", "gate_up", "down")
        },
        score=torch.nn.Identity(),
    )
    text, own = text_of(random.Random(9), 30, 6), features(5, 29)
    read = own.view(29, 3, SIZE)[:, [2, 0]].reshape(1, 29, -1)
    with torch.no_grad():
        trained = head(read, embedding[text[1:]][None], DEPTH)
    reader, at = HeadReader(layers), 0
    for num in (7, 1, 3, 9, 1):
        at += num
        state = reader.read(own[at - num : at], text[: at + 1])
        for depth in range(DEPTH):
            found = logits_of(layers, state.hidden[None])[0]
            assert found.allclose(trained[depth][0, at - 1 + depth], atol=1e-4)
            state = reader.read_on(state, text[at + 1 + depth])

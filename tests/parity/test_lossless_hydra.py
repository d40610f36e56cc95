"""Whatever a Hydra head guesses, output has the bits of plain decoding.

And it reads the right features.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.engine import load as load_module
from blockdraft.engine.engine import Engine
from blockdraft.kernels.cpu.ngrams import NativeNGrams
from blockdraft.kernels.ngram_interface import NGramPaths, NGramQuery
from blockdraft.models.draft.hydra_head import HeadShape, HydraHead
from blockdraft.speculate.drafters.guesses import DEPTH
from blockdraft.speculate.drafters.ngram import (
    FEW_ROWS,
    GUESSED_ROWS,
    MOST_WAITING,
    NGramDrafter,
)
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.train.hydra.learning import WEIGHTS
from tests.batched import Request, run_alone, run_batched
from tests.parity.checks import generate, generate_plain
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.tiny import (
    HIDDEN_SIZE,
    LAYER_IDS,
    VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

OWN_LAYERS = LAYER_IDS[:2]
WINDOW = 5
PROMPT = (5, 3, 8, 8, 1, 4)
PARAMS = {
    "greedy": SamplingParams(max_tokens=30, logprobs=1),
    "sampled": SamplingParams(max_tokens=30, logprobs=1, temperature=1.0, seed=3),
    "penalties": SamplingParams(
        max_tokens=30, logprobs=1, temperature=0.7, seed=5, presence_penalty=-1.0, top_p=0.9
    ),
}


def random_head(layer_ids: Sequence[int] = OWN_LAYERS, sure: float = 0.1) -> HydraHead:
    """By default not sure enough of anything to drown what a table says."""
    torch.manual_seed(2)
    shape = HeadShape(HIDDEN_SIZE, 40, tuple(layer_ids), covered=0.9, window=WINDOW)
    head = HydraHead(shape, torch.arange(1, VOCAB_SIZE, 2))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        head.last_norm.mul_(sure)
    return head


def ngram_drafter(model: Any, texts: Sequence[Sequence[int]], sure: float = 0.1) -> NGramDrafter:
    """With a head, and a table of what will be said."""
    head = random_head(sure=sure)
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    table = NGramTable.count((text, 1) for text in texts for _ in range(2))
    return NGramDrafter(table, VOCAB_SIZE, head.layers(*ends, LAYER_IDS))


def check_features(engine: Engine, drafter: NGramDrafter) -> int:
    """What waits of each sequence is what the target says of its last cached tokens."""
    num_checked, model = 0, tiny_target()
    for key, waiting in drafter._waiting.items():
        sequence = engine.progress[key].sequence
        ids = torch.tensor([sequence.token_ids[: sequence.num_cached]])
        with torch.inference_mode():
            states = model(ids, output_hidden_states=True).hidden_states
        joined = drafter._joined(waiting)
        expected = torch.stack([states[layer + 1][0] for layer in OWN_LAYERS], 1)[-len(joined) :]
        found = joined.view(len(joined), len(LAYER_IDS), -1)[:, : len(OWN_LAYERS)]
        assert found.allclose(expected, atol=1e-4), "features of another token"
        num_checked += len(joined)
    return num_checked


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PARAMS)
def test_output_is_that_of_plain_decoding(way: Way, name: str) -> None:
    model = tiny_target()
    target = make_target(way, model)
    plain = generate_plain(target, PROMPT, PARAMS[name])
    free = ngram_drafter(model, [[*PROMPT, *plain.token_ids]])
    checks: list[int] = []
    found = generate(
        target,
        make_dflash(target, tiny_drafter()),
        PROMPT,
        PARAMS[name],
        engine_options={"free_drafters": [free]},
        after_step=lambda engine, _: checks.append(check_features(engine, free)),
    )
    assert found == plain
    assert found.acceptance.acceptance_length > 1.3
    assert sum(checks) > 3
    assert not free._waiting  # forgotten with its sequence


def test_a_batch_is_as_everyone_alone_and_a_request_without_drafts_keeps_no_features() -> None:
    model = tiny_target()
    requests = [
        Request((*PROMPT, index), params, arrival=2 * index)
        for index, params in enumerate(
            (*PARAMS.values(), SamplingParams(max_tokens=12, num_draft_tokens=0))
        )
    ]
    alone = run_alone(make_target("paged", tiny_target()), requests)
    texts = [
        [*request.prompt, *answer.token_ids]
        for request, answer in zip(requests, alone, strict=True)
    ]
    free = ngram_drafter(model, texts)
    target, seen = make_target("paged", model), set[int]()
    batched = run_batched(
        target,
        make_dflash(target, tiny_drafter()),
        requests,
        free_drafters=[free],
        after_step=lambda engine: seen.update(free._waiting),
    )
    assert batched.answers == alone
    assert seen == set(batched.keys[:-1])


def features_of_the_token_before() -> AbstractContextManager[object]:
    committed = NGramDrafter.committed

    def faulty(self: NGramDrafter, row: Any, token_ids: Any, features: Any) -> None:
        committed(self, row, token_ids, None if features is None else features.roll(1, dims=0))

    return patch.object(NGramDrafter, "committed", faulty)


def test_features_of_another_token_are_noticed_and_change_no_output() -> None:
    model = tiny_target()
    target = make_target("sequential", model)
    plain = generate_plain(target, PROMPT, PARAMS["greedy"])
    free = ngram_drafter(model, [[*PROMPT, *plain.token_ids]])
    drafter = make_dflash(target, tiny_drafter())
    options: dict[str, Any] = {"engine_options": {"free_drafters": [free]}}
    with features_of_the_token_before():
        assert generate(target, drafter, PROMPT, PARAMS["greedy"], **options) == plain
        options["after_step"] = lambda engine, _: check_features(engine, free)
        with pytest.raises(AssertionError, match="features of another token"):
            generate(target, drafter, PROMPT, PARAMS["greedy"], **options)


def test_a_head_of_layers_that_the_drafter_does_not_read_is_refused(tmp_path: Any) -> None:
    model = tiny_target()
    target = make_target("paged", model)
    random_head((*OWN_LAYERS, 1)).save(tmp_path)
    with pytest.raises(ModelError, match=r"reads the outputs of layers \[1\]"):
        load_module._hydra_layers(tmp_path, target, LAYER_IDS)
    random_head((LAYER_IDS[2], LAYER_IDS[0])).save(tmp_path)
    layers = load_module._hydra_layers(tmp_path, target, LAYER_IDS)
    assert layers is not None
    assert (layers.feature_layers, layers.read_places.tolist()) == (LAYER_IDS, [2, 0])


def row_of(key: int) -> Row:
    return Row(Sample(key, PARAMS["greedy"], 0, 0, frozenset(), [1, 2, 3], 2), [3], 4)


def test_who_was_asked_is_searched_for_ahead() -> None:
    """As soon as the tokens of all that were asked are committed."""
    free = ngram_drafter(tiny_target(), [])

    def searched_ahead(
        asked: Sequence[int], committed: Sequence[int], ended: Sequence[int] = ()
    ) -> list[list[int]]:
        """Sequences whose searches begin, after some were asked and features came of others."""
        found: list[list[int]] = []
        free.propose([row_of(key) for key in asked])
        begin = patch.object(
            free._search, "search_ahead", lambda own: found.append([query.key for query in own])
        )
        with begin:
            for key in committed:
                row = row_of(key)
                if key in ended:
                    row.sequence.finish_reason = "stop"
                free.committed(row, [3], torch.zeros(1, len(LAYER_IDS) * HIDDEN_SIZE))
        return found

    assert searched_ahead([1], [1, 1]) == [[1]]  # once: who is not asked may not be asked next
    assert searched_ahead([1], [2]) == []
    assert searched_ahead([1, 2, 3], [3, 1]) == []
    assert searched_ahead([1, 2, 3], [3, 4, 1, 2]) == [[3, 1, 2]]
    assert searched_ahead([1, 2, 3], [3, 1, 2], ended=[2, 3]) == [[1]]
    batched = range(GUESSED_ROWS + 1)
    assert searched_ahead(batched, batched) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_features_of_any_precision_are_read(dtype: torch.dtype) -> None:
    free, row = ngram_drafter(tiny_target(), [], sure=1.0), row_of(1)
    if isinstance(free._search, NativeNGrams) and free._search._layers is None:
        pytest.skip("kernels here do not run Hydra heads")
    free.committed(row, [3], torch.randn(1, len(LAYER_IDS) * HIDDEN_SIZE).to(dtype))
    query = free._query(row, 4, DEPTH)
    assert query.features is not None
    assert free._search.paths([query])[0].tokens


def test_features_wait_until_they_are_searched_with() -> None:
    """Chunks of a prompt, and steps of a batch; the oldest are given up."""
    free, row = ngram_drafter(tiny_target(), []), row_of(1)
    parts = torch.randn(20, 1, len(LAYER_IDS) * HIDDEN_SIZE)
    row.sequence.token_ids += [1] * 40
    for part in parts[:2]:
        free.committed(row, [3], part)
    query = free._query(row, 4, DEPTH)
    assert query.features is not None
    assert torch.equal(query.features, parts[:2].flatten(0, 1))
    free.propose([row])
    assert free._query(row, 4, DEPTH).features is None
    for part in parts:
        free.committed(row, [3], part)
    assert len(free._waiting[1]) == MOST_WAITING
    query = free._query(row, 4, DEPTH)
    assert query.features is not None
    assert torch.equal(query.features, parts[-WINDOW:].flatten(0, 1))


def test_a_batch_keeps_no_features_and_what_is_left_of_it_does() -> None:
    free = ngram_drafter(tiny_target(), [])
    rows = [row_of(key) for key in range(GUESSED_ROWS + 1)]
    for row in rows:
        free.open(row, 0)
    features = torch.randn(1, len(LAYER_IDS) * HIDDEN_SIZE)
    free.committed(rows[0], [3], features)
    assert not free._waiting
    free.close(rows[-1].sequence.key)
    free.committed(rows[0], [3], features)
    assert list(free._waiting) == [rows[0].sequence.key]


def test_the_released_head_is_trained_for_as_many_tokens_as_are_guessed() -> None:
    assert len(WEIGHTS) == DEPTH


def test_the_more_rows_the_less_the_head_is_asked() -> None:
    model = tiny_target()
    free = ngram_drafter(model, [])
    asked: list[int] = []
    paths = free._search.paths

    def noted(queries: Sequence[NGramQuery]) -> list[NGramPaths]:
        asked.extend(0 if query.features is None else query.guess_depth for query in queries)
        return paths(queries)

    depths = {FEW_ROWS: DEPTH, FEW_ROWS + 1: 1, GUESSED_ROWS: 1, GUESSED_ROWS + 1: 0}
    for num, depth in depths.items():
        rows = [
            Row(Sample(key, PARAMS["greedy"], 0, 0, frozenset(), [1, 2, 3], 3), [3], 4)
            for key in range(num)
        ]
        for row in rows:
            free.committed(row, [1, 2], torch.zeros(2, len(LAYER_IDS) * HIDDEN_SIZE))
        with patch.object(free._search, "paths", noted):
            free.propose(rows)
        assert asked == [depth] * num
        asked.clear()


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_an_engine_loads_the_head_beside_its_drafter(tmp_path: Path, quantize: Any) -> None:
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    head = HydraHead(HeadShape(HIDDEN_SIZE, 32, OWN_LAYERS, covered=0.9), torch.arange(40))
    head.save(folders[1])
    llm = load_llm(folders, quantize=quantize)
    (free,) = (own for own in llm.engine.proposer.free if isinstance(own, NGramDrafter))
    assert free.feature_layers == LAYER_IDS
    asked: list[int] = []
    paths = free._search.paths

    def noted(queries: Sequence[NGramQuery]) -> list[NGramPaths]:
        asked.extend(0 if query.features is None else query.guess_depth for query in queries)
        return paths(queries)

    for temperature in (0.0, 1.0):
        own = params(temperature=temperature, seed=1)
        alone = llm.generate("abc the", replace(own, num_draft_tokens=0))
        plain = alone.completions[0].token_ids
        with patch.object(free._search, "paths", noted):
            assert llm.generate("abc the", own).completions[0].token_ids == plain
    assert asked
    assert all(asked)
    assert_nothing_left(llm)


def test_requests_that_it_may_not_draft_for_are_no_large_batch() -> None:
    free, features = ngram_drafter(tiny_target(), []), torch.ones(1, len(LAYER_IDS) * HIDDEN_SIZE)

    def opened(key: int, **asked: Any) -> Row:
        sample = Sample(key, SamplingParams(**asked), 0, 0, frozenset(), [1, 2], 1, num_cached=1)
        row = Row(sample, [2], 8)
        free.open(row, 0)
        return row

    row = opened(0)
    for key in range(GUESSED_ROWS):
        opened(1 + key, num_draft_tokens=0)
        opened(1 + key + GUESSED_ROWS, drafters=("lookup",))
    free.committed(row, [2], features)
    assert 0 in free._waiting
    for key in range(GUESSED_ROWS):
        opened(100 + key)
    free.committed(row, [2], features)
    assert 0 not in free._waiting

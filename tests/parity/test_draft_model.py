"""A language model as a drafter. The target itself agrees with its target, whatever is asked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.engine.engine import Engine
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.draft_model import DraftModelDrafter
from blockdraft.speculate.drafters.levels import DEPTH
from tests.batched import Request, run_alone, run_batched
from tests.parity.checks import check_drafted_equals_plain, generate_plain, run
from tests.parity.proposals import in_trees
from tests.parity.targets import WAYS, Way, make_target
from tests.small_llm import check_grammar, load_llm
from tests.tiny import VOCAB_SIZE, edit_json, tiny_target, tiny_target_folder, tiny_tokenizer

PROMPT = tuple((5 * i * i + 2) % VOCAB_SIZE for i in range(PAGE_SIZE - 6))
PARAMS = {
    "greedy": SamplingParams(max_tokens=25),
    "sampled": SamplingParams(max_tokens=25, temperature=1.0, seed=11),
    "filters": SamplingParams(max_tokens=25, temperature=0.8, seed=2, top_p=0.9, top_k=20),
    "penalties": SamplingParams(
        max_tokens=25, temperature=0.8, seed=5, repetition_penalty=1.2, presence_penalty=0.3
    ),
}


def make_drafter(
    way: Way,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    num_pages: int = 65,
    **changes: object,
) -> DraftModelDrafter:
    """Of a model of the target's kind, with seed 0 and without changes the target itself."""
    model = tiny_target(seed=seed, vocab_size=vocab_size, **changes)
    own: SequentialTarget | PagedTarget
    if way == "sequential":
        own = SequentialTarget(model, exact=False)
    else:
        own = PagedTarget(model, Pages(num_pages), exact=False)
    return DraftModelDrafter(own, VOCAB_SIZE)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_that_is_the_target_is_always_right(way: Way, name: str) -> None:
    """Its noise is the target's too, so each pass gives a whole chain and the bonus."""
    with make_target(way, tiny_target(), layer_ids=()).released_after() as target:
        drafter = make_drafter(way)
        found = check_drafted_equals_plain(target, drafter, PROMPT, PARAMS[name]).acceptance
        assert found.num_accepted == found.num_drafted == 24 - found.num_passes
        assert found.num_passes == 24 / (DEPTH + 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
def test_trees_of_any_model_change_nothing(way: Way, name: str) -> None:
    with make_target(way, tiny_target(), layer_ids=()).released_after() as target:
        for seed, least in ((0, 12), (1, 0)):
            drafter = make_drafter(way, seed=seed)
            found = check_drafted_equals_plain(
                target,
                drafter,
                PROMPT,
                PARAMS[name],
                after_step=in_trees(60),
            ).acceptance
            assert any(rank for _, rank in found.drafted_at)
            assert found.num_accepted >= least
            assert not drafter._samples


def test_several_requests_at_once() -> None:
    """With few pages, so that requests are sent away, and the drafter loses what it had."""
    names = list(PARAMS)
    requests = [
        Request(
            PROMPT if index % 2 else PROMPT[index:],
            replace(PARAMS[names[index % 4]], max_tokens=10 + index, seed=index),
            arrival=index // 3,
        )
        for index in range(6)
    ]
    model = tiny_target()
    with make_target("paged", model, num_pages=5, layer_ids=()).released_after() as target:
        expected = run_alone(target, requests)
        drafter = make_drafter("paged")
        batched = run_batched(target, drafter, requests, prefill_chunk=48)
        assert batched.answers == expected
        assert batched.engine.proposer.failures.num_failures == 0
        assert batched.engine.scheduler.num_preempted
        drafter.model.memory.check_integrity()  # type: ignore[attr-defined]
        assert sum(answer.acceptance.num_accepted for answer in batched.answers) > 40


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_as_deep_as_pays(way: Way) -> None:
    """Costs are measured by depth, and whatever is chosen changes nothing."""
    with make_target(way, tiny_target(), layer_ids=()).released_after() as target:
        engine = Engine(target, make_drafter(way))
        engine.use_adaptive_drafting()
        assert engine._costs is not None
        assert engine._costs.draft_forwards(2, 5) == (2, 5)
        params = replace(PARAMS["sampled"], max_tokens=60)
        expected = generate_plain(target, PROMPT, params).token_ids
        key = engine.add(PROMPT, params)
        run(engine)
        assert engine.take(key).sequence.output_ids == expected
        assert engine.proposer.failures.num_failures == 0


def test_what_it_has_computed_serves_the_next_request() -> None:
    """Its own prefix chain, whatever comes behind; and no room is no proposal."""
    prompt = PROMPT * 3
    with make_target("paged", tiny_target(), layer_ids=()).released_after() as target:
        drafter = make_drafter("paged")
        engine = Engine(target, drafter)
        for ending in ((1,), (2, 3), (1, 4)):
            key = engine.add([*prompt, *ending], replace(PARAMS["greedy"], max_tokens=9))
            run(engine)
            found = engine.take(key).acceptance
            assert found.num_accepted == found.num_drafted == 7
        memory = drafter.model.memory
        assert isinstance(memory, Pages)
        assert memory.num_reused_tokens == 2 * (len(prompt) // PAGE_SIZE) * PAGE_SIZE
        held = memory.open(-1, [0], with_context=False)
        assert memory.reserve(-1, memory.num_tokens)
        assert held == 0
        key = engine.add(prompt, PARAMS["greedy"])
        run(engine)
        assert engine.take(key).acceptance.num_drafted == 0
        assert engine.proposer.failures.num_failures == 0


def test_what_it_need_not_compute_is_no_lag() -> None:
    """Or the allocator would take drafts in a long conversation for dear."""
    prompt = PROMPT * 3
    with make_target("paged", tiny_target(), layer_ids=()).released_after() as target:
        drafter = make_drafter("paged")
        engine = Engine(target, drafter)
        num_kept = len(prompt) // PAGE_SIZE * PAGE_SIZE
        for known in (0, num_kept):
            key = engine.add(prompt, replace(PARAMS["greedy"], max_tokens=9))
            engine.step()
            (row,) = engine.candidates.apply(engine.scheduler.schedule())
            assert drafter.lag(row) == len(prompt) - known
            assert isinstance(drafter.model.memory, Pages)
            assert drafter.model.memory.num_available == drafter.model.memory.num_pages - 1
            run(engine)
            engine.take(key)
        engine.add(prompt, replace(PARAMS["greedy"], num_draft_tokens=0))
        run(engine)
        assert not drafter._reusable
        assert not drafter.model.memory._put_back


def test_with_little_memory_for_the_drafter_everyone_has_a_chain() -> None:
    """Trees would need a page more for each of the sequences."""
    with make_target("paged", tiny_target(), layer_ids=()).released_after() as target:
        drafter = make_drafter("paged", num_pages=5)  # and one for scratch: a page for each
        engine = Engine(target, drafter)
        engine.use_fixed_drafting(15)
        keys = [engine.add([key, *PROMPT[:40]], PARAMS["greedy"]) for key in range(4)]
        run(engine)
        assert engine.proposer.failures.num_failures == 0
        found = [engine.take(key).acceptance for key in keys]
        # Of 24 tokens beside the first, a whole path in each pass.
        assert [one.num_passes for one in found] == [3] * 4


def test_at_the_end_of_its_context_it_drafts_what_fits() -> None:
    with make_target("paged", tiny_target(), layer_ids=()).released_after() as target:
        drafter = make_drafter("paged", max_position_embeddings=64)
        engine = Engine(target, drafter)
        assert drafter.model.max_context == 64
        key = engine.add(PROMPT[:55], PARAMS["greedy"])  # the bonus of the second pass is the 64th
        run(engine)
        found = engine.take(key).acceptance
        assert found.num_accepted == found.num_drafted == 7
        sample = engine.sequence([1] * 64, PARAMS["greedy"], 0)
        assert drafter.lag(Row(sample, [1], 15)) is None


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 30, VOCAB_SIZE + 30])
def test_vocabularies_of_different_padding(vocab_size: int) -> None:
    with make_target("paged", tiny_target(), layer_ids=()).released_after() as target:
        drafter = make_drafter("paged", vocab_size=vocab_size)
        for name in ("greedy", "sampled"):
            found = check_drafted_equals_plain(target, drafter, PROMPT, PARAMS[name])
            assert found.acceptance.num_drafted > 50


def test_a_folder_of_a_language_model_is_a_drafter(tmp_path: Path) -> None:
    """Grammars and penalties are followed; the same model is right wherever it may draft."""
    target, folder = tiny_target_folder(tmp_path / "a"), tiny_target_folder(tmp_path / "b")
    llm = load_llm((target, folder))
    assert llm.engine.drafter.kind == "draft_model"
    for num in (None, 12):
        llm.use_fixed_drafting(num)
        assert check_grammar(llm).num_accepted > 8


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, folder = tiny_target_folder(tmp_path / "a"), tiny_target_folder(tmp_path / "b")
    tokenizer = tiny_tokenizer()
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    assert text.count('"abc": ') == 1
    other, abc = tokenizer.convert_tokens_to_ids(["the", "abc"])
    swapped = text.replace(f'"abc": {abc}', f'"abc": {other}').replace(
        f'"the": {other}', f'"the": {abc}'
    )
    assert swapped != text
    (folder / "tokenizer.json").write_text(swapped, encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"token \d+ is '(the|abc)' in its tokenizer and '(the|abc)'"
    ):
        load_llm((target, folder))


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    target, folder = tiny_target_folder(tmp_path), tmp_path / "mamba"
    sizes = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(folder)
    with pytest.raises(ModelError, match="recurrent layers"):
        load_llm((target, folder))
    edit_json(folder / "config.json", architectures=["SomeDraftModel"])
    with pytest.raises(ModelError, match="SomeDraftModel"):
        load_llm((target, folder))

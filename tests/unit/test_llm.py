import itertools
import re
from dataclasses import replace

import pytest
import torch

from blockdraft import LLM, ContextTooLong, DraftModel, ModelError, RequestError, SamplingParams
from tests.tiny import (
    CONTEXT,
    LAYER_IDS,
    TEXT_VOCAB_SIZE,
    edit_json,
    tiny_draft_config,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

MESSAGES = [{"role": "user", "content": "the abc"}]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return tiny_target_folder(root), tiny_drafter_folder(root)


@pytest.fixture(scope="module")
def llm(folders):
    target, drafter = folders
    return LLM(str(target), str(drafter), dtype="float32")


def params(**changes):
    return replace(SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True), **changes)


def assert_nothing_left(llm):
    assert not llm.engine.has_work
    assert llm.engine.progress == {}
    assert llm._samples == {}
    assert llm.engine.target._caches == {}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_equals_plain(llm, temperature):
    wanted = params(temperature=temperature, seed=5)
    drafted = llm.chat(MESSAGES, wanted).completions[0]
    plain = llm.chat(MESSAGES, replace(wanted, speculative=False)).completions[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert len(set(drafted.token_ids)) >= 8
    assert drafted.acceptance.drafted
    assert not plain.acceptance.drafted
    assert_nothing_left(llm)


def test_results_are_complete(llm):
    generation = llm.generate("abc the", params(logprobs=2, temperature=1.0, seed=3))
    (completion,) = generation.completions
    assert list(generation.prompt_token_ids) == llm.tokenizer.encode("abc the")
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.index, completion.seed, completion.finish_reason) == (0, 3, "length")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == MAX_TOKENS
    assert all(len(entry.top) == 2 for entry in completion.logprobs)
    timings = completion.timings
    assert timings.total == pytest.approx(timings.first_token + timings.decode)
    assert timings.tokens_per_second == pytest.approx((MAX_TOKENS - 1) / timings.decode)


def test_samples_share_the_seed_and_differ_in_their_index(llm):
    wanted = params(n=3, temperature=1.0)
    completions = llm.chat(MESSAGES, wanted).completions
    assert [completion.index for completion in completions] == [0, 1, 2]
    assert len({completion.seed for completion in completions}) == 1
    assert len({completion.token_ids for completion in completions}) == 3
    again = llm.chat(MESSAGES, replace(wanted, seed=completions[0].seed)).completions
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]


def test_prompts_together_equal_prompts_alone(llm):
    prompts = ["abc", "the quick brown fox", "!!"]
    together = llm.generate(prompts, params())
    alone = [llm.generate(prompt, params()) for prompt in prompts]
    assert [g.completions[0].token_ids for g in together] == [
        g.completions[0].token_ids for g in alone
    ]
    by_ids = llm.generate([llm.tokenizer.encode(prompt) for prompt in prompts], params())
    assert [g.completions[0].text for g in by_ids] == [g.completions[0].text for g in together]


def test_chunks_join_to_the_completions(llm):
    wanted = params(n=2, temperature=1.0, seed=1)
    chunks = list(llm.generate(["abc", "the"], wanted, stream=True))
    expected = llm.generate(["abc", "the"], wanted)
    for prompt_index, generation in enumerate(expected):
        for completion in generation.completions:
            own = [
                c for c in chunks if (c.prompt_index, c.index) == (prompt_index, completion.index)
            ]
            assert "".join(chunk.text for chunk in own) == completion.text
            assert sum((chunk.token_ids for chunk in own), ()) == completion.token_ids
            assert [c.completion is None for c in own] == [True] * (len(own) - 1) + [False]
            assert own[-1].completion.token_ids == completion.token_ids


def test_two_open_streams_do_not_disturb_each_other(llm):
    wanted = params(logprobs=0)
    first = llm.generate("abc", wanted, stream=True)
    second = llm.generate("the fox", replace(wanted, speculative=False), stream=True)
    pieces = {"first": [], "second": []}
    for one, other in zip(first, second, strict=False):
        pieces["first"].append(one)
        pieces["second"].append(other)
    pieces["first"] += first
    pieces["second"] += second
    ids = sum((chunk.token_ids for chunk in pieces["second"]), ())
    assert ids == llm.generate("the fox", wanted).completions[0].token_ids
    assert len(pieces["second"][-1].completion.logprobs) == MAX_TOKENS
    assert_nothing_left(llm)


def test_a_stream_closed_early_leaves_nothing_behind(llm):
    stream = llm.generate(["abc", "the"], params(n=2), stream=True)
    next(stream)
    stream.close()
    assert_nothing_left(llm)


def test_a_failing_step_leaves_nothing_behind(llm, monkeypatch):
    def fail(batch):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "draft", fail)
        with pytest.raises(RuntimeError, match="boom"):
            llm.generate(["abc", "the"], params())
    assert_nothing_left(llm)


def fail_once(llm, after, error):
    """A hook on the third layer of the target: `after` calls pass, the next one raises."""
    calls = itertools.count()

    def fail(module, args):
        if next(calls) == after:
            raise error

    return llm.engine.target.layers[2].register_forward_pre_hook(fail)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize("after", range(6))
def test_a_failure_inside_the_target_leaves_other_streams_intact(llm, after, error):
    """In the prompt or later; in the first row of a step, or after it has run."""
    expected = [llm.generate(p, params()).completions[0].token_ids for p in ("abc", "the fox")]
    hook = fail_once(llm, after, error)
    streams = [llm.generate(p, params(), stream=True) for p in ("abc", "the fox")]
    found = [(), ()]
    failed = None
    while streams[0] is not None or streams[1] is not None:
        for i, stream in enumerate(streams):
            try:
                if stream is not None:
                    found[i] += next(stream).token_ids
            except StopIteration:
                streams[i] = None
            except (RuntimeError, KeyboardInterrupt):
                failed, streams[i] = i, None
    hook.remove()
    assert failed is not None
    assert found[1 - failed] == expected[1 - failed]
    assert_nothing_left(llm)


def test_a_request_that_is_refused_half_way_leaves_nothing_behind(llm, monkeypatch):
    real, calls = llm.engine.add, itertools.count()

    def fail_on_the_third(*args, **options):
        if next(calls) == 2:
            raise MemoryError
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", fail_on_the_third)
        with pytest.raises(MemoryError):
            llm.generate("abc", params(n=3))
    assert_nothing_left(llm)


def test_text_ends_before_a_stop_string_and_tokens_with_it(llm):
    whole = llm.generate("abc the", params()).completions[0]
    stop = re.findall(r"[!-~]{2}", whole.text)[-1]
    for speculative in (True, False):
        cut = llm.generate("abc the", params(stop=(stop,), speculative=speculative)).completions[0]
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert stop in llm.tokenizer.decode(cut.token_ids)
        assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])


def test_a_stop_token_is_kept_in_the_tokens_and_not_in_the_text(llm):
    whole = llm.generate("abc the", params()).completions[0]
    token_id = whole.token_ids[5]
    cut = llm.generate("abc the", params(stop_token_ids=(token_id,))).completions[0]
    end = whole.token_ids.index(token_id)
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.text == llm.tokenizer.decode(cut.token_ids[:end])


BAD_PROMPTS = ["", [], [-1], [TEXT_VOCAB_SIZE], [[]], [""], ["abc", ""], [None], None, 5, [1.5]]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_bad_prompts_are_refused_at_once(llm, prompt):
    with pytest.raises(RequestError):
        llm.generate(prompt, stream=True)


def test_a_long_prompt_is_refused_with_both_numbers(llm):
    with pytest.raises(ContextTooLong, match=rf"600 tokens.*{CONTEXT} tokens"):
        llm.generate([5] * 600)


def test_a_pair_that_does_not_fit_is_refused_at_load(folders, tmp_path):
    with pytest.raises(ModelError, match="hidden size"):
        LLM(str(folders[0]), str(_odd_drafter(tmp_path)), dtype="float32")


def _odd_drafter(tmp_path):
    return tiny_drafter_folder(tmp_path, hidden_size=32, target_hidden_size=32)


def test_auto_decodes_plainly_where_no_drafter_is_known(folders, caplog):
    llm = LLM(str(folders[0]), dtype="float32")
    assert llm.drafter_folder is None
    assert "no drafter is known" in caplog.text
    assert llm.generate("abc", params()).completions[0].acceptance.acceptance_length == 1.0


def _pair(dtype=torch.float64):
    target = tiny_target(dtype=dtype)
    torch.manual_seed(3)
    return target, DraftModel(tiny_draft_config()).to(dtype)


def test_spec_generate_equals_transformers():
    target, drafter = _pair()
    input_ids = torch.arange(5, 25)[None]
    expected = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=40, do_sample=False
    )
    for block_size in (None, 1, 3):
        output = drafter.spec_generate(
            target=target,
            input_ids=input_ids,
            max_new_tokens=40,
            temperature=0.0,
            stop_token_ids=[],
            block_size=block_size,
        )
        assert torch.equal(output, expected)
    stop = int(expected[0, 30])
    cut = drafter.spec_generate(target, input_ids, 40, stop_token_ids=[stop])
    end = expected[0, 20:].tolist().index(stop)
    assert torch.equal(cut, expected[:, : 20 + end + 1])


@pytest.mark.parametrize("fails", [False, True])
def test_spec_generate_leaves_the_target_as_it_was(fails, monkeypatch):
    target, drafter = _pair()
    attention = target.config._attn_implementation
    input_ids = torch.arange(5, 25)[None]
    before = target(input_ids).logits
    if fails:
        monkeypatch.setattr(drafter, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.spec_generate(target, input_ids, 8)
    else:
        drafter.spec_generate(target, input_ids, 8)
    assert target.config._attn_implementation == attention
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())
    assert torch.equal(target(input_ids).logits, before)


@pytest.mark.parametrize("fails", [False, True])
def test_spec_generate_runs_a_model_in_training_as_if_it_were_not(fails, monkeypatch):
    """Dropout would change the output, and gradient checkpointing would drop the cache."""
    target, drafter = _pair()
    input_ids = torch.arange(5, 25)[None]
    expected = drafter.spec_generate(target, input_ids, 24)
    target.train()
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    target.model.layers[1].eval()
    before = [module.training for module in target.modules()]
    if fails:
        monkeypatch.setattr(target.model.layers[3].mlp, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.spec_generate(target, input_ids, 8)
    else:
        assert torch.equal(drafter.spec_generate(target, input_ids, 24), expected)
    assert [module.training for module in target.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


def test_spec_generate_refuses_what_it_cannot_do():
    target, drafter = _pair()
    ids = torch.arange(5, 25)[None]
    for bad in (
        {"block_size": 7},
        {"block_size": 0},
        {"temperature": float("nan")},
        {"stop_token_ids": 0},
    ):
        with pytest.raises(RequestError):
            drafter.spec_generate(target, ids, 8, **bad)
    with pytest.raises(RequestError, match="one sequence"):
        drafter.spec_generate(target, ids.expand(2, -1), 8)
    with pytest.raises(ModelError, match="make them equal"):
        drafter.float().spec_generate(target, ids, 8)


def test_the_public_drafter_loads_and_keeps_its_class(tmp_path):
    loaded = DraftModel.from_pretrained(tiny_drafter_folder(tmp_path))
    assert type(loaded) is DraftModel
    assert loaded.config.target_layer_ids == LAYER_IDS
    edit_json(tmp_path / "drafter" / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError):
        DraftModel.from_pretrained(tmp_path / "drafter")

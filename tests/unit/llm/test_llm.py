import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from blockdraft import LLM, ConfigError, ContextTooLong, DraftModel, ModelError, RequestError
from blockdraft.allocation.best_rate import BestRate
from blockdraft.allocation.policy import VerifyAll
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from tests.small_llm import MAX_TOKENS, assert_nothing_left, load_llm, params, without_pages
from tests.tiny import CONTEXT, LAYER_IDS, TEXT_VOCAB_SIZE, edit_json, tiny_drafter_folder
from tests.torch_threads import threads

MESSAGES = [{"role": "user", "content": "the abc"}]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_equals_plain(llm, temperature):
    wanted = params(temperature=temperature, seed=5)
    drafted = llm.chat(MESSAGES, wanted).completions[0]
    plain = llm.chat(MESSAGES, replace(wanted, num_draft_tokens=0)).completions[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert len(set(drafted.token_ids)) >= 8
    assert drafted.acceptance.drafted
    assert not plain.acceptance.drafted
    assert_nothing_left(llm)


def test_folders_may_be_paths(folders):
    target, drafter = folders
    llm = LLM(target, drafter, dtype="float32")
    assert llm.config.target == str(target)
    assert llm.generate("the abc", params(max_tokens=3)).completions[0].token_ids


def test_a_device_of_torch_is_taken(folders):
    llm = LLM(*folders, dtype="float32", device=torch.device("cpu"))
    assert (llm.config.device, llm.device) == ("cpu", "cpu")


def test_a_fork_without_the_threads_is_refused(llm, folders, monkeypatch):
    """It would wait for them without end."""
    generation = llm.generate("the abc", params(max_tokens=3))
    (receipt,) = llm.receipts(generation)
    monkeypatch.setattr("blockdraft.core.threads._process_with_threads", -1)
    monkeypatch.setattr(llm, "num_threads", 2)
    for ask in (
        lambda: llm.generate("the abc"),
        lambda: llm.chat(MESSAGES, stream=True),
        lambda: llm.verify(receipt),
        lambda: LLM(*folders, num_threads=2),
    ):
        refusal = "was forked .* 'spawn', or give num_threads=1"
        with threads(torch.get_num_threads()), pytest.raises(ConfigError, match=refusal):
            ask()
    monkeypatch.setattr(llm, "num_threads", 1)
    assert llm.generate("the abc", params(max_tokens=3)).completions[0].token_ids
    monkeypatch.setattr("blockdraft.core.threads._process_with_threads", None)
    monkeypatch.setattr(llm, "num_threads", 2)
    assert llm.generate("the abc", params(max_tokens=3)).completions[0].token_ids


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("target", None), ("target", b"x"), ("drafter", 3), ("device", None), ("dtype", 16)),
        *(("memory", "1"), ("memory", float("nan")), ("exact", "off"), ("lookup", "x")),
        *(("max_concurrency", True), ("prefill_chunk", None), ("ngrams", None)),
    ],
)
def test_an_option_of_another_type_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"^{option} is .*; it must be "):
        LLM(**{option: value})


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


def test_conversations_together_equal_conversations_alone(llm):
    conversations = [MESSAGES, [{"role": "user", "content": "!!"}, *MESSAGES]]
    together = llm.chat(conversations, params())
    alone = [llm.chat(conversation, params()) for conversation in conversations]
    assert [g.completions[0].token_ids for g in together] == [
        g.completions[0].token_ids for g in alone
    ]
    streamed = {c.prompt_index for c in llm.chat(conversations, params(), stream=True)}
    assert streamed == {0, 1}


def test_each_prompt_may_have_its_own_params(llm):
    own = [params(max_tokens=3), params(max_tokens=5, temperature=1.0, seed=7)]
    found = llm.generate(["abc", "abc"], own)
    alone = [llm.generate("abc", each) for each in own]
    assert [g.completions[0].token_ids for g in found] == [
        g.completions[0].token_ids for g in alone
    ]
    assert [len(g.completions[0].token_ids) for g in found] == [3, 5]
    chats = llm.chat([MESSAGES, MESSAGES], own)
    assert [len(g.completions[0].token_ids) for g in chats] == [3, 5]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.generate(["a", "b"], [params()]), "1 sampling params for 2 prompts"),
        (lambda llm: llm.generate("a", [params(), params()]), "2 sampling params for 1 prompts"),
        (
            lambda llm: llm.generate("a", {"max_tokens": 1, "stop": ["x"]}),
            r"params is a dict; give SamplingParams\(max_tokens=1, stop=\['x'\]\)$",
        ),
        (
            lambda llm: llm.chat(MESSAGES, {"n": 2}),
            r"params is a dict; give SamplingParams\(n=2\)$",
        ),
        (
            lambda llm: llm.generate(["a", "b"], [params(), {"n": 2}]),
            r"params\[1\] is a dict; give SamplingParams\(n=2\)$",
        ),
        (
            lambda llm: llm.chat([MESSAGES, MESSAGES], [None, params()]),
            r"params\[0\] is None; give SamplingParams\(\)$",
        ),
        (lambda llm: llm.generate("a", 8), r"params is an int; give SamplingParams\(\)$"),
        (lambda llm: llm.generate("a", "n"), r"params is a str; give SamplingParams\(\)$"),
        (lambda llm: llm.chat([MESSAGES, MESSAGES[0]]), "messages and conversations are mixed"),
        (lambda llm: llm.chat("hello"), "messages are 'hello'"),
        (lambda llm: llm.chat([]), "the conversation is empty"),
        (lambda llm: llm.chat([[]]), "the conversation is empty"),
        (lambda llm: llm.chat([{"role": "user"}]), "lacks 'content'; give it$"),
        (
            lambda llm: llm.chat([{**MESSAGES[0], "date": "now"}]),
            "has the key 'date'; leave it out$",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": [{"image": "x" * 1000}]}]),
            "^message {.{,98}x holds something other than text; give role and content as str$",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(llm, ask, message):
    with pytest.raises(RequestError, match=message):
        ask(llm)
    assert_nothing_left(llm)


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


def test_the_work_for_a_prompt_does_not_grow_with_their_number(llm):
    def num_calls_each(num_prompts):
        calls = Counter()
        prompts = [[1 + index % 200] for index in range(num_prompts)]
        sys.setprofile(lambda frame, event, arg: calls.update([event]))
        try:
            llm.generate(prompts, params(max_tokens=1))
        finally:
            sys.setprofile(None)
        return calls["call"] / num_prompts

    assert num_calls_each(480) < 1.3 * num_calls_each(48)


def test_two_open_streams_do_not_disturb_each_other(llm):
    wanted = params(logprobs=0)
    first = llm.generate("abc", wanted, stream=True)
    second = llm.generate("the fox", replace(wanted, num_draft_tokens=0), stream=True)
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


def test_text_ends_before_a_stop_string_and_tokens_with_it(llm):
    whole = llm.generate("abc the", params()).completions[0]
    stop = re.findall(r"[!-~]{2}", whole.text)[-1]
    for most in (None, 0):
        cut = llm.generate("abc the", params(stop=(stop,), num_draft_tokens=most)).completions[0]
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


@pytest.mark.parametrize(
    "prompt",
    [b"the", bytearray(b"the"), memoryview(b"the"), range(5), (True, False), [1, True]],
    ids=lambda prompt: type(prompt).__name__,
)
@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_what_only_looks_like_token_ids_is_refused(llm, prompt, is_one_of_many):
    with pytest.raises(RequestError, match=r"give a str .* or a list of ints"):
        llm.generate(["abc", prompt] if is_one_of_many else prompt, stream=True)


def test_a_long_prompt_is_refused_with_both_numbers(llm):
    with pytest.raises(ContextTooLong, match=rf"600 tokens.*{CONTEXT} tokens"):
        llm.generate([5] * 600)


def test_models_run_in_pages_unless_they_cannot(llm, folders, caplog, monkeypatch):
    assert isinstance(load_llm(folders).engine.target, PagedTarget)
    assert "one after another" not in caplog.text
    monkeypatch.setattr("blockdraft.models.target.paged.layer_shapes", without_pages)
    assert isinstance(load_llm(folders).engine.target, SequentialTarget)
    assert "runs its sequences one after another: it is to run without" in caplog.text
    with pytest.raises(ConfigError, match=r"memory of 0\.5 GiB cannot be enforced"):
        load_llm(folders, memory=0.5)


def test_drafting_is_adaptive_unless_it_is_fixed(folders, llm):
    adaptive = load_llm(folders, adaptive=True)
    assert isinstance(adaptive.engine.allocator.policy, BestRate)
    assert isinstance(llm.engine.allocator.policy, VerifyAll)
    expected = llm.generate("the abc", params(max_tokens=60)).completions[0].token_ids
    for switch in (
        lambda: None,
        lambda: adaptive.use_fixed_drafting(3),
        adaptive.use_adaptive_drafting,
    ):
        switch()
        found = adaptive.generate("the abc", params(max_tokens=60)).completions[0]
        assert found.token_ids == expected
    assert_nothing_left(adaptive)


def drafted_in(llm, **changes):
    """The most candidates of a pass, and the depth of the deepest."""
    acceptance = llm.generate("the abc", params(**changes)).completions[0].acceptance
    deepest = max((depth for depth, _ in acceptance.drafted_at), default=-1) + 1
    return max(num for num, _ in acceptance.outcomes), deepest


def test_fixed_limits_are_kept_to(llm):
    depth = llm.engine.drafter.max_nodes
    try:
        for limits, most, deepest in (
            ((0,), 0, 0),
            ((1,), 1, 1),
            ((3,), 3, 3),
            ((), depth, depth),
            ((depth + 4,), depth + 4, depth),
            ((5, 2), 5, 2),
            ((None, 2), 2, 2),
        ):
            llm.use_fixed_drafting(*limits)
            assert drafted_in(llm) == (most, deepest)
        llm.use_fixed_drafting(depth + 4)
        assert drafted_in(llm, draft_depth=1)[1] == 1
        assert drafted_in(llm, num_draft_tokens=2) == (2, 2)
        assert drafted_in(llm, num_draft_tokens=0) == (0, 0)
        for limits, reason in (
            ((-1,), "num_draft_tokens is -1"),
            ((2**30,), "give at most 1024"),
            ((3, 0), "draft_depth is 0"),
        ):
            with pytest.raises(ConfigError, match=reason):
                llm.use_fixed_drafting(*limits)
    finally:
        llm.use_fixed_drafting()


def test_limits_are_refused_before_steps_are_timed(llm, monkeypatch):
    def measured(*args):
        raise AssertionError("it takes seconds")

    monkeypatch.setattr("blockdraft.engine.engine.measure_costs", measured)
    monkeypatch.setattr(llm.engine, "_costs", None)
    with pytest.raises(ConfigError, match="draft_depth is 0"):
        llm.engine.use_adaptive_drafting(3, 0)


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


def test_the_public_drafter_loads_and_keeps_its_class(tmp_path):
    loaded = DraftModel.from_pretrained(tiny_drafter_folder(tmp_path))
    assert type(loaded) is DraftModel
    assert loaded.config.target_layer_ids == LAYER_IDS
    edit_json(tmp_path / "drafter" / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError):
        DraftModel.from_pretrained(tmp_path / "drafter")

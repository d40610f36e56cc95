"""A request that fails leaves nothing behind, and costs the others nothing."""

import itertools
import math

import pytest
from transformers import GenerationConfig

from blockdraft import RequestError
from blockdraft.engine.engine import Engine
from blockdraft.engine.record import SampleText
from tests.interrupts import interrupt_call
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.tiny import tiny_drafter_folder, tiny_target_folder


def test_a_failing_step_leaves_nothing_behind(llm, monkeypatch):
    def fail(plan):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "forward", fail)
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


@pytest.mark.one_in(9)
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


def read_together(streams):
    """Read streams in turn; token ids and the failure of each, and its last chunk."""
    found, failures = [()] * len(streams), [None] * len(streams)
    last, still_open = [None] * len(streams), set(range(len(streams)))
    while still_open:
        for index in sorted(still_open):
            try:
                last[index] = next(streams[index])
                found[index] += last[index].token_ids
            except StopIteration:
                still_open.remove(index)
            except (RuntimeError, KeyboardInterrupt) as error:
                failures[index] = error
                still_open.remove(index)
    return found, failures, last


@pytest.mark.one_in(12)
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 8])
def test_a_failure_while_text_is_written_costs_other_streams_no_token(llm, failing, after, error):
    """Whoever makes a step that is interrupted gets the interrupt; the others get all."""
    prompts = ["abc", "the fox", "!!"]
    expected = [llm.generate(p, params()).completions[0].token_ids for p in prompts]
    streams = [llm.generate(p, params(), stream=True) for p in prompts]
    found = [next(stream).token_ids for stream in streams]
    victim = list(llm.engine.progress)[failing]
    sequence, calls = llm.engine.progress[victim].sequence, itertools.count()
    real = sequence.scan_stop

    def scan(token_id):
        if next(calls) == after:
            raise error
        return real(token_id)

    sequence.scan_stop = scan
    rest, failures, last = read_together(streams)
    is_interrupt = isinstance(error, KeyboardInterrupt)
    assert sum(failure is not None for failure in failures) == is_interrupt
    for index, own in enumerate(found):
        tokens = own + rest[index]
        if failures[index] is not None:
            assert tokens == expected[index][: len(tokens)]
        elif index == failing:
            assert last[index].completion.finish_reason == "error"
            assert tokens == last[index].completion.token_ids == expected[index][: len(tokens)]
        else:
            assert tokens == last[index].completion.token_ids == expected[index]
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        *((SampleText, "receive", after) for after in (1, 69, 71)),
        *((Engine, "_observe", after) for after in (1, 47)),
    ],
)
def test_an_interrupt_behind_the_commit_costs_other_streams_no_token(
    llm, owner, name, after, monkeypatch, caplog
):
    """Of three streams, 24 tokens each; a step is observed twice, the second time in its report."""
    prompts, plain = ["abc", "the fox", "!!"], params(num_draft_tokens=0)
    expected = [llm.generate(p, plain).completions[0].token_ids for p in prompts]
    interrupt_call(monkeypatch, owner, name, 1 + after)
    read, failures, last = read_together([llm.generate(p, plain, stream=True) for p in prompts])
    assert sum(failure is not None for failure in failures) == 1
    errors = [end for end in last if end is not None and end.completion and end.completion.error]
    assert len(errors) <= (name == "receive")
    for index, tokens in enumerate(read):
        if failures[index] is None and last[index] not in errors:
            assert tokens == last[index].completion.token_ids == expected[index]
    assert_nothing_left(llm)
    assert not [record for record in caplog.records if record.exc_info], "an interrupt is no fault"


@pytest.mark.parametrize("after", [0, 1, 5])
def test_logits_that_are_no_numbers_end_a_request_with_what_it_has(llm, after):
    expected = llm.generate("the abc", params(num_draft_tokens=0)).completions[0]
    calls = itertools.count()

    def damage(module, args, output):
        return output * math.nan if next(calls) == after else output

    head = llm.engine.target.model.get_output_embeddings()
    hook = head.register_forward_hook(damage)
    try:
        chunks = list(llm.generate("the abc", params(num_draft_tokens=0), stream=True))
    finally:
        hook.remove()
    completion = chunks[-1].completion
    position = len(llm.tokenizer.encode("the abc")) + after
    assert f"position {position} are not numbers" in completion.error
    assert completion.finish_reason == "error"
    assert completion.token_ids == expected.token_ids[:after]
    assert completion.text == "".join(chunk.text for chunk in chunks)
    assert completion.timings.total > 0
    assert_nothing_left(llm)
    again = llm.generate("the abc", params()).completions[0]
    assert (again.error, again.token_ids) == (None, expected.token_ids)


def test_a_request_that_fails_leaves_the_other_prompts_whole(llm, monkeypatch):
    expected = [g.completions[0].token_ids for g in llm.generate(["abc", "the"], params())]
    real = llm.engine.target.forward

    def forward(plan):
        if any(len(planned.row.new_ids) > 40 for planned in plan):
            raise MemoryError
        return real(plan)

    monkeypatch.setattr(llm.engine.target, "forward", forward)
    generations = llm.generate(["abc", "z" * 60, "the"], params(n=1))
    ends = [g.completions[0] for g in generations]
    assert [end.finish_reason for end in ends] == ["length", "error", "length"]
    assert "not enough memory for a forward pass of 60 tokens" in ends[1].error
    assert (ends[1].token_ids, ends[1].text) == ((), "")
    assert [ends[0].token_ids, ends[2].token_ids] == expected
    assert_nothing_left(llm)


def test_ends_outside_the_vocabulary_are_left_out_with_a_warning(tmp_path, caplog):
    target, drafter = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    GenerationConfig(eos_token_id=[257, 5000]).save_pretrained(target)
    llm = load_llm((target, drafter))
    assert "end-of-text ids 5000 are outside the target's vocabulary of 272" in caplog.text
    assert 257 in llm.tokenizer.eos_ids
    assert 5000 not in llm.tokenizer.eos_ids
    (found,) = llm.generate("abc", params(min_tokens=2, ignore_eos=False)).completions
    assert found.error is None


def test_a_minimum_length_that_leaves_no_token_is_refused_at_once(llm):
    wanted = params(min_tokens=1, stop_token_ids=tuple(range(llm.engine.target.vocab_size)))
    with pytest.raises(RequestError, match="min_tokens is 1, and all 272 tokens"):
        llm.generate("abc", wanted, stream=True)

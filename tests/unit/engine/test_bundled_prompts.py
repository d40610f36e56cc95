"""The bundled prompts by which a pair is known, and the hash of a target's weights."""

from collections import Counter

import pytest
from safetensors.torch import load_file, save_file

from blockdraft.core.errors import ModelError
from blockdraft.engine.bundled_prompts import (
    MAX_TOKENS,
    acceptance_by_category,
    answer_bundled,
    describe_answers,
    encode_bundled,
    read_bundled,
)
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.text.tokenizer import load_tokenizer
from tests.clear_pair import ANSWER, add_switch, write_pair
from tests.small_llm import assert_nothing_left, load_llm


def test_twenty_prompts_of_four_kinds():
    prompts = read_bundled()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ("math", "code", "chat", "writing"), 5
    )
    assert len({prompt.text for prompt in prompts}) == 20


def test_answers_are_counted_by_category(tmp_path):
    llm = load_llm(write_pair(tmp_path), adaptive=True)
    encoded = encode_bundled(llm.tokenizer, read_bundled())
    ticks = []
    answers = answer_bundled(llm.engine, encoded, llm.tokenizer.eos_ids, lambda: ticks.append(1))
    assert all(answer.output_ids == (ANSWER,) * MAX_TOKENS for answer in answers)
    by_category = acceptance_by_category(answers)
    assert {stats.num_passes for stats in by_category.values()} == {5 * 11}
    assert len(ticks) >= 20 * 12
    described = describe_answers(answers)
    assert described["tau"] == pytest.approx(dict.fromkeys(by_category, 63 / 11), abs=1e-4)
    assert (described["num_prompts"], described["max_tokens"]) == (20, MAX_TOKENS)
    assert_nothing_left(llm)


def test_prompts_are_asked_as_the_template_is_told(tmp_path):
    target, _ = write_pair(tmp_path)
    add_switch(target)
    tokenizer = load_tokenizer(target)
    told = {
        thinking: [ids for _, ids in encode_bundled(tokenizer, read_bundled(), thinking)]
        for thinking in ("template", "on", "off")
    }
    assert told["template"] == told["on"]
    assert all(len(on) > len(off) for on, off in zip(told["on"], told["off"], strict=True))


def test_a_target_that_was_only_saved_again_keeps_its_hash(tmp_path):
    target, _ = write_pair(tmp_path)
    before, path = weights_sha256(target), target / "model.safetensors"
    weights = load_file(path)
    names = sorted(weights)
    path.unlink()
    save_file({name: weights[name] for name in names[5:]}, target / "b.safetensors", {"x": "y"})
    save_file({name: weights[name] for name in names[:5]}, target / "c.safetensors")
    assert weights_sha256(target) == before
    weights[names[0]][0] += 1e-3
    save_file({name: weights[name] for name in names[:5]}, target / "c.safetensors")
    assert weights_sha256(target) != before
    (target / "c.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"c\.safetensors"):
        weights_sha256(target)
    with pytest.raises(ModelError, match="no safetensors"):
        weights_sha256(tmp_path)

"""The prompts of a proof: the bundled ones, and files of users."""

import gzip
import json
from collections import Counter

import pytest

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.errors import ConfigError
from blockdraft.proof.certificate import hash_prompts, hash_value
from blockdraft.proof.config import LEAST_TOKENS, QUICK, ProofConfig
from blockdraft.proof.corpus import BUNDLED, ProofPrompt, first_of_each_kind, read_prompts


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_corpus_is_messy_in_every_way():
    prompts = read_prompts(BUNDLED)
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 40
    kinds = {prompt.kind for prompt in prompts}
    assert kinds >= {
        "mixed-scripts", "emoji", "broken-unicode", "cut-character", "tabs-and-blanks",
        "half-json", "minified-code", "table", "one-token", "long", "repeated",
        "special-look-alikes", "tool-transcript", "language", "thinking",
    }  # fmt: skip
    assert {prompt.thinking for prompt in prompts} == {True, False, None}
    assert max(len(prompt.text) for prompt in prompts) > 5000
    texts = "".join(prompt.text for prompt in prompts)
    assert {"\t", "\ufffd", "\u202e", "\u200d", "<|im_end|>"} <= {
        piece for piece in ("\t", "\ufffd", "\u202e", "\u200d", "<|im_end|>") if piece in texts
    }


def test_a_page_of_the_corpus_comes_twice_behind_other_tokens():
    """Else nobody would see that a page is reused whatever stands before it."""
    kept = first_of_each_kind(read_prompts(BUNDLED))
    word, _ = Counter(next(p.text for p in kept if p.kind == "repeated").split()).most_common(1)[0]
    assert any(p.raw and p.text.startswith(f" {word}" * (2 * PAGE_SIZE)) for p in kept)


def test_a_quick_proof_keeps_every_kind():
    prompts = read_prompts(BUNDLED)
    kept = first_of_each_kind(prompts)
    assert {prompt.kind for prompt in kept} == {prompt.kind for prompt in prompts}
    assert [p.thinking for p in kept if p.kind == "thinking"] == [True, False]
    assert len(kept) < len(prompts) / 1.5


def test_a_users_rows_may_say_how_they_are_put(tmp_path):
    rows = [
        {"prompt": "one"},
        {"id": "two", "category": "c", "turns": ["first", "second"], "thinking": False},
        {"prompt": " \n", "raw": True, "take": 1},
    ]
    path = tmp_path / "mine.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, rows)))
    assert read_prompts(path) == [
        ProofPrompt("mine-1", "mine", "one"),
        ProofPrompt("two", "c", "first", thinking=False),
        ProofPrompt("mine-3", "mine", " \n", raw=True, take=1),
    ]


def test_every_bad_line_is_named(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"prompt": "a"}', "{", "", "[1]", '{"prompt": " "}')
    with pytest.raises(ConfigError, match="3 lines are bad") as caught:
        read_prompts(path)
    for number in (2, 4, 5):
        assert f"p.jsonl, line {number}: " in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "raw": 1}', "raw is 1; give true or false"),
        ('{"prompt": "a", "take": "x"}', "take is 'x'; give a whole number"),
        ('{"prompt": "a", "take": true}', "take is True"),
        ('{"text": "a"}', "it holds no prompt"),
    ],
)
def test_a_bad_field_is_refused(tmp_path, line, reason):
    with pytest.raises(ConfigError, match=reason):
        read_prompts(write(tmp_path / "p.jsonl", line))


def test_prompts_keep_the_hash_that_certificates_have_of_them():
    asked = {"id": "a", "kind": "b", "text": "c", "raw": False, "take": None, "thinking": None}
    assert hash_prompts([ProofPrompt(**asked)]) == hash_value([asked])
    told = asked | {"system": "d"}
    assert hash_prompts([ProofPrompt(**told)]) == hash_value([told])


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", "\n"))


def test_a_proof_has_room_for_blocks():
    assert ProofConfig(**QUICK).max_tokens >= LEAST_TOKENS
    with pytest.raises(ConfigError, match="max_tokens is 2"):
        ProofConfig(max_tokens=2)

"""The bound of the number of tokens: never above what the tokenizer makes, and high enough."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from blockdraft.core.errors import ContextTooLong
from blockdraft.text.least_tokens import LeastTokens
from blockdraft.text.tokenizer import Tokenizer as OurTokenizer
from tests.tiny import spelled_bytes_tokenizer, tiny_tokenizer

MAKERS = {"byte-level": tiny_tokenizer, "spelled bytes": spelled_bytes_tokenizer}
LETTERS = ("a", "abc", " the", "  ", "é", "e\u0301", "🙂", "\u1100\u1161\u11a8", "\ufdfa")
PARTS = (*LETTERS, "\n\n", "<|end|>", "<s>", "<tool>", "x" * 9, "!!")


def changed(maker, change):
    def make():
        tokenizer = maker()
        change(tokenizer.backend_tokenizer)
        return tokenizer

    return make


def compose(backend):
    backend.normalizer = normalizers.NFKC()


def split(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


KEPT = MAKERS | {
    "composed": changed(tiny_tokenizer, compose),
    "split": changed(tiny_tokenizer, split),
}


@pytest.mark.parametrize("name", KEPT)
def test_no_text_has_fewer_tokens_than_the_bound(name):
    backend = KEPT[name]().backend_tokenizer
    bound, draw = LeastTokens(backend), random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(PARTS, k=draw.randrange(1, 60)))
        num = len(backend.encode(text, add_special_tokens=False).ids)
        assert bound.of(text, most=num) == 0
        assert bound.of(text, most=1) <= num


@pytest.mark.parametrize("name", KEPT)
def test_a_text_that_is_far_too_long_is_found(name):
    bound = LeastTokens(KEPT[name]().backend_tokenizer)
    assert 1000 < bound.of("x" * 100_000, most=1000) <= 100_000


def drop_spaces(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def remove_spaces(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def strip(backend):
    backend.normalizer = normalizers.Strip()


def shorten(backend):
    backend.normalizer = normalizers.Replace("  ", " ")


def take_spaces(backend):
    backend.add_tokens([AddedToken("<pad>", lstrip=True)])


@pytest.mark.parametrize("change", [drop_spaces, remove_spaces, strip, shorten, take_spaces])
def test_a_tokenizer_that_takes_letters_away_has_no_bound(change):
    backend = changed(tiny_tokenizer, change)().backend_tokenizer
    assert LeastTokens(backend).of(" " * 1_000_000, most=10) == 0


def test_unknown_letters_that_become_one_token_have_no_bound():
    vocab = {"<unk>": 0, "a": 1}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True))
    assert len(backend.encode("x" * 1000).ids) == 1
    assert LeastTokens(backend).of("x" * 1000, most=10) == 0
    words = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    assert LeastTokens(words).of("x" * 1000, most=10) == 0


def test_bytes_without_a_token_do_not_count():
    """As in the default target's vocabulary: they are dropped without a word."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ą"})  # the byte 4
    backend = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert backend.encode("\x04" * 1000).ids == []
    assert LeastTokens(backend).of("\x04" * 1000 + "a", most=10) == 0
    assert LeastTokens(backend).of("a" * 1000, most=10) == 1000


def test_what_is_certainly_too_long_is_refused_before_it_is_tokenized(monkeypatch):
    raw = tiny_tokenizer()
    tokenizer = OurTokenizer(raw, [])
    monkeypatch.setattr(type(raw), "__call__", None)  # nothing is tokenized
    text = "x" * 1_000_000
    message = "the text has 1000000 characters, which are at least .* room for 512; shorten it"
    with pytest.raises(ContextTooLong, match=message):
        tokenizer.encode(text, most=512)
    with pytest.raises(ContextTooLong, match="characters, which are at least"):
        tokenizer.encode_chat([{"role": "user", "content": text}], most=512)

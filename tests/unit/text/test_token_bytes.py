import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from blockdraft.text.token_bytes import TokenBytes
from blockdraft.text.tokenizer import Tokenizer
from tests.tiny import SPECIAL_TOKENS, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_tokenizer(), [])


@pytest.mark.parametrize("text", ["abc the", "naïve € 🙂", "\x00\t\n\x7f ", "日本語"])
def test_the_bytes_of_its_tokens_are_those_of_a_text(tokenizer, text):
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode(text)
    assert b"".join(map(tokens.bytes_of, ids)) == text.encode()


def test_parts_of_characters_are_spelled(tokenizer):
    tokens = TokenBytes(tokenizer)
    assert [tokens.text_of(i) for i in tokenizer.encode("é")] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert tokens.text_of(tokenizer.encode("the")[0]) == "the"


def test_special_tokens_have_their_names_and_padding_nothing(tokenizer):
    tokens = TokenBytes(tokenizer)
    named = [tokens.text_of(tokenizer.backend.token_to_id(name)) for name in SPECIAL_TOKENS]
    assert named == list(SPECIAL_TOKENS)
    assert tokens.bytes_of(10_000) == b""


def test_sentencepiece_spells_single_bytes():
    class Wrapped:
        chat_template = None

        def __init__(self):
            vocab = {"<unk>": 0, "\u2581the": 1, "<0xE2>": 2}
            self.backend_tokenizer = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
            self.backend_tokenizer.decoder = decoders.Sequence(
                [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
            )

    tokens = TokenBytes(Tokenizer(Wrapped(), []))
    assert (tokens.bytes_of(1), tokens.bytes_of(2)) == (b" the", b"\xe2")
    assert tokens.text_of(2) == "bytes:\\xe2"

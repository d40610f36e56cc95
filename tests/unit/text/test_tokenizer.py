"""A target's tokenizer in several threads at once."""

from concurrent.futures import ThreadPoolExecutor

from blockdraft.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer


def test_no_call_changes_what_another_thread_uses():
    """A tokenizer's file may ask for a length, which transformers takes back at the first text."""
    raw = tiny_tokenizer()
    raw.backend_tokenizer.enable_truncation(4)
    raw.backend_tokenizer.enable_padding(length=50)
    tokenizer = Tokenizer(raw, [])
    assert (tokenizer.backend.truncation, tokenizer.backend.padding) == (None, None)
    text = "the abc " * 500
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(tokenizer.encode, [text] * 40))
    assert len(found[0]) > 500
    assert all(ids == found[0] for ids in found)


def test_a_length_in_its_config_that_is_no_number_matters_to_nobody() -> None:
    """transformers compares it with each text, to warn of longer ones."""
    raw = tiny_tokenizer()
    raw.model_max_length = "unlimited"
    assert Tokenizer(raw, []).encode("the abc")

"""What a grammar accepts, with the tiny tokenizer unless a module has its own.

A module that uses a fixture imports it by name.
"""

import pytest

from blockdraft.text.grammar import Grammars
from blockdraft.text.tokenizer import Tokenizer
from tests.tiny import TEXT_VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    inner = tiny_tokenizer()
    return Tokenizer(inner, [inner.eos_token_id])


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, TEXT_VOCAB_SIZE)


def accepts(grammars, tokenizer, grammar, text):
    """True if each token of the text is allowed after those before it, and the end after all."""
    state, ids = grammars.start(grammar), tokenizer.encode(text) if text else []
    path = [*ids, min(tokenizer.eos_ids)]
    masks = (state.allowed(path[:i], []) for i in range(len(path)))
    return all(
        mask is not None and mask[token_id] for mask, token_id in zip(masks, path, strict=True)
    )

"""Tokens to text, one at a time: what comes out is what decode makes of all of them."""

import random
import re

import pytest
from tokenizers import AddedToken

from blockdraft import LLM, SamplingParams
from blockdraft.text.stream_decoder import StreamDecoder
from blockdraft.text.tokenizer import Tokenizer
from tests.tiny import spelled_bytes_tokenizer, tiny_target_folder, tiny_tokenizer

LOST = "\N{REPLACEMENT CHARACTER}"


def byte_level():
    tokenizer = tiny_tokenizer()
    names = ("<té>", " x ", "日Ġ", "ĠĊ")  # in the alphabet, and not
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    return Tokenizer(tokenizer, [])


def spelled_bytes():
    return Tokenizer(spelled_bytes_tokenizer(), [])


def spell(tokenizer, data):
    return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in data]


def pieces_of(tokenizer, token_ids, prompt_ids=()):
    decoder = StreamDecoder(tokenizer, prompt_ids)
    return [*map(decoder.push, token_ids), decoder.close()]


def random_ids(tokenizer, num_cases):
    """Of all ids, some beyond the vocabulary; or bytes that seldom make a character."""
    draw, size = random.Random(0), tokenizer.backend.get_vocab_size()
    high = [i for i in range(size) if tokenizer.decode([i]) == LOST]
    pools = [range(size + 4), high, [*high, *range(30, 60)]]
    for _ in range(num_cases):
        pool = draw.choice(pools)
        yield [draw.choice(pool) for _ in range(draw.randrange(14))]


def test_text_of_a_byte_level_vocabulary_is_that_of_decode():
    tokenizer, prompt_ids = byte_level(), []
    for ids in random_ids(tokenizer, 3000):
        assert "".join(pieces_of(tokenizer, ids, prompt_ids)) == tokenizer.decode(ids)
        prompt_ids = ids


def kept_runs(tokenizer, ids):
    """What decode gives, with the characters that stand before the first bad byte of a run."""
    names = [tokenizer.backend.id_to_token(i) for i in ids if tokenizer.vocabulary.has_text(i)]
    spelled = re.sub(
        "(<0x[0-9A-F]{2}>)+", lambda run: kept_run(run[0]), "".join(names).replace("\u2581", " ")
    )
    return spelled.removeprefix(" ")


def kept_run(run):
    data = bytes.fromhex(run.replace("<0x", "").replace(">", ""))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode() + LOST * (len(data) - error.start)


def test_text_of_spelled_bytes_is_that_of_decode_but_for_what_was_handed_out():
    tokenizer, num_equal = spelled_bytes(), 0
    for ids in random_ids(tokenizer, 3000):
        text = "".join(pieces_of(tokenizer, ids))
        # A first space that a byte spells is the one place where decode strips and a stream cannot.
        assert text.removeprefix(" ") == kept_runs(tokenizer, ids).removeprefix(" ")
        num_equal += text == tokenizer.decode(ids)
    assert num_equal > 1000


def test_bytes_that_fit_nowhere_are_replaced_and_the_text_goes_on():
    tokenizer = spelled_bytes()
    a, space_a = (tokenizer.backend.token_to_id(name) for name in ("a", "\u2581a"))
    newline, smile = spell(tokenizer, b"\n"), spell(tokenizer, "😀".encode())
    broken = [*newline, *smile[:2], *newline]
    pieces = pieces_of(tokenizer, [a, *broken, space_a, *newline, *smile, a])
    # As decode: all that is left of a broken run is lost, byte by byte.
    expected = ["a", "\n", "", "", LOST * 3, " a", "\n", "", "", "", "😀", "a", ""]
    assert pieces == expected
    assert pieces_of(tokenizer, [a, *smile[:3]]) == ["a", "", "", "", LOST * 3]


def test_every_way_to_write_words_behind_a_prompt():
    tokenizer = spelled_bytes()
    a, word = (tokenizer.backend.token_to_id(name) for name in ("a", "\u2581a"))
    start = tokenizer.backend.token_to_id("<s>")
    assert pieces_of(tokenizer, [word, a, word]) == ["a", "a", " a", ""]
    assert pieces_of(tokenizer, [word, a], [start, a, start]) == [" a", "a", ""]
    assert pieces_of(tokenizer, [word], spell(tokenizer, b"\xf0")) == [" a", ""]


@pytest.mark.parametrize("make", [byte_level, spelled_bytes])
def test_work_for_a_token_is_bounded(make, monkeypatch):
    """However long no byte makes a character."""
    tokenizer, decoded = make(), []
    real = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: (decoded.append(len(ids)), real(self, ids))[1]
    )
    bad = next(i for i in range(260) if real(tokenizer, [i]) == LOST)
    decoder = StreamDecoder(tokenizer)
    for num in range(1, 200):
        piece = decoder.push(bad)
        assert len(piece) <= 4
        assert num < 4 or piece
    assert max(decoded, default=0) <= 2


def test_text_that_is_not_utf_8_ends_no_call(tmp_path):
    folder = tiny_target_folder(tmp_path)
    tokenizer = spelled_bytes_tokenizer()
    tokenizer.save_pretrained(folder)
    wanted = [tokenizer.convert_tokens_to_ids(name) for name in ("<0x0A>", "<0xF0>", "a")]
    llm = LLM(str(folder), "none", dtype="float32")
    params = SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=5,
        ignore_eos=True,
        logit_bias=dict.fromkeys(wanted, 100.0),
    )
    generations = llm.generate(["a", "b", "the"], params)
    texts = [one.completions[0].text for one in generations]
    assert all(LOST in text and "\n" in text and "a" in text for text in texts)
    pieces: dict[int, str] = {}
    for chunk in llm.generate(["a", "b", "the"], params, stream=True):
        pieces[chunk.prompt_index] = pieces.get(chunk.prompt_index, "") + chunk.text
    assert [pieces[index] for index in range(3)] == texts

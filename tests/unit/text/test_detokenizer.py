import json

import pytest

from blockdraft.core.errors import ModelError, RequestError
from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.tokenizer import load_tokenizer
from tests.tiny import edit_json, tiny_target_folder, tiny_tokenizer

TEXTS = ["héllo, the abc!!", "日本語 and 😀😀", "a\n b\t\tc ", "\N{REPLACEMENT CHARACTER} real", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_target_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def ids_of(tokenizer, text):
    return tokenizer.encode(text) if text else []


def run(detokenizer, token_ids):
    """The pieces read after each token, and the index of the token that stopped, if any."""
    pieces = []
    for index, token_id in enumerate(token_ids):
        stopped = detokenizer.push(token_id)
        pieces.append(detokenizer.read())
        if stopped:
            return pieces, index
    detokenizer.close()
    pieces.append(detokenizer.read())
    return pieces, None


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pieces, _ = run(detokenizer, ids_of(tokenizer, text))
    assert "".join(pieces) == detokenizer.text == text


def test_no_piece_ends_inside_a_character(tokenizer):
    pieces, _ = run(Detokenizer(tokenizer), tokenizer.encode("日😀é"))
    assert [piece for piece in pieces if piece] == ["日", "😀", "é"]


def test_an_unfinished_character_shows_at_the_end_only(tokenizer):
    token_ids = tokenizer.encode("x😀")[:-1]
    detokenizer = Detokenizer(tokenizer)
    pieces, _ = run(detokenizer, token_ids)
    assert pieces[0] == "x"
    assert not any(pieces[1:-1])
    assert detokenizer.text == tokenizer.decode(token_ids)
    assert detokenizer.text.startswith("x\N{REPLACEMENT CHARACTER}")
    stopped = Detokenizer(tokenizer, stop=("\N{REPLACEMENT CHARACTER}",))
    assert run(stopped, token_ids) == (pieces, None)


def test_special_tokens_have_no_text(tokenizer):
    backend = tiny_tokenizer()
    special = backend.convert_tokens_to_ids("<|start|>")
    text = Detokenizer(tokenizer)
    run(text, [special, *tokenizer.encode("the"), special, *tokenizer.encode("abc")])
    assert text.text == "theabc"


def test_a_stop_token_has_no_text(tokenizer):
    (token_id,) = tokenizer.encode("the")
    detokenizer = Detokenizer(tokenizer, stop_ids=frozenset([token_id]))
    run(detokenizer, [*tokenizer.encode("abc"), token_id])
    assert detokenizer.text == "abc"


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one two three", ("two",), "one "),
        ("say abc now", ("b",), "say a"),  # inside the token "abc"
        ("xx!!!! yy", ("!!!",), "xx"),
        ("the end", ("nd", "e"), "th"),  # several: the one that is complete first
        ("aab", ("ab", "aab"), ""),  # both with one token: the one that begins first
        ("日本語です", ("語",), "日本"),
        ("no such", ("zzz",), "no such"),
        ("ends on a pre", ("prefix",), "ends on a pre"),
        ("ananas", ("nas",), "ana"),
        ("日本 \ufffd 😀", ("\ufffd",), "日本 "),  # halves of characters are none
    ],
)
def test_text_is_cut_before_a_stop_string(tokenizer, text, stop, kept):
    detokenizer = Detokenizer(tokenizer, stop=stop)
    pieces, index = run(detokenizer, tokenizer.encode(text))
    assert detokenizer.text == "".join(pieces) == kept
    assert (index is not None) == (kept != text)


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer):
    detokenizer = Detokenizer(tokenizer, stop=("Q: end",))
    pieces, _ = run(detokenizer, tokenizer.encode("A Q: enough"))
    assert pieces[:9] == ["A", " ", "", "", "", "", "", "Q: eno", "u"]


@pytest.mark.parametrize("stop", [(), ("zzz",), ("c",), ("b",), ("🙂", "nd")])
@pytest.mark.parametrize("text", ["the abc and 日本😀!! abc", "a\n b\t\tc ", "bb", "😀"])
def test_the_texts_of_tokens_join_to_the_text_and_wait_until_they_are_final(tokenizer, text, stop):
    detokenizer, read, texts = Detokenizer(tokenizer, stop=stop), "", []
    token_ids = tokenizer.encode(text)
    for index, token_id in enumerate(token_ids):
        is_last = detokenizer.push(token_id) or index == len(token_ids) - 1
        if is_last:
            detokenizer.close()
        read += detokenizer.read()
        found = detokenizer.token_texts(len(texts), index + 1)
        if found is not None:
            texts += found
            assert "".join(texts) == read
        if is_last:
            break
    assert len(texts) == index + 1
    assert "".join(texts) == detokenizer.text


def test_a_character_counts_for_its_last_token(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode("x😀y")
    for token_id in token_ids:
        detokenizer.push(token_id)
    detokenizer.close()
    detokenizer.read()
    texts = detokenizer.token_texts(0, len(token_ids))
    assert texts == ("x", *[""] * (len(token_ids) - 3), "😀", "y")


def test_stop_strings_wait_for_min_tokens(tokenizer):
    token_ids = tokenizer.encode("xyxyxy")
    detokenizer = Detokenizer(tokenizer, stop=("xy",), min_tokens=3)
    _, index = run(detokenizer, token_ids)
    assert index == 3
    assert detokenizer.text == "xy"


def test_a_prompt_gives_no_text_even_if_it_ends_inside_a_character(tokenizer):
    token_ids = tokenizer.encode("x😀 y")
    for cut in range(1, len(token_ids)):
        detokenizer = Detokenizer(tokenizer, prompt_ids=token_ids[:cut])
        run(detokenizer, token_ids[cut:])
        assert "x" not in detokenizer.text
        assert detokenizer.text.endswith("y")


def test_every_eos_id_of_the_folder_ends_an_answer(tmp_path):
    folder = tiny_target_folder(tmp_path)
    own = load_tokenizer(folder).eos_ids
    edit_json(folder / "generation_config.json", eos_token_id=[3, 5])
    assert load_tokenizer(folder).eos_ids == own | {3, 5}
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert load_tokenizer(folder).eos_ids == own | {7}
    edit_json(folder / "config.json", eos_token_id=0)
    assert load_tokenizer(folder).eos_ids == own | {0}
    edit_json(folder / "config.json", eos_token_id=None, text_config=None)
    assert load_tokenizer(folder).eos_ids == own


def test_a_broken_tokenizer_is_a_model_error(tmp_path):
    folder = tiny_target_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_tokenizer(folder)


def test_what_a_tokenizer_lacks_is_said(tmp_path):
    folder = tiny_target_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    own = {"AutoTokenizer": ["own.Own", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map=own)
    with pytest.raises(ModelError, match=r"needs custom code.* give --trust-remote-code"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r", which has no tokenizer.json: .*; copy the tokenizer"):
        load_tokenizer(folder)
    # As Kimi-K2.5 is published; from it transformers makes a tokenizer that splits otherwise.
    (folder / "tiktoken.model").write_text("YQ== 0\n", encoding="utf-8")
    with pytest.raises(ModelError, match=r"does not say how texts are split"):
        load_tokenizer(folder)


def test_a_chat_template_beside_the_processor_is_read(tmp_path):
    folder = tiny_target_folder(tmp_path)
    question = [{"role": "user", "content": "abc"}]
    expected = load_tokenizer(folder).encode_chat(question)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    path = folder / "chat_template.json"
    path.write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    assert load_tokenizer(folder).encode_chat(question) == expected
    for damaged in ("[]", "{", '{"chat_template": [1]}'):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(ModelError, match=r"chat_template\.json"):
            load_tokenizer(folder)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": " "}],
        [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
        [{"role": "user"}],
        ["hi"],
        [{"role": 1, "content": ""}],
    ],
)
def test_bad_conversations_are_refused(tokenizer, messages):
    with pytest.raises(RequestError):
        tokenizer.encode_chat(messages)


def test_without_a_chat_template_each_way_to_continue_a_text_is_named(tmp_path):
    folder = tiny_target_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match=r"\(--raw, LLM.generate, /v1/completions\)"):
        load_tokenizer(folder).encode_chat([{"role": "user", "content": "abc"}])


def test_one_turn_of_several_may_be_empty(tokenizer):
    """As other servers have it, whose clients send a turn without text now and then."""
    question = {"role": "user", "content": "abc"}
    for empty in ("", " "):
        turn = {"role": "user", "content": empty}
        assert len(tokenizer.encode_chat([turn, question])) > len(tokenizer.encode_chat([question]))
        assert tokenizer.encode_chat([{"role": "system", "content": "abc"}, turn])


def test_text_that_is_not_unicode_is_refused(tokenizer):
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("a\udcff")

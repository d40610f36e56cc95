"""What a grammar allows after given tokens, and what is refused, before anything runs."""

import gc
import json
import random
import re
from threading import current_thread

import numpy as np
import pytest
from llguidance import LLParserLimits

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar, check_numbers
from blockdraft.core.request import SamplingParams
from blockdraft.text.grammar import MAX_COMPILED, Grammars
from blockdraft.text.tokenizer import Tokenizer
from tests.grammars import accepts
from tests.grammars import grammars as grammars
from tests.grammars import tokenizer as tokenizer
from tests.schemas import SCHEMAS
from tests.tiny import TEXT_VOCAB_SIZE, tiny_tokenizer

LARK = 'start: "if " name (" and " name)*\nname: /[a-c]{1,3}/'
GRAMMARS = {
    "object": Grammar.json_object(),
    "schema": Grammar.json_schema(SCHEMAS["nested"]),
    "regex": Grammar.regex(r"(abc|[0-9]{2}) (the|é)+"),
    "choice": Grammar.choice(["abc", "abcabc", 'the "end"\n', "é"]),
    "lark": Grammar.lark(LARK),
}


def allowed_ids(state, output, ahead=()):
    mask = state.allowed(list(output), list(ahead))
    return None if mask is None else np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (GRAMMARS["object"], ['{"a": [1, null]}', "{}", '{\n  "a": {}\n}'], ["[]", "{} ", " {}"]),
        (GRAMMARS["schema"], ['{"who":{"first":"a","last":"b"},"at":{"x":1,"y":2}}'], ["{}"]),
        (GRAMMARS["regex"], ["abc the", "42 éthe"], ["abc", "xabc the"]),
        (GRAMMARS["choice"], ["abc", "abcabc", 'the "end"\n', "é"], ["ab", "abcab", "abc "]),
        (GRAMMARS["lark"], ["if a", "if abc and b"], ["if", "if d"]),
        (Grammar.choice(["a|b", "[a]", "\\"]), ["a|b", "[a]", "\\"], ["a", "b"]),
        (Grammar.choice([f"abc {i}" for i in range(2500)]), ["abc 7", "abc 70"], ["abc ", "abc x"]),
        (Grammar.regex("a*"), ["", "aaa"], ["b"]),
        (Grammar.lark('root ::= "a" digit+ | "b"\ndigit ::= [0-9]'), ["a12", "b"], ["a", "ab"]),
        (Grammar.lark('start: "::=" "a"'), ["::=a"], ["a"]),
        (
            Grammar.lark(
                'start: "<" @word ">" | @object',
                word=Grammar.lark("start: A @tail\nA: /a+/", tail=Grammar.choice(["!", "?"])),
                object=Grammar.json_schema({"const": {"x": 1}}),
            ),
            ["<a!>", "<aa?>", '{"x": 1}'],
            ["a!", "<a>", '<{"x": 1}>', '{"x":  1}'],
        ),
    ],
)  # fmt: skip
def test_what_a_grammar_accepts(grammars, tokenizer, grammar, good, bad):
    assert all(accepts(grammars, tokenizer, grammar, text) for text in good)
    assert not any(accepts(grammars, tokenizer, grammar, text) for text in bad)


def test_white_space_in_json_has_an_end(grammars, tokenizer):
    assert accepts(grammars, tokenizer, GRAMMARS["object"], '{"a": 1,\n        "b": 2}')
    assert not accepts(grammars, tokenizer, GRAMMARS["object"], '{"a":  1}')
    assert not accepts(grammars, tokenizer, GRAMMARS["object"], '{\n\n"a": 1}')
    assert not accepts(grammars, tokenizer, GRAMMARS["object"], "{\n" + 21 * " " + '"a": 1}')
    wide = {"type": "object", "x-guidance": {"whitespace_pattern": " {2}"}}
    assert accepts(grammars, tokenizer, Grammar.json_schema(wide), '{"a":  1}')


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_mask_depends_on_the_tokens_alone(grammars, name):
    """However the parser was led astray, a fresh one says the same."""
    draw = random.Random(name)
    for _ in range(6):
        state, output = grammars.start(GRAMMARS[name]), []
        for _ in range(30):
            guesses = []
            for _ in range(draw.randint(0, 5)):
                ids = allowed_ids(state, output, guesses)
                assert ids == allowed_ids(grammars.start(GRAMMARS[name]), output, guesses)
                wild = ids is None or draw.random() < 0.2
                guesses.append(draw.randrange(TEXT_VOCAB_SIZE) if wild else draw.choice(ids))
            ids = allowed_ids(state, output)
            assert ids == allowed_ids(grammars.start(GRAMMARS[name]), output)
            ids = [i for i in ids if i not in grammars._tokenizer.eos_ids]
            if not ids:
                break
            # Sometimes what was guessed comes true, and several tokens are committed at once.
            output.append(draw.choice(ids))
            while draw.random() < 0.4 and (more := allowed_ids(state, output)):
                if more[0] in grammars._tokenizer.eos_ids:
                    break
                output.append(more[0])


def test_behind_the_end_and_outside_of_the_grammar_nothing_is_said(grammars, tokenizer):
    state = grammars.start(Grammar.choice(["abc"]))
    (eos_id,) = tokenizer.eos_ids
    abc, wrong = tokenizer.encode("abc"), tokenizer.encode("!")
    assert allowed_ids(state, [], abc) == [eos_id]
    assert allowed_ids(state, [], wrong) is None
    assert allowed_ids(state, [], [*abc, *wrong]) is None
    assert allowed_ids(state, [], [*abc, eos_id, *abc]) is None
    assert allowed_ids(state, abc) == [eos_id]


def test_ids_without_a_token_and_special_tokens_are_never_allowed(tokenizer):
    special = {tokenizer.backend.token_to_id(text) for text in ("<|start|>", "<|mask|>")}
    for vocab_size in (TEXT_VOCAB_SIZE, 300, 1000):
        mask = Grammars(tokenizer, vocab_size).start(Grammar.regex("(?s).*")).allowed([], [])
        assert mask.shape == (vocab_size,)
        ids = set(np.flatnonzero(mask).tolist())
        assert max(ids) < tokenizer.backend.get_vocab_size()
        assert not ids & special
    assert Grammars(tokenizer, 100).start(Grammar.regex("a")).allowed([], []).shape == (100,)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "foo"}), "Invalid type: foo"),
        (Grammar.json_schema({"type": "string", "format": "zzz"}), "Unknown format: zzz"),
        (Grammar.json_schema({"not": {"type": "string"}}), "not"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"$ref": "https://example.com/a.json"}), "retrieving it failed"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (Grammar.json_schema('{"x-guidance": {"bogus": 1}}'), "bogus"),
        (Grammar.regex("("), "unclosed group"),
        (Grammar.regex("a(?=b)"), "look-around"),
        (Grammar.lark('start: "a" b'), "unknown name"),
        (Grammar.lark('begin: "a"'), "no start rule"),
    ],
)
def test_what_llguidance_refuses_is_refused_by_name(grammars, grammar, reason):
    with pytest.raises(RequestError, match=reason) as refused:
        grammars.compile(grammar)
    assert grammar.source[:20] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.json_schema("{"), "not valid JSON"),
        (lambda: Grammar.json_schema("[1]"), "give a JSON object"),
        (lambda: Grammar.json_schema({"a": float("nan")}), "not valid JSON"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "not valid JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "not valid JSON"),
        (lambda: Grammar.regex(""), "is empty"),
        (lambda: Grammar.regex(3), "give text"),
        (lambda: Grammar.regex("\ud800"), "Unicode"),
        (lambda: Grammar.lark(""), "the Lark grammar is empty"),
        (lambda: Grammar.choice([]), "is empty"),
        (lambda: Grammar.choice("yes"), "^the choice is 'yes'; give a list of texts$"),
        (lambda: Grammar.choice({"yes": 1}), "give a list of texts"),
        (lambda: Grammar.choice(None), "^the choice is None; give a list of texts$"),
        (lambda: Grammar.choice(["a", ""]), "not empty"),
        (lambda: Grammar.choice(["a", 3]), "holds 3"),
        (lambda: Grammar("xml", "<a/>"), "one of json_schema"),
        (lambda: SamplingParams(grammar="abc"), "give a Grammar"),
        (lambda: SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True), "ignore_eos"),
    ],
)
def test_what_is_no_grammar_is_refused_when_it_is_made(make, reason):
    with pytest.raises(RequestError, match=reason):
        make()


def test_a_target_that_never_ends_an_answer_takes_no_grammar():
    tokenizer = Tokenizer(tiny_tokenizer(), [])
    with pytest.raises(RequestError, match="no token that ends an answer"):
        Grammars(tokenizer, TEXT_VOCAB_SIZE).compile(Grammar.regex("a"))


def test_a_grammar_that_the_vocabulary_cannot_write_is_refused(tokenizer):
    """With 60 ids this target has no letters."""
    with pytest.raises(RequestError, match="vocabulary"):
        Grammars(tokenizer, 60).compile(Grammar.regex("abc"))
    state = Grammars(tokenizer, 60).start(Grammar.regex("!a"))
    with pytest.raises(RequestError, match="continues the grammar"):
        state.allowed(tokenizer.encode("!"), [])


@pytest.mark.parametrize("limit", [{"max_items_in_row": 60}, {"step_max_items": 90}])
def test_too_complex_a_grammar_fails_when_it_gets_there_and_nowhere_else(
    tokenizer, monkeypatch, limit
):
    """Also after a guess that led there."""
    monkeypatch.setattr("blockdraft.text.grammar._LIMITS", _limits(**limit))
    own = Grammars(tokenizer, TEXT_VOCAB_SIZE)
    grammar = Grammar.lark('start: x\nx: x x | "!"')
    state, ids = own.start(grammar), 40 * tokenizer.encode("!")[:1]
    lengths = [n for n in range(40) if not _fails(own.start(grammar), ids[:n])]
    assert lengths == list(range(len(lengths)))
    assert 3 < len(lengths) < 40
    with pytest.raises(RequestError, match="cannot be followed"):
        state.allowed([], ids)
    for n in lengths:
        assert allowed_ids(state, ids[:n]) == allowed_ids(own.start(grammar), ids[:n])


def test_what_other_sequences_have_met_does_not_count(tokenizer, monkeypatch):
    """The lexer's states are limited for all copies together: enough for a few of these answers."""
    monkeypatch.setattr("blockdraft.text.grammar._LIMITS", _limits(max_lexer_states=100))
    own, draw, renewed = Grammars(tokenizer, TEXT_VOCAB_SIZE), random.Random(1), 0
    grammar = Grammar.regex("|".join(f"{letter}{{20}}" for letter in "defghijklmnopqrsuvwxyz"))
    compiled = own.compile(grammar)
    for _ in range(30):
        state, output, before = own.start(grammar), [], compiled._matcher
        while (ids := allowed_ids(state, output)) and ids[0] not in tokenizer.eos_ids:
            output.append(draw.choice(ids))
        assert len(output) == 20
        renewed += compiled._matcher is not before
    assert 1 <= renewed < 30


def test_a_grammar_that_takes_long_is_not_compiled_while_all_wait(tokenizer, monkeypatch):
    """Its own sequence fails; it is renewed in the background, for those that come later."""
    monkeypatch.setattr("blockdraft.text.grammar._LIMITS", _limits(max_lexer_states=100))
    own, draw, threads = Grammars(tokenizer, TEXT_VOCAB_SIZE), random.Random(1), []
    grammar = Grammar.regex("|".join(f"{letter}{{20}}" for letter in "defghijklmnopqrsuvwxyz"))
    compiled = own.compile(grammar)
    real, before = compiled._renew, compiled._matcher
    compiled._seconds = 2.0
    monkeypatch.setattr(compiled, "_renew", lambda: threads.append(current_thread()) or real())

    def follow(times=1):
        for _ in range(times):
            state, output = own.start(grammar), []
            while (ids := allowed_ids(state, output)) and ids[0] not in tokenizer.eos_ids:
                output.append(draw.choice(ids))

    with pytest.raises(RequestError, match="cannot be followed"):
        follow(30)
    compiled._renewing.join()
    assert compiled._matcher is not before
    assert current_thread() not in threads
    follow()


def test_a_grammar_is_not_renewed_where_that_does_not_help(tokenizer, monkeypatch):
    monkeypatch.setattr("blockdraft.text.grammar._LIMITS", _limits(max_items_in_row=60))
    own = Grammars(tokenizer, TEXT_VOCAB_SIZE)
    grammar = Grammar.lark('start: x\nx: x x | "!"')
    before = own.compile(grammar)._matcher
    with pytest.raises(RequestError, match="cannot be followed"):
        own.start(grammar).allowed([], 40 * tokenizer.encode("!")[:1])
    assert own.compile(grammar)._matcher is before


def _limits(**limits):
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, **limits)


def _fails(state, ids):
    try:
        state.allowed(ids, [])
    except RequestError:
        return True
    return False


def test_compiled_grammars_are_kept_up_to_a_bound(grammars, tokenizer):
    own = Grammars(tokenizer, TEXT_VOCAB_SIZE)
    for number in range(MAX_COMPILED + 10):
        own.compile(Grammar.json_schema(json.dumps({"const": number})))
    own.compile(Grammar.json_schema(json.dumps({"const": MAX_COMPILED})))
    info = own._recent.cache_info()
    assert (info.hits, info.currsize) == (1, MAX_COMPILED)
    gc.collect()
    assert len(own._alive) == MAX_COMPILED


def test_a_grammar_that_somebody_holds_is_not_compiled_again(tokenizer):
    own = Grammars(tokenizer, TEXT_VOCAB_SIZE)
    grammar = Grammar.json_schema({"const": "held"})
    assert own.find(grammar) is None
    held = own.compile(grammar)
    for number in range(MAX_COMPILED + 1):
        own.compile(Grammar.json_schema({"const": number}))
    assert own.find(grammar) is held
    assert own.start(grammar)._compiled is held


@pytest.mark.parametrize("name", GRAMMARS)
def test_tokens_ahead_are_allowed_as_far_as_the_masks_say(grammars, tokenizer, name):
    draw, state, output = random.Random(3), grammars.start(GRAMMARS[name]), []
    for _ in range(12):
        ahead: list[int] = []
        ids = set(allowed_ids(state, output)) - tokenizer.eos_ids
        while len(ahead) < 5 and ids:
            ahead.append(draw.choice(sorted(ids)))
            ids = set(allowed_ids(state, output, ahead)) - tokenizer.eos_ids
        num = len(ahead)
        wrong = next(i for i in range(TEXT_VOCAB_SIZE) if i not in ids)
        assert state.num_allowed(output, ahead) == num
        assert state.num_allowed(output, [*ahead, wrong, *ahead]) == num
        # The parser has not lost its place.
        assert allowed_ids(state, output) == allowed_ids(grammars.start(GRAMMARS[name]), output)
        if not ahead:
            return
        output.append(ahead[0])


COSTLY = Grammar.lark("start: X\nX: ~/(.*ab.*)|(.*c.{0,61}d.*)/")


def num_walked(grammars, tokenizer, seed):
    """Tokens of a random path through COSTLY, at most 80, until the parser gives up."""
    letters = [tokenizer.encode(letter)[0] for letter in "abcd"]
    state, draw, output = grammars.start(COSTLY), random.Random(seed), []
    while len(output) < 80:
        try:
            mask = state.allowed(output, [])
        except RequestError:
            break
        output.append(draw.choice([token_id for token_id in letters if mask[token_id]]))
    return len(output)


def test_a_path_that_is_too_costly_ends_no_other(tokenizer, monkeypatch):
    """The lexer's states are shared: what one request has met must not refuse another."""
    few = LLParserLimits(step_lexer_fuel=6000, verbose_errors=False)
    monkeypatch.setattr("blockdraft.text.grammar._LIMITS", few)
    alone = [num_walked(Grammars(tokenizer, TEXT_VOCAB_SIZE), tokenizer, seed) for seed in range(8)]
    shared = Grammars(tokenizer, TEXT_VOCAB_SIZE)
    together = [num_walked(shared, tokenizer, seed) for seed in range(8)]
    assert min(alone) < 80
    assert [num == 80 for num in together] == [num == 80 for num in alone]
    assert max(together) == 80


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.choice(["<|im_end|>"]),
        Grammar.regex("a(b|<[|]im_end[|]>)|<|im_end|>"),
        Grammar.regex(re.escape("x <|im_end|>")),
        Grammar.json_schema({"type": "string", "pattern": r"<\|im_end\|>"}),
        Grammar.json_schema({"const": {"a": "<|im_end|>"}}),
        Grammar.json_schema({"properties": {"<|im_end|>": True}}),
        Grammar.lark("start: @part", part=Grammar.choice(["x <|im_end|>"])),
    ],
)
def test_text_that_is_a_special_token_is_refused(grammar):
    inner = tiny_tokenizer()
    inner.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    grammars = Grammars(Tokenizer(inner, [inner.eos_token_id]), TEXT_VOCAB_SIZE)
    with pytest.raises(RequestError, match="is a special token of the target"):
        grammars.compile(grammar)
    assert grammars.compile(Grammar.json_schema({"description": "ends with <|im_end|>"}))


def test_a_grammar_that_the_output_has_left_is_not_followed(grammars, tokenizer):
    state = grammars.start(Grammar.choice(["abc"]))
    assert state.allowed([], tokenizer.encode("x")) is None  # a draft may be wrong
    with pytest.raises(RequestError, match="cannot be followed further"):
        state.allowed(tokenizer.encode("x"), [])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.lark('start: foo "!"\nfoo[stop="e"]: /[a-z ]+/'), "stop= is not supported"),
        (Grammar.lark("start: foo\nfoo[max_tokens=2]: /[a-z]+/"), "max_tokens= is not supported"),
        (Grammar.lark("start: foo\nfoo[temperature=0.1]: /a/"), "temperature= is not supported"),
    ],
)
def test_what_cannot_be_taken_back_or_is_not_obeyed_is_refused(grammars, grammar, words):
    with pytest.raises(RequestError, match=words):
        grammars.compile(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": ["a", -(2**60)]},
        {"properties": {"id": {"minimum": 2**60, "maximum": 2**61}}},
        {"const": {"ids": [10**20]}},
    ],
)
def test_integers_that_would_be_rounded_are_refused(schema):
    with pytest.raises(RequestError, match="would be rounded; give it as a string"):
        Grammar.json_schema(schema)
    with pytest.raises(RequestError, match="would be rounded; give it as a string"):
        Grammar.lark(f"start: %json {json.dumps(schema)}")
    assert Grammar.json_schema({"const": 2**53, "default": 10**30, "maxLength": 3})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9_999_991},
        {"properties": {"price": {"type": "number", "multipleOf": 999.983}}},
        {"anyOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83)]},
        {
            "properties": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 9967}},
            "items": {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/b"}]},
        },
    ],
)
def test_multiples_that_take_gigabytes_to_compile_are_refused(schema):
    with pytest.raises(RequestError, match="at most 20000 is supported; leave multipleOf out"):
        Grammar.json_schema(schema)


def test_a_schema_deeper_than_it_can_be_checked_is_refused():
    nested: dict[str, object] = {}
    for _ in range(10_000):
        nested = {"not": nested}
    with pytest.raises(RequestError, match="nested too deeply"):
        check_numbers(nested)


def test_multiples_that_take_gigabytes_are_refused_in_a_lark_rule_too():
    schema = r'{"type": "integer", "\u006dultipleOf": 9999991}'
    with pytest.raises(RequestError, match="at most 20000"):
        Grammar.lark(f'start: "n" %json {schema}')
    assert Grammar.lark('start: "%json" /%json {/ // %json'), "no schema follows"


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"anyOf": [{"multipleOf": n} for n in (0.01, 7, 100, 10**9, 86400)]}},
        {"properties": {str(n): {"items": {"multipleOf": n}} for n in (9973, 9967)}},
        {"properties": {"multipleOf": {"const": {"multipleOf": 99_991}}}},
        {"multipleOf": 0},
    ],
)
def test_other_multiples_are_left_to_the_compiler(schema):
    assert Grammar.json_schema(schema)


def test_a_refusal_does_not_show_the_stack_of_a_panic(grammars, monkeypatch):
    def panic(_: Grammar) -> str:
        raise ValueError("panic: too large <backtrace> 1: /home/somebody/python")

    monkeypatch.setattr("blockdraft.text.grammar._llguidance_source", panic)
    with pytest.raises(RequestError, match=r"cannot be used: panic: too large$"):
        grammars.compile(Grammar.regex("a{7}"))


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 0.0, "exclusiveMaximum": 1e-3},
        {"exclusiveMinimum": 1, "exclusiveMaximum": 1.5},
        {"allOf": [{"exclusiveMinimum": 0}, {"allOf": [{"maximum": 0.5}, True]}]},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"minimum": -1.5, "exclusiveMaximum": -1},
    ],
)
def test_bounds_that_would_be_allowed_though_they_are_excluded_are_refused(bounds):
    with pytest.raises(RequestError, match=r"excludes -?[01], but it would be allowed"):
        Grammar.json_schema({"properties": {"rate": {"type": "number", **bounds}}})
    assert Grammar.json_schema({"const": bounds})


@pytest.mark.parametrize("low", [-2, -1.5, -1, -0.25, 0, 0.1, 0.5, 1, 1.95, 12])
@pytest.mark.parametrize("high", [-1.5, -1, -0.25, 0, 0.1, 0.5, 1, 1.95, 2, 12.3, 100])
def test_an_excluded_bound_is_never_allowed(grammars, tokenizer, low, high):
    if low >= high:
        return
    for names in (
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("exclusiveMinimum", "maximum"),
        ("minimum", "exclusiveMaximum"),
    ):
        bounds = dict(zip(names, (low, high), strict=True))
        try:
            grammar = Grammar.json_schema({"type": "number", **bounds})
        except RequestError:
            assert high < low + 1
            continue
        for text in (str(bounds[name]) for name in names if name.startswith("exclusive")):
            assert not accepts(grammars, tokenizer, grammar, text)
            assert text != "0" or not accepts(grammars, tokenizer, grammar, "-0")

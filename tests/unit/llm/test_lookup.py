"""Lookup as users load it: beside a drafter, alone, shared, and chosen by a request."""

import json

import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError, RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.speculate.merge import sources_of
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.sources import num_accepted_by, num_drafted_by

PROMPTS = ["the abc the abc the abc", "é€ a b c d e f g a b c"]


@pytest.fixture(scope="module")
def plain(folders):
    llm = load_llm(folders)
    return lambda asked: [
        llm.generate(prompt, params(num_draft_tokens=0, **asked)).completions[0].token_ids
        for prompt in PROMPTS
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("asked", [{"max_tokens": 60}, {"max_tokens": 60, "temperature": 0.5}])
@pytest.mark.parametrize(
    "options",
    [{}, {"adaptive": True}, {"num_draft_tokens": 20}, {"shared_lookup": 500}, {"ngrams": False}],
    ids=str,
)
def test_lookup_beside_a_drafter_changes_no_answer(folders, plain, options, asked):
    asked = {**asked, "seed": 3}
    llm = load_llm(folders, lookup=True, **options)
    for _ in range(2):  # the second time there is something to share
        found = [one.completions[0] for one in llm.generate(PROMPTS, params(**asked))]
        assert [one.token_ids for one in found] == plain(asked)
    if not options.get("adaptive"):  # which verifies what pays on this machine
        # With many candidates n-grams of the text name the same tokens, and are more sure of them.
        kinds = ("lookup", "ngram") if "num_draft_tokens" in options else ("lookup",)
        assert sum(num_drafted_by(one.acceptance, kind) for one in found for kind in kinds) > 0
    assert llm.engine.proposer.failures.num_failures == 0
    assert_nothing_left(llm)


@pytest.mark.parametrize(("ngrams", "kinds"), [(False, {"lookup"}), (True, {"lookup", "ngram"})])
def test_lookup_without_a_drafter(folders, plain, ngrams, kinds):
    llm = LLM(str(folders[0]), "none", dtype="float32", lookup=True, ngrams=ngrams)
    asked = {"max_tokens": 80}
    found = [one.completions[0] for one in llm.generate(PROMPTS, params(**asked))]
    assert [one.token_ids for one in found] == plain(asked)
    drafted_by = {source for one in found for source in one.acceptance.drafted_by}
    assert {kind for source in drafted_by for kind in sources_of(source)} == kinds
    llm.use_fixed_drafting(0)
    (off,) = llm.generate(PROMPTS[0], params(**asked)).completions
    assert off.acceptance.num_drafted == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "prediction lookup ngram dflash"),
        ({"lookup": False}, "prediction dflash"),  # whose drafter has no table
        ({"ngrams": False}, "prediction lookup dflash"),
        ({"drafter": "none"}, "prediction none"),
        ({"drafter": "none", "lookup": True}, "prediction lookup ngram none"),
    ],
    ids=str,
)
def test_lookup_drafts_beside_a_drafter_unless_told_otherwise(folders, options, expected):
    target, drafter = map(str, folders)
    llm = LLM(target, **{"drafter": drafter, "dtype": "float32", **options})
    assert " ".join(one.kind for one in llm.engine.proposer.drafters) == expected


def test_a_request_chooses_its_drafters(folders):
    llm = load_llm(folders, lookup=True)
    for drafters, expected in [((), set()), (("lookup",), {"lookup"}), (("dflash",), {"dflash"})]:
        (found,) = llm.generate(PROMPTS[0], params(max_tokens=60, drafters=drafters)).completions
        assert set(found.acceptance.drafted_by) <= expected
        assert bool(found.acceptance.drafted_by) == bool(expected)
    with pytest.raises(
        RequestError, match="names 'eagle', but only these are loaded: prediction, l"
    ):
        llm.generate(PROMPTS[0], SamplingParams(drafters=("eagle",)))
    for wrong in ("lookup", [1], 5):
        with pytest.raises(RequestError, match="drafters"):
            SamplingParams(drafters=wrong)


def test_a_grammar_is_asked_before_tokens_are_proposed(folders):
    """A prediction that leaves the grammar is drafted up to there."""
    grammar = Grammar.choice(["the abc the abc"])
    llm = LLM(str(folders[0]), "none", dtype="float32")
    for prediction in ("the abc the abc", "the abc the zzz"):
        asked = SamplingParams(max_tokens=30, grammar=grammar, prediction=prediction)
        (found,) = llm.generate("a", asked).completions
        assert found.text == "the abc the abc"
        stats = found.acceptance
        assert num_drafted_by(stats, "prediction") == num_accepted_by(stats, "prediction") > 0


def test_shared_lookup_needs_lookup():
    assert LLMConfig(shared_lookup=100).shared_lookup == 100
    for off in ({"lookup": False}, {"drafter": "none"}, {"num_draft_tokens": 0}):
        with pytest.raises(ConfigError, match="shared_lookup is 100, but lookup is off"):
            LLMConfig(shared_lookup=100, **off)
    with pytest.raises(ConfigError, match="give a number of tokens"):
        LLMConfig(lookup=True, shared_lookup=-1)


def test_what_was_drafted_by_whom_is_told_in_json(folders):
    llm = load_llm(folders, lookup=True, ngrams=False)
    (found,) = llm.generate(PROMPTS[0], params(max_tokens=60)).completions
    told = json.loads(json.dumps(found.acceptance.to_dict()))["per_source"]
    assert set(told) <= {"dflash", "lookup", "dflash+lookup", "lookup+dflash"}
    assert sum(one["num_drafted"] for one in told.values()) == found.acceptance.num_drafted

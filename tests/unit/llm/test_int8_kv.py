"""An LLM whose target keeps keys and values in int8."""

import pytest

from blockdraft.core.errors import ConfigError
from tests.small_llm import assert_nothing_left, load_llm, params, without_pages


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 20}], ids=["chains", "trees"])
def test_an_llm_drafts_without_changing_an_answer(folders, options) -> None:
    prompts = ["the abc the abc the abc", "a b c d e f g a b c", "xyz"]
    llm = load_llm(folders, kv_cache_dtype="int8", **options)
    drafted = [one.completions[0] for one in llm.generate(prompts, params())]
    for prompt, own in zip(prompts, drafted, strict=True):
        expected = llm.generate(prompt, params(num_draft_tokens=0)).completions[0]
        assert own.token_ids == expected.token_ids
        assert own.acceptance.num_drafted > 0
    assert_nothing_left(llm)


def test_more_tokens_fit_the_same_memory(folders) -> None:
    sizes = [
        load_llm(folders, memory=0.002, kv_cache_dtype=dtype).engine.target.memory.num_pages
        for dtype in ("auto", "int8")
    ]
    assert sizes[1] > 1.5 * sizes[0]


def test_a_model_without_pages_is_refused(folders, monkeypatch) -> None:
    monkeypatch.setattr("blockdraft.models.target.paged.layer_shapes", without_pages)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 is for models that run in batches"):
        load_llm(folders, kv_cache_dtype="int8")


def test_an_unknown_type_is_refused(folders) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8'; it must be one of auto, int8"):
        load_llm(folders, kv_cache_dtype="fp8")

"""The default pair explained: every rejection has a cause that its logits bear out."""

import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.bench.workload import BUNDLED
from blockdraft.diagnose.explain.prompts import Question
from blockdraft.diagnose.explain.report import encode_question, explain_all
from tests.command_line import run_json
from tests.explain_sums import check_sums

QUESTION = Question("1", None, "Write a Python function that adds 2 numbers, and explain it.")
NUM_TOKENS = 48
OPTIONS = [
    SamplingParams(max_tokens=NUM_TOKENS),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, repetition_penalty=1.2, seed=1),
]


@pytest.mark.slow
@pytest.mark.model
def test_the_default_pair_is_explained() -> None:
    llm = LLM(adaptive=False)
    for params in OPTIONS:
        asked = encode_question(
            llm.tokenizer, llm.engine.limits.check_prompt, QUESTION, params, raw=False
        )
        (explained,) = explain_all(llm, [asked], params, with_streams=True)
        explanation = explained.explanation
        sums, stats = explanation.sums, explanation.completion.acceptance
        assert not explained.summary.differs
        assert (sums.num_rounds, sums.num_tokens) == (stats.num_passes, stats.num_tokens)
        num_whole = sum(one.num_kept == len(one.drafted_ids) for one in explanation.rounds)
        # The prompt's pass drafts nothing, and so rejects nothing.
        assert sums.total.num_rejected == 1 + sums.num_rounds - num_whole > 0
        assert sums.total.causes["other"] == 0
        assert "code" in explanation.kinds


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_causes_add_up_on_every_kind_of_prompt(temperature: str) -> None:
    sampling = ["--max-tokens", 64, "--temperature", temperature, "--seed", 1]
    report = run_json("explain", "--prompts", BUNDLED, *sampling)
    assert len(report["groups"]) >= 4
    assert all(group["sums"]["num_rejected"] > 0 for group in report["groups"])
    assert check_sums(report) > len(report["prompts"])

"""Negative controls: the checks of a proof, run on an engine with a planted fault.

A control is caught if the same check that the proof relies on finds something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockdraft.llm import LLM
from blockdraft.proof import faults
from blockdraft.proof.cases import Case, why_no_grammar, with_grammar
from blockdraft.proof.context import check_context
from blockdraft.proof.differences import Difference
from blockdraft.proof.faults import Fault
from blockdraft.proof.forced import Noise, judged_differences
from blockdraft.proof.ways import BATCHED, DRAFTED, PLAIN, Way, run

MOST_PROMPT = 256
"""Tokens; a fault shows on short prompts as well."""


@dataclass(frozen=True, slots=True)
class Control:
    """A fault, and the check that must find it.

    sampled: it shows in sampled requests only. exact: without exactness it is no fault.
    in_grammar: it shows in requests with a grammar only. way: what is held against plain decoding.
    """

    name: str
    about: str
    plant: Fault
    check: Literal["outputs", "draft context"] = "outputs"
    sampled: bool = False
    exact: bool = False
    in_grammar: bool = False
    way: Way = DRAFTED


CONTROLS = (
    Control(
        "one token too many",
        "the first rejected draft token is kept",
        faults.accept_one_too_many,
    ),
    Control(
        "wrong rollback",
        "a rejected draft token stays in the KV cache, in place of the target's own token",
        faults.wrong_rollback,
    ),
    Control(
        "shifted features",
        "the drafter gets the features of the neighboring token",
        faults.shifted_features,
        check="draft context",
    ),
    Control(
        "a redraw after a rejection",
        "the choice that rejected a draft token is drawn again",
        faults.redraw_after_rejection,
        sampled=True,
    ),
    Control(
        "attention by neighbors",
        "sums over keys are split by the number of rows",
        faults.attention_by_company,
        exact=True,
    ),
    Control(
        "a grammar after draft tokens",
        "of the tokens that may follow a draft token, only one is allowed",
        faults.one_token_behind_drafts,
        in_grammar=True,
    ),
    Control(
        "different noise after a preemption",
        "a preempted request resumes with another seed",
        faults.new_noise_after_preemption,
        sampled=True,
        way=BATCHED,
    ),
)


@dataclass(frozen=True, slots=True)
class ControlResult:
    """What became of a control: the case on which it was caught, and how. `skipped` says why not.

    An uncaught control makes a proof fail.
    """

    name: str
    about: str
    check: str
    caught: bool = False
    num_cases: int = 0
    evidence: str = ""
    skipped: str | None = None

    @property
    def is_failure(self) -> bool:
        """True if it should have been caught."""
        return not self.caught and self.skipped is None


def run_control(
    llm: LLM, control: Control, cases: Sequence[Case], noise: Noise | None
) -> ControlResult:
    """Plant a fault and look for it, case by case, until it is found.

    noise: of the pair where exactness is off.
    """
    named = control.name, control.about, control.check
    if control.exact and not llm.config.exact:
        return ControlResult(*named, skipped="what it breaks is not guaranteed with exact off")
    if control.check == "draft context" and not llm.engine.drafter.feature_layers:
        return ControlResult(*named, skipped="the drafter reads no features")
    if control.in_grammar and (reason := why_no_grammar(llm)) is not None:
        return ControlResult(*named, skipped=reason)
    number = 0
    for number, case in enumerate(cases, 1):
        evidence = (
            _look_at_context(llm, control, case)
            if control.check == "draft context"
            else _look_at_outputs(llm, control, case, noise)
        )
        if evidence:
            return ControlResult(*named, caught=True, num_cases=number, evidence=evidence)
    return ControlResult(*named, num_cases=number)


def suitable_cases(llm: LLM, control: Control, cases: Sequence[Case], most: int) -> list[Case]:
    """Cases on which a control can show, those that go on longest first."""
    fitting = [
        case
        for case in cases
        if len(case.prompt_ids) <= MOST_PROMPT
        and (case.params.temperature > 0 or not control.sampled)
    ]
    shortest_last = sorted(fitting, key=lambda case: bool(case.params.stop) + case.params.n)
    if control.in_grammar:
        return [with_grammar(llm, case) for case in shortest_last[:most]]
    return [case for case in shortest_last if case.params.grammar is None][:most]


def _look_at_context(llm: LLM, control: Control, case: Case) -> str:
    with control.plant(llm.engine):
        found = check_context(llm.engine, case)
    if found.is_right or not found.num_tokens:
        return ""
    return f"{case.id}: off by {found.deviation:.3g}, at most {found.bound:g} is rounding"


def _look_at_outputs(llm: LLM, control: Control, case: Case, noise: Noise | None) -> str:
    with control.plant(llm.engine):
        plain = run(llm, [case], PLAIN)[case]
        drafted = run(llm, [case], control.way)[case]
    found = judged_differences(llm.engine, case, drafted, plain, noise)
    # An engine that the fault ends shows nothing of the comparison of outputs.
    caught = [one for one in found if one.is_failure and one.verdict != "error"]
    return _described(caught[0]) if caught else ""


def _described(found: Difference) -> str:
    place = "" if found.index is None else f"[{found.index}]"
    return f"{found.case_id}: {found.what}{place} is {found.found!r}, not {found.expected!r}"

"""What a proof decodes: prompts, each with some of the ways to sample."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from blockdraft.core.conversations import as_messages, as_text
from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.core.request import MAX_SEED, SamplingParams
from blockdraft.core.sequence import Constraint
from blockdraft.llm import LLM
from blockdraft.proof.config import LEAST_TOKENS, ProofConfig
from blockdraft.proof.corpus import ProofPrompt
from blockdraft.text.outline import Outline
from blockdraft.text.tokenizer import THINKING_SWITCH, Tokenizer

LIST = Grammar.regex(r"((yes|no|[0-9]{2}), )+")
"""What is allowed changes from token to token: now one, now many."""
_COMMON = range(24, 40)
"""Tokens of an output: most vocabularies have punctuation and digits there."""
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "temperature": {"temperature": 0.7},
        "top-k": {"temperature": 1.0, "top_k": 20},
        "stop": {"stop": (". ", "\n\n", "}", "e s")},
        "grammar": {"temperature": 1.0, "grammar": LIST},
        "top-p": {"temperature": 0.8, "top_p": 0.9},
        "penalties": {
            "repetition_penalty": 1.15,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.2,
        },
        "min-p": {"temperature": 1.2, "min_p": 0.05},
        "logprobs": {
            "logprobs": 5,
            "prompt_logprobs": True,
            "logit_bias": dict.fromkeys(_COMMON, 4.0),
            # What is biased comes again within a block: tokens ahead must count.
            "frequency_penalty": 0.5,
        },
        "samples": {"temperature": 0.9, "n": 3},
        "all filters": {
            "temperature": 1.5,
            "top_k": 50,
            "top_p": 0.95,
            "min_p": 0.02,
            "repetition_penalty": 1.1,
            "min_tokens": LEAST_TOKENS,
            "stop_token_ids": tuple(_COMMON),
        },
        "sampled stop": {"temperature": 0.7, "stop": ("\n", " the ", "a"), "min_tokens": 4},
        "very hot": {"temperature": 3.0, "ignore_eos": True},
    }
)
"""Ways to sample by name; the rest of SamplingParams stays at its defaults."""
STRIDE = 5
"""From one setting of a prompt to its next: coprime to their number, with and without grammars, so
that none comes twice."""
LOGPROBS = 1
"""Asked for with every case: they show differences that the tokens do not."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One request of a proof; its id is unique there. `stop_ids` are the tokens that end it.

    `constrain` makes what its grammar allows in one sample; None without a grammar.
    """

    prompt: ProofPrompt
    prompt_ids: tuple[int, ...]
    setting: str
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    constrain: Callable[[], Constraint | None] = lambda: None

    @property
    def id(self) -> str:
        """Names the case in a certificate."""
        return f"{self.prompt.id}/{self.setting}"

    @property
    def work(self) -> float:
        """About how long a run of it takes, in decoded tokens."""
        return self.params.n * self.params.max_tokens + len(self.prompt_ids) / 8


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases of a proof, and why prompts of the corpus were left out, by their ids."""

    cases: tuple[Case, ...]
    left_out: Mapping[str, str]


def plan_cases(
    llm: LLM, corpus: Sequence[ProofPrompt], own: Sequence[ProofPrompt], config: ProofConfig
) -> Cases:
    """Give every prompt its settings.

    Prompts of the bundled corpus that the target cannot take are left out: its context may be
    small. The user's own are refused.

    Raises:
        RequestError: a prompt of the user's cannot be decoded (names it), two share an id, or
            none is left.
    """
    _check_ids([*corpus, *own])
    names = [name for name in SETTINGS if name != "grammar" or why_no_grammar(llm) is None]
    cases: list[Case] = []
    left_out: dict[str, str] = {}
    for index, prompt in enumerate([*corpus, *own]):
        try:
            ids = encode(llm.tokenizer, prompt)
            found = []
            for i in range(config.num_settings):
                name = names[(index + i * STRIDE) % len(names)]
                params = _params(name, config, index * config.num_settings + i)
                llm.engine.limits.check_prompt(ids, params)
                found.append(_case(llm, prompt, ids, name, params))
        except RequestError as error:
            if index >= len(corpus):
                raise RequestError(f"prompt {prompt.id}: {error}") from error
            left_out[prompt.id] = str(error)
        else:
            cases += found
    if not cases:
        raise RequestError(
            "the target can take no prompt of the corpus; give shorter ones: --prompts"
        )
    return Cases(tuple(cases), MappingProxyType(left_out))


def _check_ids(prompts: Sequence[ProofPrompt]) -> None:
    ids = Counter(prompt.id for prompt in prompts)
    if twice := [prompt_id for prompt_id, count in ids.items() if count > 1]:
        raise RequestError(f"two prompts have the id {twice[0]!r}; give each its own")


def check_own(outline: Outline, own: Sequence[ProofPrompt], config: ProofConfig) -> None:
    """Refuse what `plan_cases` would refuse of the user's own, before weights are read.

    Raises:
        RequestError: a prompt cannot be decoded (names it).
    """
    params = SamplingParams(max_tokens=config.max_tokens)
    for prompt in own:
        try:
            outline.check(encode(outline.tokenizer, prompt), params)
        except RequestError as error:
            raise RequestError(f"prompt {prompt.id}: {error}") from error


def encode(tokenizer: Tokenizer, prompt: ProofPrompt) -> tuple[int, ...]:
    """Token ids of a prompt, in the chat template unless it is raw or there is none."""
    if prompt.raw or not tokenizer.has_chat_template:
        ids = tokenizer.encode(as_text([prompt.text], prompt.system))
    else:
        has_switch = prompt.thinking is not None and tokenizer.has_thinking_switch
        options = {THINKING_SWITCH: prompt.thinking} if has_switch else {}
        ids = tokenizer.encode_chat(as_messages([prompt.text], prompt.system), options)
    return tuple(ids[: prompt.take])


def why_no_grammar(llm: LLM) -> str | None:
    """Why the target cannot follow the grammar of a proof; None if it can."""
    try:
        llm.samples.grammars.compile(LIST)
    except RequestError as error:
        return str(error)
    return None


def with_grammar(llm: LLM, case: Case) -> Case:
    """The same case with the grammar of a proof, which says where the output may end."""
    params = replace(case.params, grammar=LIST, ignore_eos=False)
    return _case(llm, case.prompt, case.prompt_ids, case.setting, params)


def _params(setting: str, config: ProofConfig, number: int) -> SamplingParams:
    """Of the case of that number: were seeds equal, noise of another row would not show."""
    options = {"logprobs": LOGPROBS, **SETTINGS[setting]}
    seed = (config.seed + number) % (MAX_SEED + 1)
    return SamplingParams(max_tokens=config.max_tokens, seed=seed, **options)


def _case(
    llm: LLM, prompt: ProofPrompt, prompt_ids: tuple[int, ...], setting: str, params: SamplingParams
) -> Case:
    stop_ids = params.ending_ids(llm.tokenizer.eos_ids)
    constrain = partial(llm.samples.constraint, params)
    return Case(prompt, prompt_ids, setting, params, stop_ids, constrain)

"""`blockdraft explain`: a run with every round of it, and why drafts were rejected."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.record import recording
from blockdraft.diagnose.explain.round import Round
from blockdraft.diagnose.explain.sums import Sums, sum_rounds
from blockdraft.engine.completion import Completion
from blockdraft.llm import LLM
from blockdraft.text.kinds import Kind, token_kinds
from blockdraft.text.pieces import text_pieces, token_label


@dataclass(frozen=True, slots=True)
class Explanation:
    """One output with its rounds, ready to be shown.

    pieces, kinds: of each output token. labels: a text for every token id that the rounds name.
    """

    prompt: str
    completion: Completion
    pieces: tuple[str, ...]
    kinds: tuple[Kind, ...]
    rounds: tuple[Round, ...]
    labels: dict[int, str]
    sums: Sums

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; rounds name token ids, `labels` their texts."""
        return {
            "prompt": self.prompt,
            "text": self.completion.text,
            "token_ids": list(self.completion.token_ids),
            "finish_reason": self.completion.finish_reason,
            "error": self.completion.error,
            "seed": self.completion.seed,
            "pieces": list(self.pieces),
            "kinds": list(self.kinds),
            "rounds": [asdict(one) for one in self.rounds],
            "labels": {str(i): label for i, label in sorted(self.labels.items())},
            "sums": self.sums.to_dict(),
        }


def check_explains(llm: LLM) -> None:
    """Refuse to explain drafts where there are none.

    Raises:
        ConfigError: there is no drafter, and nothing is looked up.
    """
    if llm.drafter_folder is None and not llm.config.lookup:
        raise ConfigError(
            "nothing is drafted, so there is nothing to explain; name a drafter with --drafter, or "
            "add --lookup"
        )


def explain(
    llm: LLM,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    prompt: str,
    before: str = "",
) -> list[Explanation]:
    """Answer a prompt and keep every round; one Explanation a sample. Nothing else may be running.

    `prompt` is shown. `before` is the text that the output goes on from, where it belongs to it: a
    raw prompt, not a question.

    Raises:
        RequestError: as LLM.generate.
    """
    with recording(llm.engine) as recorder:
        completions = llm.generate(prompt_ids, params).completions
    # A sample that failed before its first token has no rounds; its turn must not be taken.
    taken = iter(recorder.take())
    return [
        _explanation(llm, prompt_ids, done, next(taken) if done.token_ids else [], prompt, before)
        for done in completions
    ]


def _explanation(
    llm: LLM,
    prompt_ids: Sequence[int],
    completion: Completion,
    rounds: Sequence[Round],
    prompt: str,
    before: str,
) -> Explanation:
    pieces = text_pieces(llm.tokenizer, prompt_ids, completion.token_ids)
    kinds = token_kinds(pieces, before)
    named = {token_id for one in rounds for token_id in _named_ids(one)}
    return Explanation(
        prompt=prompt,
        completion=completion,
        pieces=tuple(pieces),
        kinds=tuple(kinds),
        rounds=tuple(rounds),
        labels={token_id: token_label(llm.tokenizer, token_id) for token_id in named},
        sums=sum_rounds(rounds, kinds),
    )


def _named_ids(one: Round) -> list[int]:
    ids = [*one.drafted_ids, *one.token_ids]
    if one.rejection is not None and one.rejection.evidence is not None:
        evidence = one.rejection.evidence
        ids.append(evidence.wanted_id)
        ids += [token_id for token_id, _ in (*evidence.target_top, *evidence.drafter_top)]
    return ids

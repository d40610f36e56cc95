"""The audit of an answer: one teacher-forced pass says of every token whether it is the target's.

Prompt and output go in like a prompt. At each place of the output the choice rule of the engine
itself is asked, with the request's own noise, penalties and grammar, and the token that stands
there must be its choice. A row's logits do not depend on the rows beside it, so they have the bits
with which the answer was decoded, however it was: the audit is exact, at the cost of a prefill.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

from torch import Tensor

from blockdraft.core.errors import ConfigError, RequestError
from blockdraft.core.plan import ForwardPlan
from blockdraft.core.receipt import Environment, Receipt
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.engine.completion import Completion
from blockdraft.engine.engine import Engine
from blockdraft.engine.samples import Job, Samples
from blockdraft.speculate.sampler.choose import Chooser, Walk, choose
from blockdraft.speculate.sampler.margin import margin_of
from blockdraft.speculate.sampler.reference import NO_CHOICE
from blockdraft.text.detokenizer import Detokenizer

LOGITS_BYTES = 2**27
"""Logits in float32 that a pass holds at once."""

Verdict = Literal["genuine", "altered", "cannot tell"]
What = Literal["token", "end", "text"]

_FORCED = SamplingParams(logprobs=0, prompt_logprobs=True, num_draft_tokens=0)
"""Parameters of the audited tokens: one long prompt, with logits at all of its positions."""
_OF_TEXT = {
    *("weights", "tokenizer", "environment"),
    *("code", "blockdraft", "transformers", "tokenizers", "llguidance"),
}
"""The parts of an environment that the end and the text of given tokens depend on. Which tokens end
an answer is covered by the hash of the weights; another version may have ended it elsewhere."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing in an answer that is not as the target has it.

    `what` is a token, the end of the answer, or its text; `position` counts output tokens from 0,
    and `why` says it in words. Of a token: `found` stands there, `expected` is the target's choice
    (None if there is none), and `margin` says by how many logits that leads, where it can be said.
    """

    what: What
    position: int
    why: str
    found: int | None = None
    expected: int | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A part of the environment in which this machine is not as the one that answered."""

    name: str
    then: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit has found. `changes`: token equality may not hold because of them.

    `seconds` of the pass and all choices.
    """

    finding: Finding | None
    changes: tuple[Change, ...]
    num_tokens: int
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """ "altered" only where no difference between the machines can explain the finding."""
        if self.finding is None:
            return "genuine"
        reasons = {change.name for change in self.changes}
        if self.finding.what != "token":
            reasons &= _OF_TEXT
        return "cannot tell" if reasons else "altered"


def audit(samples: Samples, receipt: Receipt, environment: Environment) -> Audit:
    """Check every token of an answer, its end and its text. Nothing else may be under way.

    Raises:
        RequestError: the prompt or a parameter is none that this target takes.
        ContextTooLong: prompt and output do not fit its context.
        ConfigError: the K/V memory has no room for them.
    """
    started_at = perf_counter()
    finding = _first_finding(samples, receipt)
    seconds = perf_counter() - started_at
    changes = tuple(_changes(receipt.environment, environment))
    return Audit(finding, changes, len(receipt.token_ids), seconds)


def decode_again(samples: Samples, receipt: Receipt, *, is_drafted: bool) -> Completion:
    """Decode what a receipt asks for, that sample alone. Nothing else may be under way."""
    most = None if is_drafted else 0
    job = Job(
        0,
        list(receipt.prompt_token_ids),
        replace(receipt.params, num_draft_tokens=most),
        receipt.seed,
        shown_ids=frozenset(receipt.shown_token_ids),
    )
    key = samples.add(job, receipt.index)
    while True:
        if samples.has_news(key):
            completion = samples.take_chunk(key).completion
            if completion is not None:
                return completion
        samples.step()


def _changes(then: Environment, now: Environment) -> Iterator[Change]:
    if not then:
        yield Change("environment", None, now)
        return
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield Change(name, then.get(name), now.get(name))
    if not then.get("exact") and not now.get("exact"):
        # Without it no two runs need agree, however equal the machines.
        yield Change("exact", False, False)


def _first_finding(samples: Samples, receipt: Receipt) -> Finding | None:
    engine, params, output = samples.engine, receipt.params, receipt.token_ids
    # Room is needed for what was answered, not for what could have been.
    engine.limits.check_prompt(
        receipt.prompt_token_ids, replace(params, max_tokens=max(1, len(output)), min_tokens=0)
    )
    engine.limits.check_min_tokens(params, samples.tokenizer.eos_ids)
    sequence, text = _sequence(samples, receipt)
    place = 0
    with closing(_forced_logits(engine, receipt)) as chunks:
        for logits in chunks:
            own = output[place : place + logits.shape[0]]
            if (finding := _in_chunk(engine, logits, sequence, own)) is not None:
                return finding
            place += logits.shape[0]
            if sequence.finish_reason is not None:
                break
    return _at_end(receipt, sequence, text)


def _sequence(samples: Samples, receipt: Receipt) -> tuple[Sequence, Detokenizer]:
    """The sample as the engine would begin it, and what writes its text."""
    params, prompt_ids = receipt.params, list(receipt.prompt_token_ids)
    shown_ids = frozenset(receipt.shown_token_ids)
    text = samples.detokenizer(Job(0, prompt_ids, params, receipt.seed, shown_ids=shown_ids))
    sequence = samples.engine.sequence(
        prompt_ids,
        params,
        receipt.seed,
        eos_ids=samples.tokenizer.eos_ids,
        sample_index=receipt.index,
        scan_stop=text.push,
        constraint=samples.constraint(params),
        thinking=samples.thinking(prompt_ids, params),
    )
    return sequence, text


def _forced_logits(engine: Engine, receipt: Receipt) -> Generator[Tensor, None, None]:
    """The logits [rows, V] that choose the output tokens, some of them at a time, in order.

    They end at the first output id that is no token. Nothing is taken over from the prefix cache:
    all is computed anew.
    """
    target, num_prompt = engine.target, len(receipt.prompt_token_ids)
    output = list(receipt.token_ids)
    is_token = engine.limits.is_token
    num_tokens = next((i for i, one in enumerate(output) if not is_token(one)), len(output))
    # The last token is chosen, but no forward has it as input.
    ids = [*receipt.prompt_token_ids, *output[:num_tokens]]
    ids = ids if num_tokens < len(output) else ids[: max(num_prompt, len(ids) - 1)]
    # As long as the answer could have become: a rotation may depend on it.
    num_left = num_prompt + receipt.params.max_tokens - len(ids)
    forced = engine.sequence(ids, replace(_FORCED, max_tokens=max(1, num_left)), 0)
    target.memory.open(forced.key, ids[:1], with_context=False, longest=forced.longest)
    try:
        if not target.memory.reserve(forced.key, len(ids)):
            raise ConfigError(
                f"the KV cache of {target.memory.num_tokens} tokens has no room for an answer "
                f"of {len(ids)} tokens with its prompt; give more --memory"
            )
        chunk = engine.scheduler.prefill_chunk
        forced.num_scored = len(ids)  # no logits of the prompt
        for first in range(0, num_prompt - 1, chunk):
            _run(engine, forced, ids[first : min(first + chunk, num_prompt - 1)])
        forced.num_scored = 0
        chunk = max(1, min(chunk, LOGITS_BYTES // (4 * target.vocab_size)))
        for first in range(num_prompt - 1, len(ids), chunk):
            yield _run(engine, forced, ids[first : first + chunk])
    finally:
        target.close(forced.key)


def _run(engine: Engine, forced: Sequence, new_ids: list[int]) -> Tensor:
    plan = ForwardPlan.of_chains([Row(forced, new_ids, 0, is_prompt=True)], [()])
    logits = engine.target.forward(plan).logits
    (planned,) = plan
    engine.target.keep(planned, [])
    forced.num_cached += len(new_ids)
    return logits


def _in_chunk(
    engine: Engine, logits: Tensor, sequence: Sequence, own: tuple[int, ...]
) -> Finding | None:
    """Check some output tokens and append them; logits: [rows, V], a row for each of them."""
    (chooser,) = choose([Walk.chain(logits, sequence, list(own))])
    num_right, choice = 0, None
    while num_right < len(own) and (choice := _choice(chooser, num_right)) == own[num_right]:
        num_right += 1
    for token_id in own[:num_right]:
        if sequence.finish_reason is not None:
            break
        sequence.append(token_id)
    if num_right == len(own) or sequence.finish_reason is not None:
        return None
    return _wrong_token(engine, logits[num_right], sequence, own[num_right], choice)


def _choice(chooser: Chooser, index: int) -> int | None:
    """None where no token can stand: the grammar has ended, or logits are no numbers."""
    try:
        choice = chooser(index)
    except RequestError:
        return None
    return None if choice == NO_CHOICE else choice


def _wrong_token(
    engine: Engine, logits: Tensor, sequence: Sequence, found: int, choice: int | None
) -> Finding:
    """logits: [V] at the end of the sequence."""
    position = sequence.num_output
    if choice is None:
        return Finding("token", position, "no token can follow there", found)
    if not engine.limits.is_token(found):
        why = f"it is outside the vocabulary of {engine.target.vocab_size}"
        return Finding("token", position, why, found, choice)
    margin = margin_of(logits, sequence, found)
    return Finding("token", position, "the target chooses another", found, choice, margin)


def _at_end(receipt: Receipt, sequence: Sequence, text: Detokenizer) -> Finding | None:
    """Whether the answer ends where, why and with the text that it says."""
    position, ended = sequence.num_output, sequence.finish_reason
    if position < len(receipt.token_ids):
        how = _how_it_ends(sequence, text)
        return Finding("end", position, f"the target ends before it, with {how}")
    if ended is None:
        why = "the target continues: there is no stop, and max_tokens is not reached"
        return Finding("end", position, why)
    text.close()
    if receipt.finish_reason not in (None, ended):
        how = _how_it_ends(sequence, text)
        why = f"the finish reason is {receipt.finish_reason}, and the target ends with {how}"
        return Finding("end", position, why)
    if receipt.stop_string not in (None, text.stop_string):
        how = _how_it_ends(sequence, text)
        why = f"the stop string is {receipt.stop_string!r}, and the target ends with {how}"
        return Finding("end", position, why)
    if receipt.text not in (None, text.read()):
        return Finding("text", position, "the text is not that of the tokens")
    return None


def _how_it_ends(sequence: Sequence, text: Detokenizer) -> str:
    if text.stop_string is not None:
        return f"the stop string {text.stop_string!r}"
    if sequence.finish_reason == "stop":
        return f"the stop token {sequence.token_ids[-1]}"
    return f"max_tokens {sequence.params.max_tokens}"

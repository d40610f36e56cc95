"""What must be equal, to the bit, between a sample in company and the same sample alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.engine.completion import Completion
from tests.fuzz.internals import Trace

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ASKED_FOR = ("token_ids", "text", "finish_reason", "error", "logprobs", "prompt_logprobs")


@dataclass
class Answer:
    """A sample as its user sees it, and how it came about. Without completion it was aborted."""

    trace: Trace
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None


@dataclass(frozen=True)
class Compared:
    """How much was."""

    num_logits: int
    num_keys: int


def differences(found: Answer, alone: Answer) -> Iterator[str]:
    """In words; nothing if there are none."""
    yield from _in_answers(found, alone)
    yield from _in_logits(found, alone)
    yield from _in_memory(found, alone)


def compared(found: Answer) -> Compared:
    """What `differences` looks at."""
    return Compared(
        len(found.trace.logits), sum(memory[0].shape[2] for memory in found.trace.memory)
    )


def _in_answers(found: Answer, alone: Answer) -> Iterator[str]:
    expected = alone.completion
    assert expected is not None
    if found.completion is None:
        # What was given before the end is the beginning of the answer.
        num = len(found.token_ids)
        if tuple(found.token_ids) != expected.token_ids[:num]:
            yield f"tokens {_first_difference(found.token_ids, expected.token_ids)}"
        if not expected.text.startswith(found.text):
            yield f"text {found.text!r} is no beginning of {expected.text!r}"
        return
    for name in _ASKED_FOR:
        ours, theirs = getattr(found.completion, name), getattr(expected, name)
        if ours != theirs:
            yield f"{name}: {_first_difference(ours, theirs)}"
    if found.text != found.completion.text:
        yield f"streamed text {found.text!r} is not the whole one {found.completion.text!r}"


def _first_difference(found: object, expected: object) -> str:
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        for index, (a, b) in enumerate(zip(found, expected, strict=False)):
            if a != b:
                return f"{a!r:.200}, alone {b!r:.200}, from place {index} of {len(expected)}"
        return f"{len(found)} of them, alone {len(expected)}"
    return f"{found!r:.200}, alone {expected!r:.200}"


def _in_logits(found: Answer, alone: Answer) -> Iterator[str]:
    expected = dict(alone.trace.logits)
    ended = len(found.trace.sequence.token_ids)
    wrong = []
    for position, logits in found.trace.logits:
        if position < ended and not _same_bits(logits, expected.get(position)):
            wrong.append(position)
    if wrong:
        first = wrong[0]
        ours = dict(found.trace.logits)[first]
        yield (
            f"logits of {len(wrong)} kept tokens, the first at position {first} of {ended}"
            f"{_by_how_much(ours, expected.get(first))}"
        )
    if found.completion is not None:
        missing = set(expected) - {position for position, _ in found.trace.logits}
        if missing:
            yield f"no logits at position {min(missing)}"


def _in_memory(found: Answer, alone: Answer) -> Iterator[str]:
    if not alone.trace.memory:
        return
    expected = alone.trace.memory[-1]
    if found.completion is not None and not found.trace.memory:
        yield "no keys and values were held at its end"
    for memory in found.trace.memory:
        for layer, (ours, whole) in enumerate(zip(memory, expected, strict=True)):
            num = ours.shape[2]
            theirs = whole[:, :, :num]
            if _same_bits(ours, theirs):
                continue
            if theirs.shape != ours.shape:
                yield f"{num} keys are held, alone {whole.shape[2]}"
            else:
                wrong = _bits(ours) != _bits(theirs)
                places = wrong.transpose(0, 2).flatten(1).any(dim=1).nonzero().flatten().tolist()
                yield (
                    f"keys or values of layer {layer} at {len(places)} of {num} positions, the "
                    f"first {places[0]}{_by_how_much(ours, theirs)}"
                )
            break


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _same_bits(found: Tensor, expected: Tensor | None) -> bool:
    """Also of zeros with a sign and of what is no number."""
    if expected is None or found.shape != expected.shape:
        return False
    return torch.equal(_bits(found), _bits(expected))


def _by_how_much(found: Tensor, expected: Tensor | None) -> str:
    if expected is None or found.shape != expected.shape:
        return ""
    return f", by {(found.double() - expected.double()).abs().max().item():.3g} at most"

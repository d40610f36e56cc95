"""Acceptance length with and without a grammar: JSON asked of the default pair, whole blocks.

    python tools/experiments/grammar_tau.py [--unmasked]

prints tau over all prompts, how many answers are JSON, and fails if drafted and plain tokens differ
under the grammar. With --unmasked the drafter guesses as if there were no grammar.
"""

import argparse
import copy
import json
from dataclasses import replace
from unittest.mock import patch

from blockdraft import LLM, Completion, Grammar, SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.speculate.drafters import dflash
from blockdraft.speculate.sampler.choose import Chooser, Walk, choose

MAX_TOKENS = 192


def _text(limit: int) -> dict[str, object]:
    return {"type": "string", "maxLength": limit}


def _object(properties: dict[str, object]) -> Grammar:
    closed = {"required": list(properties), "additionalProperties": False}
    return Grammar.json_schema({"type": "object", "properties": properties, **closed})


def _list(limit: int, low: int, high: int) -> dict[str, object]:
    return {"type": "array", "items": _text(limit), "minItems": low, "maxItems": high}


def _number(low: int, high: int) -> dict[str, object]:
    return {"type": "integer", "minimum": low, "maximum": high}


PERSON = _object(
    {"name": _text(40), "age": _number(0, 120), "city": _text(40), "hobbies": _list(30, 1, 4)}
)
REVIEW = _object(
    {"title": _text(60), "summary": _text(200), "tags": _list(20, 2, 5), "rating": _number(1, 5)}
)
RECIPE = _object(
    {
        "dish": _text(40),
        "minutes": _number(1, 300),
        "ingredients": _list(30, 2, 8),
        "hint": _text(120),
    }
)
TICKET = _object(
    {
        "subject": _text(60),
        "severity": {"enum": ["low", "medium", "high"]},
        "steps": _list(80, 1, 4),
        "is_open": {"type": "boolean"},
    }
)
_BY_SHAPE = {
    PERSON: (
        "Describe a fictional person as JSON with the keys name, age, city and hobbies.",
        "Give me a JSON object about a doctor from Paris: name, age, city, hobbies.",
        "Return JSON only: a student named Tom, his age, city and hobbies.",
        "A retired sailor as JSON: name, age, city, hobbies.",
        "Make up a chess player. Answer in JSON with name, age, city, hobbies.",
        "Who could be the mayor of Lisbon? JSON with name, age, city and hobbies, please.",
    ),
    REVIEW: (
        "Write a JSON review of a book about the sea: title, summary, tags, rating (1 to 5).",
        "As JSON with title, summary, tags and rating: what do you think of the film Titanic?",
        "Rate a coffee machine as JSON with title, summary, tags, rating.",
        "Review a hotel at a lake. JSON: title, summary, tags, rating from 1 to 5.",
        "A short review of a bad umbrella as JSON with title, summary, tags and rating.",
        "JSON only, with title, summary, tags, rating: a review of the first telephone.",
    ),
    RECIPE: (
        "A recipe for pancakes as JSON: dish, minutes, ingredients, hint.",
        "Give me something with tomatoes. JSON with dish, minutes, ingredients and hint.",
        "JSON only: a soup for a cold day, with dish, minutes, ingredients, hint.",
        "What can I cook with rice and eggs? Answer as JSON: dish, minutes, ingredients, hint.",
        "A dessert without sugar, as JSON with the keys dish, minutes, ingredients and hint.",
        "Describe a famous Italian dish as JSON: dish, minutes, ingredients, hint.",
    ),
    TICKET: (
        "The printer is on fire. File a ticket as JSON: subject, severity, steps, is_open.",
        "Write a bug report for a login page as JSON with subject, severity, steps, is_open.",
        "JSON with subject, severity (low, medium, high), steps, is_open: a slow website.",
        "My phone does not ring. Turn this into JSON: subject, severity, steps, is_open.",
        "File a ticket about a wrong price in the shop. JSON: subject, severity, steps, is_open.",
        "As JSON with subject, severity, steps and is_open: the backup failed last night.",
    ),
}
ASKED = tuple((prompt, shape) for shape, prompts in _BY_SHAPE.items() for prompt in prompts)


def _unmasked(walks: list[Walk]) -> list[Chooser]:
    free = []
    for walk in walks:
        sequence = _free(walk.sequence)
        places = [replace(place, sequence=sequence) for place in walk.places]
        free.append(Walk(walk.logits, sequence, places))
    return choose(free)


def _free(sequence: Sequence) -> Sequence:
    free = copy.copy(sequence)
    free.constraint = None
    return free


def _ask(llm: LLM, prompt: str, params: SamplingParams) -> Completion:
    return llm.chat([{"role": "user", "content": prompt}], params).completions[0]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _measure(llm: LLM, temperature: float, *, with_grammar: bool) -> str:
    num_tokens = num_passes = num_json = 0
    for prompt, grammar in ASKED:
        params = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=1,
            grammar=grammar if with_grammar else None,
        )
        found = _ask(llm, prompt, params)
        num_tokens += found.acceptance.num_tokens
        num_passes += found.acceptance.num_passes
        num_json += _is_json(found.text)
        if with_grammar:
            plain = _ask(llm, prompt, replace(params, num_draft_tokens=0))
            assert plain.token_ids == found.token_ids, prompt
    return f"tau {num_tokens / num_passes:.2f}, JSON {num_json} of {len(ASKED)}"


def main() -> None:
    """Measure both ways, greedy and sampled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unmasked", action="store_true")
    guess = _unmasked if parser.parse_args().unmasked else choose
    llm = LLM(adaptive=False)
    with patch.object(dflash, "choose", guess):
        for temperature in (0.0, 0.7):
            for with_grammar in (True, False):
                found = _measure(llm, temperature, with_grammar=with_grammar)
                kind = "grammar" if with_grammar else "free"
                print(f"temperature {temperature}, {kind}: {found}")


if __name__ == "__main__":
    main()

"""tau of lookup, of a drafter and of both, as chains and as trees, over the same tokens.

    python tools/experiments/lookup_tau.py --prompts spec_bench.jsonl.gz --limit 10 --tokens 96

Kinds are those of Spec-Bench that copy, or hardly do, and texts and code of this file to be edited.
Then predictions: the text to be edited, and the answer itself with one tenth of it changed, once in
three places of several tokens, once in single tokens here and there.

With `--time` seconds instead, one prompt at a time, with the defaults of LLM: plain decoding,
drafted without and with each prediction, in turns that another one begins for each prompt.
"""

import argparse
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from blockdraft import LLM, SamplingParams
from blockdraft.bench.decode import in_turn
from blockdraft.bench.measures import bootstrap_band
from blockdraft.engine.completion import Completion
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.text.kinds import loops

KINDS = {"summarization": "summary", "rag": "retrieval", "mt_bench": "chat"}
TEXTS = (
    "The libary opens at nine in the morning and close at six in the evening. Visitors can borow "
    "up to five books for three weeks. Who brings a book back late pay a small fee for each day.",
    "Our team have finished the first part of the project last week. We has tested the new pump in "
    "the cold room, and it have worked for forty hours without any problem. The "
    "report is attached.",
    "Dear Anna, thank you for you're letter. I am glad that the journey went good and that you has "
    "found a nice flat near the river. We will visits you in May if the weather is warm enough.",
    "The recipe need two eggs, a cup of flour and a spoon of sugar. Mix all for five "
    "minute, let it "
    "rest for half a hour, and bake it slowly in a hot pan until both side are golden brown.",
    "The meeting begin at ten o'clock in the small room on the second floor. Please "
    "brings the list "
    "of open questions. Mr. Ito will explains the new schedule, and we will vote on the budget.",
    "In winter the lake freeze for about three month, and the children of the village skates on it "
    "every afternoon. The old fisherman do not like the noise, but he always leave them some tea.",
)
PROGRAMS = (
    "def total(prices, tax):\n    result = 0\n    for price in prices:\n        result = result + "
    "price\n    result = result + result * tax\n    return result\n",
    "def find(items, wanted):\n    index = 0\n    while index < len(items):\n        "
    "if items[index] "
    "== wanted:\n            return index\n        index = index + 1\n    return -1\n",
    "class Counter:\n    def __init__(self):\n        self.value = 0\n\n    def "
    "add(self, number):\n"
    "        self.value = self.value + number\n\n    def reset(self):\n        self.value = 0\n",
    "def words(text):\n    counts = {}\n    for word in text.split():\n        if "
    "word not in counts:"
    "\n            counts[word] = 0\n        counts[word] += 1\n    return counts\n",
    "function area(shape) {\n  if (shape.kind === 'circle') {\n    return 3.14 * shape.radius * "
    "shape.radius;\n  }\n  return shape.width * shape.height;\n}\n",
    "def average(numbers):\n    total = 0\n    count = 0\n    for number in "
    "numbers:\n        total "
    "+= number\n        count += 1\n    return total / count\n",
)


@dataclass(frozen=True)
class Asked:
    """A prompt of some kind, and what its answer may be expected to be."""

    kind: str
    text: str
    prediction: str = ""


Way = tuple[str, int, tuple[str, ...] | None]
"""Its name, the nodes of its trees or 0, and who drafts."""


def prompts(path: Path, limit: int) -> list[Asked]:
    """All prompts; those of the file by its order."""
    found: defaultdict[str, list[Asked]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            kind = KINDS.get(row["category"].split("/")[0])
            if kind is not None and len(row["turns"][0]) < 6000:
                found[kind].append(Asked(kind, row["turns"][0]))
    # Every so manieth: chat has eight categories in a row.
    chosen = [one for own in found.values() for one in own[:: max(1, len(own) // limit)][:limit]]
    fix = "Correct the mistakes in this text, and change nothing else.\n\n"
    edit = "Add a comment to the first line of this program. Answer with the whole program.\n\n"
    return [
        *chosen,
        *(Asked("rewriting", fix + text, text) for text in TEXTS),
        *(Asked("code editing", edit + text, f"```python\n{text}```") for text in PROGRAMS),
    ]


def changed(token_ids: Sequence[int], share: float, num_places: int) -> tuple[int, ...]:
    """The tokens with a share of them changed to others, in so many places."""
    draw, found = random.Random(0), list(token_ids)
    width = max(1, round(share * len(found) / num_places))
    for place in range(num_places):
        start = round((place + 0.5) * len(found) / num_places)
        for index in range(start, min(start + width, len(found))):
            found[index] = draw.choice(found) + 1
    return tuple(found)


def run(llm: LLM, asked: Sequence[Asked], params: Sequence[SamplingParams]) -> list[Completion]:
    """The answers, all prompts at once."""
    chats = [[{"role": "user", "content": one.text}] for one in asked]
    return [generation.completions[0] for generation in llm.chat(chats, list(params))]


def tell(name: str, asked: Sequence[Asked], found: Sequence[Completion]) -> None:
    """Print tau by kind, and who drafted what."""
    stats: defaultdict[str, AcceptanceStats] = defaultdict(AcceptanceStats)
    for one, completion in zip(asked, found, strict=True):
        stats[one.kind].add(completion.acceptance)
        stats["all"].add(completion.acceptance)
    told = "  ".join(f"{kind} {own.acceptance_length:.2f}" for kind, own in stats.items())
    every = stats["all"]
    rows = every.num_drafted / every.num_passes
    by = {name: f"{every.accepted_by[name]}/{num}" for name, num in every.drafted_by.items()}
    print(f"{name:24} {told}  nodes a pass {rows:.2f}  {by}", flush=True)


def predictions_of(
    asked: Sequence[Asked], answers: Sequence[tuple[int, ...]]
) -> dict[str, list[str | tuple[int, ...]]]:
    """By name, one for each prompt."""
    return {
        "the text to edit": [one.prediction for one in asked],
        "0.9 right, 3 places": [changed(own, 0.1, 3) for own in answers],
        "0.9 right, single": [changed(own, 0.1, max(1, len(own) // 10)) for own in answers],
        "right": list(answers),
        "of another prompt": [*answers[1:], answers[0]],
    }


def time_each(llm: LLM, asked: Sequence[Asked], base: SamplingParams) -> None:
    """Print by kind how many times as fast as plain decoding each way is, with a 95 % band."""
    compute_every_prompt(llm.engine)
    plain = replace(base, num_draft_tokens=0)
    answers = [own.token_ids for own in run(llm, asked, [plain] * len(asked))]
    given = predictions_of(asked, answers)
    seconds: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for index, one in enumerate(asked):
        ways = {"plain": plain, "no prediction": base}
        ways |= {name: replace(base, prediction=own[index]) for name, own in given.items()}
        for name in in_turn(list(ways), index):
            if name == "the text to edit" and not one.prediction:
                continue
            start = perf_counter()
            (found,) = run(llm, [one], [ways[name]])
            seconds[name][index] = perf_counter() - start
            assert found.token_ids == answers[index], "other tokens than before"
    does_loop = [loops(own) for own in answers]
    lengths = [len(own) for own in answers]
    print(f"{sum(lengths) / len(lengths):.0f} tokens an answer, {sum(does_loop)} loop")
    for name, own in seconds.items():
        for kind in ["all", "no loops", *dict.fromkeys(one.kind for one in asked)]:
            chosen = [
                i
                for i in own
                if kind in ("all", asked[i].kind) or (kind == "no loops" and not does_loop[i])
            ]
            if not chosen:
                continue
            pairs = np.array([(1.0, own[i], 1.0, seconds["plain"][i]) for i in chosen])
            low, high = bootstrap_band(pairs)
            ratio = pairs[:, 3].sum() / pairs[:, 1].sum()
            print(f"{name:22} {kind:14} {len(chosen):3} {ratio:.2f} ({low:.2f}-{high:.2f})")


def main() -> None:
    """Print a line for each way; ends if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, metavar="SPEC_BENCH")
    parser.add_argument("--limit", type=int, default=10, help="prompts of a kind")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--nodes", nargs="*", type=int, default=[11, 15])
    parser.add_argument("--time", action="store_true", help="seconds, one prompt at a time")
    options = parser.parse_args()
    asked = prompts(options.prompts, options.limit)
    base = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=5)
    if options.time:
        time_each(LLM(), asked, base)
        return
    llm = LLM(adaptive=False, lookup=True, max_concurrency=8)
    ways: list[Way] = [("lookup", 0, ("lookup",))]
    for num in [0, *options.nodes]:
        shape = f"tree of {num}" if num else "chain"

        ways += [(shape, num, ("dflash",)), (f"{shape} + lookup", num, None)]
    print(f"{len(asked)} prompts, {llm.dtype}, temperature {options.temperature:g}")
    expected: list[tuple[int, ...]] = []
    for name, num, drafters in ways:
        llm.use_fixed_drafting(num or None)
        found = run(llm, asked, [replace(base, drafters=drafters)] * len(asked))
        tokens = [completion.token_ids for completion in found]
        expected = expected or tokens
        assert tokens == expected, "other tokens than before"
        tell(name, asked, found)
    llm.use_fixed_drafting()
    given = predictions_of(asked, expected)
    for drafters in (("prediction",), None):
        for name, predictions in given.items():
            params = [replace(base, prediction=own, drafters=drafters) for own in predictions]
            chosen = [i for i, own in enumerate(predictions) if own]
            found = run(llm, [asked[i] for i in chosen], [params[i] for i in chosen])
            assert [one.token_ids for one in found] == [expected[i] for i in chosen]
            tell(f"{name}{'' if drafters else ' + all'}", [asked[i] for i in chosen], found)


if __name__ == "__main__":
    main()

"""What a drafter costs or brings a batch whose prompts are all new and keep coming, as in a server.

    python tools/experiments/batch_time.py --prompts FILE [--prompts FILE]... [--concurrency 16]
        [--turns 12] [--seconds 3] [--max-tokens 64] [--temperature 0] [--bad-drafter noise]
        [--waiting TOKENS]

`blockdraft bench never-slower` sends four requests for each that runs at once, again and again the
same; at the end of such a batch fewer and fewer share a step. Here the next request begins where
one ends, and an engine without a drafter and one with the default drafter decode them in turns,
each going on where it stopped, another one first each time. What a server keeps is kept: keys,
values and features of earlier requests. Prompts of 150 to 1,200 characters count, in random order;
they begin again when all are through. `--bad-drafter`: as `never-slower` has it. `--waiting`: so
many tokens may have features that wait for the drafter; with few, a short run is like the later
hours of a long one. Prints the tokens a second of both sides and what the drafter makes of them: in
all, and as the median of the turns. Exits with 1 if any output differs.
"""

import argparse
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

from blockdraft.bench.bad_drafters import make_bad
from blockdraft.core.request import SamplingParams
from blockdraft.data.prompts import read_prompts
from blockdraft.llm import LLM
from blockdraft.speculate.drafters.lazy_context import LazyContext

SHORTEST, LONGEST = 150, 1200
WARM_UP_TURNS = 2


class Side:
    """An engine with a batch, whose requests follow each other in the order of the prompts."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self.outputs: dict[int, Sequence[int]] = {}
        """By the number of the request, of those that have ended."""
        self.rates: list[float] = []
        self._llm, self._prompts, self._params = llm, prompts, params
        self._numbers = count()
        self._running: dict[int, int] = {}

    def turn(self, seconds: float, concurrency: int) -> None:
        """Decode for so long, and note the tokens a second."""
        engine, start, num_tokens = self._llm.engine, perf_counter(), 0
        while (took := perf_counter() - start) < seconds:
            while len(self._running) < concurrency:
                number = next(self._numbers)
                prompt = self._prompts[number % len(self._prompts)]
                eos_ids = self._llm.tokenizer.eos_ids
                self._running[engine.add(prompt, self._params, eos_ids=eos_ids)] = number
            for output in engine.step():
                num_tokens += output.num_kept
                if output.finish_reason is not None:
                    ended = engine.take(output.key).sequence
                    self.outputs[self._running.pop(output.key)] = ended.output_ids
        self.rates.append(num_tokens / took)


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--bad-drafter", choices=["noise", "wrong"])
    parser.add_argument("--waiting", type=int)
    args = parser.parse_args()
    texts = [prompt.text for path in args.prompts for prompt in read_prompts(path)]
    texts = [text for text in texts if SHORTEST <= len(text) <= LONGEST]
    random.Random(0).shuffle(texts)
    plain = LLM(drafter=None, max_concurrency=args.concurrency)
    drafted = LLM(max_concurrency=args.concurrency)
    if args.bad_drafter is not None:
        make_bad(drafted, args.bad_drafter)
    if args.waiting is not None:
        assert isinstance(drafted.engine.drafter, LazyContext)
        drafted.engine.drafter.contexts.waiting.limit = args.waiting
    prompts = [plain.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in texts]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    sides = [Side(llm, prompts, params) for llm in (plain, drafted)]
    for number in range(WARM_UP_TURNS + args.turns):
        for side in sides if number % 2 else sides[::-1]:
            side.turn(args.seconds, args.concurrency)
    without, with_drafter = (side.rates[WARM_UP_TURNS:] for side in sides)
    shared = sides[0].outputs.keys() & sides[1].outputs.keys()
    if any(sides[0].outputs[number] != sides[1].outputs[number] for number in shared):
        print("the outputs differ")
        return 1
    ratios = sorted(b / a for a, b in zip(without, with_drafter, strict=True))
    total = sum(with_drafter) / sum(without)
    print(
        f"without {sum(without) / len(without):.1f}, with {sum(with_drafter) / len(ratios):.1f}: "
        f"{total:.3f}; turns {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}), "
        f"{len(shared)} outputs the same"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

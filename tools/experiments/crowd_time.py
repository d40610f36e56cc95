"""What a drafter costs or brings a crowd whose prompts are all new, as in a server.

    python tools/experiments/crowd_time.py --prompts FILE [--prompts FILE]... [--concurrency 16]
        [--rounds 8] [--max-tokens 64] [--temperature 0.7] [--waiting TOKENS]

`blockdraft bench never-slower` decodes the same prompts again and again, and keeps nothing of those
that have ended. Here each round has other prompts, three times as many as run at once, which an
engine without a drafter and one with the default drafter decode in turns, another one first each
time. What a server keeps is kept: keys, values and features of earlier rounds. Prompts of 150 to
1,200 characters count, in random order. `--waiting`: so many tokens may have features that wait for
the drafter; with few, a short run is like the later hours of a long one. Prints for each round, of
which the first warms up, the time without the drafter over that with it, and exits with 1 if any
output differs.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from blockdraft.core.request import SamplingParams
from blockdraft.data.prompts import read_prompts
from blockdraft.llm import LLM
from blockdraft.speculate.drafters.lazy_context import LazyContext

NUM_PER_PLACE = 3
SHORTEST, LONGEST = 150, 1200


def decode(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> tuple[list[Sequence[int]], float]:
    """The tokens of all answers, and the seconds until the last one was there."""
    start = perf_counter()
    generations = llm.generate(prompts, params)
    seconds = perf_counter() - start
    return [generation.completions[0].token_ids for generation in generations], seconds


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--waiting", type=int)
    args = parser.parse_args()
    texts = [prompt.text for path in args.prompts for prompt in read_prompts(path)]
    texts = [text for text in texts if SHORTEST <= len(text) <= LONGEST]
    size = NUM_PER_PLACE * args.concurrency
    if len(texts) < size * (args.rounds + 1):
        parser.error(f"{len(texts)} prompts, and {size * (args.rounds + 1)} are needed")
    random.Random(0).shuffle(texts)
    drafted = LLM(max_concurrency=args.concurrency)
    plain = LLM(drafter=None, max_concurrency=args.concurrency)
    if args.waiting is not None:
        assert isinstance(drafted.engine.drafter, LazyContext)
        drafted.engine.drafter.contexts.waiting.limit = args.waiting
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    ratios = []
    for turn in range(args.rounds + 1):
        own = texts[turn * size : (turn + 1) * size]
        prompts = [plain.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in own]
        sides = [plain, drafted] if turn % 2 else [drafted, plain]
        found = {llm: decode(llm, prompts, params) for llm in sides}
        if found[plain][0] != found[drafted][0]:
            print("the outputs differ")
            return 1
        ratios.append(found[plain][1] / found[drafted][1])
        print(f"{ratios[-1]:.3f}", flush=True)
    print(f"median without the first: {median(ratios[1:]):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Targets whose weights are held in several ways, in one run: speed, tau and memory of each.

    python tools/experiments/quantized.py [--way KEY=VALUE[,KEY=VALUE]...]... --prompts FILE
        [--limit 12] [--max-tokens 192] [--temperature 0] [--output FILE]

A way is options of LLM, such as quantize=int4 or target=FILE.gguf; without any they are those of
the default pair: as it is, int8, int4, and its GGUF file. Every prompt is decoded plainly and
drafted by each, in turns that another one begins each time: each is a target of its own, so each is
compared with its own plain output. Memory is that of a process that holds this way alone: what
loading adds to what the libraries take. Exits with 1 if any drafted output differs from plain.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockdraft.bench.config import WARM_UP_TOKENS
from blockdraft.bench.decode import encode_prompts, in_turn
from blockdraft.bench.measures import measures_of, rate_of
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.bench.workload import read_workload
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.measure.provenance import describe_environment

DRAFTER = "smollm2-135m-dflash"
WAYS = ("dtype=auto", "quantize=int8", "quantize=int4", f"target=smollm2-135m-q4,drafter={DRAFTER}")
MEMORY = """
import sys, json, blockdraft, torch, transformers
from blockdraft import LLM
from blockdraft.models import loading
def resident():
    fields = (line.split() for line in open("/proc/self/status"))
    return next(int(words[1]) * 1024 for words in fields if words[0] == "VmRSS:")
before = resident()
llm = LLM(**json.loads(sys.argv[1]))
print(resident() - before)
"""


@dataclass(frozen=True)
class Pair:
    """One prompt in one way."""

    plain: TimedOutput
    drafted: TimedOutput

    @property
    def is_same(self) -> bool:
        """Whether drafting changed nothing."""
        return self.plain.token_ids == self.drafted.token_ids


def read_way(text: str) -> dict[str, Any]:
    """Options of LLM, from KEY=VALUE,KEY=VALUE."""
    options: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def memory_of(options: Mapping[str, Any]) -> int:
    """Bytes that a process of its own takes for this way, K/V memory included."""
    command = [sys.executable, "-c", MEMORY, json.dumps(dict(options))]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(run.stdout.split()[-1])


def decode(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
    """One output, as it is measured."""
    return timed_output(llm.generate(prompt_ids, params).completions[0])


def measure(
    llms: Mapping[str, LLM], path: Path, limit: int, params: SamplingParams
) -> dict[str, list[Pair]]:
    """Every prompt in every way, plainly and drafted."""
    prompts = read_workload(path)
    prompts = prompts[:: -(-len(prompts) // limit)]
    plain = replace(params, num_draft_tokens=0)
    rows: dict[str, list[Pair]] = {name: [] for name in llms}
    encoded = encode_prompts(next(iter(llms.values())), prompts, params)
    warm_up = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
    for llm in llms.values():
        decode(llm, encoded[0], warm_up)
    for index, prompt_ids in enumerate(encoded):
        for name in in_turn(list(llms), index):
            llm = llms[name]
            outputs = [TimedOutput((), 0.0, 0.0)] * 2
            for kind in in_turn([0, 1], index):
                outputs[kind] = decode(llm, prompt_ids, (plain, params)[kind])
            rows[name].append(Pair(*outputs))
        print(f"{index + 1} of {len(encoded)} prompts", file=sys.stderr, flush=True)
    return rows


def figures_of(pairs: Sequence[Pair], num_bytes: int) -> dict[str, Any]:
    """Of one way."""
    plain = [pair.plain for pair in pairs]
    measures = measures_of([pair.drafted for pair in pairs], plain)
    assert measures.speedup is not None
    return {
        "plain": rate_of(plain).tokens_per_second,
        "drafted": measures.tokens_per_second,
        "speedup": measures.speedup.value,
        "speedup_low": measures.speedup.low,
        "speedup_high": measures.speedup.high,
        "tau": measures.tau_micro,
        "bytes": num_bytes,
        "different": sum(not pair.is_same for pair in pairs),
    }


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """As Markdown; the first way is what the others are held against."""
    lines = [
        "| way | plain, tokens/s | to the first | drafted, tokens/s | to the first | over plain "
        "(95 %) | tau | memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = next(iter(figures.values()))
    for name, own in figures.items():
        cells = [f"{own['plain']:.1f}", f"{own['plain'] / first['plain']:.2f}"]
        cells += [f"{own['drafted']:.1f}", f"{own['drafted'] / first['drafted']:.2f}"]
        band = "one prompt, no spread"
        if own["speedup_low"] is not None:
            band = f"{own['speedup_low']:.2f}-{own['speedup_high']:.2f}"
        cells += [f"{own['speedup']:.2f} ({band})", f"{own['tau']:.2f}"]
        cells += [f"{own['bytes'] / 2**30:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", metavar="KEY=VALUE,...", help="options of LLM")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    ways = {way: read_way(way) for way in args.way or WAYS}
    # Loaded once before it is measured: tests and timings of a first start take memory too.
    llms = {name: LLM(**options) for name, options in ways.items()}
    for llm in llms.values():
        compute_every_prompt(llm.engine)
    rows = measure(llms, args.prompts, args.limit, params)
    llms.clear()
    figures = {name: figures_of(rows[name], memory_of(options)) for name, options in ways.items()}
    if args.output is not None:
        report = describe_environment() | {
            "settings": {key: str(value) for key, value in vars(args).items()},
            "figures": figures,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(figures))
    num_different = sum(int(own["different"]) for own in figures.values())
    print(f"\n{num_different} of {sum(map(len, rows.values()))} drafted outputs differ from plain")
    raise SystemExit(1 if num_different else 0)


if __name__ == "__main__":
    main()

"""One target in several ways, in one run: speed, tau and memory of each, and llama.cpp beside them.

    python tools/experiments/quantized.py [--way KEY=VALUE[,KEY=VALUE]...]... --prompts FILE
        [--limit 12] [--max-tokens 192] [--temperature 0] [--against llama.cpp] [--output FILE]
    python tools/experiments/quantized.py --prove [--way ...]... [--output FILE]

A way is options of LLM, such as quantize=int4 or target=FILE.gguf, and pages=false for one sequence
after another; without any they are those of the default pair: as it is, without pages, int8, int4,
and its GGUF file. Every prompt is decoded plainly and drafted by each, in turns that another one
begins each time: each is a target of its own, so each is compared with its own plain output.
--against names an engine of `blockdraft bench speed` that runs the last way's file, plainly and
greedily, in these turns. Memory is that of a process that holds this way alone: what loading adds
to what the libraries take. Exits with 1 if any drafted output differs from plain.

With --prove each way is proven instead, as by `blockdraft prove --quick`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from blockdraft.bench.config import SpeedConfig, warm_up_of
from blockdraft.bench.decode import encode_prompts, in_turn
from blockdraft.bench.measures import measures_of, rate_of
from blockdraft.bench.outside.engines import ENGINES
from blockdraft.bench.outside.interface import Failure
from blockdraft.bench.outside.others import OtherEngine, started_engines
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.bench.workload import read_workload
from blockdraft.core.request import SamplingParams
from blockdraft.engine import load
from blockdraft.llm import LLM
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.measure.provenance import describe_environment
from blockdraft.proof.config import QUICK, ProofConfig
from blockdraft.proof.corpus import BUNDLED, first_of_each_kind, read_prompts
from blockdraft.proof.prove import Proof

DRAFTER = "smollm2-135m-dflash"
WAYS = (
    *("dtype=auto", "pages=false", "quantize=int8", "quantize=int4"),
    f"target=smollm2-135m-q4,drafter={DRAFTER}",
)
MEMORY = f"""
import sys, json, torch, transformers
sys.path.insert(0, {str(Path(__file__).parent)!r})
from quantized import load_llm
def resident():
    fields = (line.split() for line in open("/proc/self/status"))
    return next(int(words[1]) * 1024 for words in fields if words[0] == "VmRSS:")
before = resident()
llm = load_llm(json.loads(sys.argv[1]))
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


def load_llm(options: Mapping[str, Any]) -> LLM:
    """A way, ready; the engine has no option for running without pages what has a place there."""
    others = {key: value for key, value in options.items() if key != "pages"}
    if options.get("pages", True):
        return LLM(**others)
    without_pages = partial(load.make_target, in_pages=False)
    with patch.object(load, "make_target", lambda *args, in_pages: without_pages(*args)):
        return LLM(**others)


def memory_of(options: Mapping[str, Any]) -> int:
    """Bytes that a process of its own takes for this way, K/V memory included."""
    command = [sys.executable, "-c", MEMORY, json.dumps(dict(options))]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(run.stdout.split()[-1])


def decode(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
    """One output, as it is measured."""
    return timed_output(llm.generate(prompt_ids, params).completions[0])


def measure(
    llms: Mapping[str, LLM],
    path: Path,
    limit: int,
    params: SamplingParams,
    others: Sequence[OtherEngine] = (),
) -> tuple[dict[str, list[Pair]], dict[str, list[TimedOutput]]]:
    """Every prompt in every way, plainly and drafted, and by every other."""
    prompts = read_workload(path)
    prompts = prompts[:: -(-len(prompts) // limit)]
    plain = replace(params, num_draft_tokens=0)
    rows: dict[str, list[Pair]] = {name: [] for name in llms}
    beside: dict[str, list[TimedOutput]] = {other.name: [] for other in others}
    encoded = encode_prompts(next(iter(llms.values())), prompts, params)
    warm_up = warm_up_of(params)
    for llm in llms.values():
        decode(llm, encoded[0], warm_up)
    for other in others:
        other.decode(encoded[0], warm_up.max_tokens)
    for index, prompt_ids in enumerate(encoded):
        for name in in_turn(list(llms), index):
            llm = llms[name]
            outputs = [TimedOutput((), 0.0, 0.0)] * 2
            for kind in in_turn([0, 1], index):
                outputs[kind] = decode(llm, prompt_ids, (plain, params)[kind])
            rows[name].append(Pair(*outputs))
        for other in others:
            output = other.decode(prompt_ids, params.max_tokens)
            if isinstance(output, Failure):
                raise SystemExit(f"{other.name} {output.reason}")
            beside[other.name].append(output.timed)
        print(f"{index + 1} of {len(encoded)} prompts", file=sys.stderr, flush=True)
    return rows, beside


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


def sentence(name: str, timed: Sequence[TimedOutput], last: Sequence[Pair], first: float) -> str:
    """Of another engine: beside the last way, and the plain tokens per second of the first."""
    rate = rate_of(timed).tokens_per_second
    equal = sum(o.token_ids == p.plain.token_ids for o, p in zip(timed, last, strict=True))
    return (
        f"{name}, plain: {rate:.1f} tokens/s, {rate / first:.2f} times the first way's plain; "
        f"{equal} of {len(timed)} outputs are those of the last way"
    )


def children_bytes() -> int:
    """What the processes take that this one has started."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text(encoding="utf-8").split()
    pages = (Path(f"/proc/{child}/statm").read_text(encoding="utf-8") for child in children)
    return sum(int(line.split()[1]) for line in pages) * os.sysconf("SC_PAGE_SIZE")


def prove(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The verdict of each way."""
    corpus = first_of_each_kind(read_prompts(BUNDLED))
    verdicts = {}
    for name, options in ways.items():
        llm = load_llm({**options, "adaptive": False, "recheck": True})
        findings = Proof(llm, ProofConfig(**QUICK), corpus).run()
        compared = sum(check.num_cases for check in findings.ways)
        differ = sum(check.num_failures for check in findings.ways)
        planted = [control for control in findings.controls if control.skipped is None]
        caught = sum(control.caught for control in planted)
        verdicts[name] = (
            f"{findings.verdict}: {compared} outputs, {differ} differ; {caught} of {len(planted)} "
            f"planted faults found; {findings.seconds:.0f} s"
        )
        print(f"{name}: {verdicts[name]}", flush=True)
    return verdicts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", metavar="KEY=VALUE,...", help="options of LLM")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--against", action="append", choices=ENGINES, default=[])
    parser.add_argument("--prove", action="store_true", help="prove each way, measure nothing")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if (args.prompts is None) != args.prove:
        parser.error("give --prompts or --prove")
    if args.against and args.temperature:
        parser.error("--against decodes greedily; leave out --temperature")
    ways = {way: read_way(way) for way in args.way or WAYS}
    settings = {key: str(value) for key, value in vars(args).items()}
    report: dict[str, Any] = describe_environment() | {"settings": settings}
    if args.prove:
        report["verdicts"] = prove(ways)
        failed = not all(verdict.startswith("proven") for verdict in report["verdicts"].values())
    else:
        report["figures"], failed = compare(args, ways)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(1 if failed else 0)


def compare(
    args: argparse.Namespace, ways: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Measure and print; returns the figures, and whether an output differs from plain."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    # Loaded once before it is measured: tests and timings of a first start take memory too.
    llms = {name: load_llm(options) for name, options in ways.items()}
    for llm in llms.values():
        compute_every_prompt(llm.engine)
    last = list(ways)[-1]
    with started_engines(args.against, llms[last], SpeedConfig()) as others:
        rows, beside = measure(llms, args.prompts, args.limit, params, others)
        outside_bytes = children_bytes()
    llms.clear()
    figures = {name: figures_of(rows[name], memory_of(options)) for name, options in ways.items()}
    print(table(figures))
    first = next(iter(figures.values()))["plain"]
    for name, timed in beside.items():
        print(sentence(name, timed, rows[last], first))
        figures[name] = {"plain": rate_of(timed).tokens_per_second}
    if beside:
        print(f"{', '.join(beside)}: {outside_bytes / 2**30:.2f} GiB, the whole of its process")
    num_different = sum(int(own.get("different", 0)) for own in figures.values())
    print(f"\n{num_different} of {sum(map(len, rows.values()))} drafted outputs differ from plain")
    return figures, bool(num_different)


if __name__ == "__main__":
    main()

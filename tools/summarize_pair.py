"""The summary of the default pair in README and docs, from four results of `bench speed`.

    python tools/summarize_pair.py --benchmarks GREEDY.json SAMPLED.json
        --untuned GREEDY.json SAMPLED.json --machine TEXT --output docs/results/default-pair.json

Greedy and sampled results must be of the same prompts. `make results` then makes plot and tables.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.bench.figures import ALL, DEFINITIONS, WITHOUT_LOOPS

NAMES = {
    "gsm8k": "GSM8K test",
    "math500": "MATH-500",
    "aime25": "AIME25",
    "humaneval": "HumanEval",
    "mbpp": "MBPP sanitized test",
    "livecodebench": "LiveCodeBench v1",
    "mt-bench": "MT-Bench",
    "spec-bench": "Spec-Bench",
    "ifeval": "IFEval",
    "bfcl": "BFCL v4",
    "fresh": "written for this test",
}
ABOUT = {
    "benchmarks": ("all benchmark prompts", "the first of each set, in an order drawn by the seed"),
    "untuned": (
        "prompts from other sets",
        "likewise; no training prompt comes from these sets, the last of which is "
        "benchmarks/fresh.jsonl",
    ),
}

Result = Mapping[str, Any]


def read(path: Path) -> Result:
    """A result of `bench speed`."""
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    if found.get("result") != "speed":
        raise SystemExit(f"{path} is no result of `bench speed`")
    return found


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Tau and speed-up with its band, of a group's figures."""
    band = row["speedup_bands"]["plain"]
    ends = None if band is None or band["low"] is None else [band["low"], band["high"]]
    return {
        "tau": round(row["acceptance_length"], 3),
        "speedup": round(row["speedup_over_plain"], 3),
        "band": None if ends is None else [round(end, 3) for end in ends],
    }


def row_of(name: str, group: str, greedy: Result, sampled: Result) -> dict[str, Any]:
    """One row of the tables."""
    return {
        "name": name,
        "num_prompts": greedy["figures"][group]["num_prompts"],
        "greedy": figures(greedy["figures"][group]),
        "without_loops": None,
        "sampled": figures(sampled["figures"][group]),
    }


def run_of(kind: str, greedy: Result, sampled: Result) -> dict[str, Any]:
    """A run: its rows, and all of its prompts together."""
    groups = [name for name in greedy["figures"] if name not in (ALL, WITHOUT_LOOPS)]
    if groups != [name for name in sampled["figures"] if name not in (ALL, WITHOUT_LOOPS)]:
        raise SystemExit(f"the greedy and the sampled result of {kind!r} have other sets")
    name, prompts = ABOUT[kind]
    everything = row_of(name, ALL, greedy, sampled)
    straight = greedy["figures"][WITHOUT_LOOPS]
    everything["without_loops"] = {"num_outputs": straight["num_prompts"], **figures(straight)}
    counted = [result["figures"][ALL] for result in (greedy, sampled)]
    return {
        "date": greedy["date"][:10],
        "commit": greedy["git_commit"],
        "command": [result["command"] for result in (greedy, sampled)],
        "prompts": prompts,
        "max_tokens": greedy["settings"]["max_tokens"],
        "sampled_temperature": sampled["settings"]["temperature"],
        "same_tokens": {
            "num_outputs": sum(row["num_prompts"] for row in counted),
            "num_same": sum(row["num_identical"] for row in counted),
        },
        "rows": [row_of(NAMES.get(group, group), group, greedy, sampled) for group in groups],
        "all": everything,
    }


def summary(runs: Mapping[str, Sequence[Result]], machine: str) -> dict[str, Any]:
    """What the report reads. runs: greedy and sampled result of each."""
    first = next(iter(runs.values()))[0]
    return {
        "result": "summary",
        "result_version": first["result_version"],
        "about": "Drafted over plain decoding of the default pair, one request at a time.",
        "machine": machine,
        "versions": {key: first[key] for key in ("torch", "transformers", "python")},
        "target": "smollm2-135m: SmolLM2-135M-Instruct, its 4-bit (Q4_1) file dequantized to "
        "bfloat16",
        "drafter": "smollm2-135m-dflash as the package has it: adaptive, with trees, lookup and "
        "n-grams",
        "baseline": "plain decoding by this engine, without drafts; each prompt both ways in turns",
        "definitions": {
            key: DEFINITIONS[key] for key in ("acceptance_length", "speedup_over_plain")
        },
        "runs": {kind: run_of(kind, *results) for kind, results in runs.items()},
    }


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in ABOUT:
        parser.add_argument(f"--{kind}", type=Path, nargs=2, required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = {kind: [read(path) for path in vars(args)[kind]] for kind in ABOUT}
    found = summary(runs, args.machine)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

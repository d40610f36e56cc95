"""The summary of the default pair in README and docs, from four results of `bench speed`.

    python tools/summarize_pair.py --benchmarks GREEDY.json SAMPLED.json
        --untuned GREEDY.json SAMPLED.json --machine TEXT --output docs/results/default-pair.json

Greedy and sampled results must be of the same prompts, and all four of the same commit, machine,
versions, threads and models. `make results` then makes plot and tables.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockdraft.bench.measures import MEASURES, bootstrap_band, summed_by_prompt
from blockdraft.bench.speed.figures import DEFINITIONS

NAMES = {
    "gsm8k": "GSM8K test",
    "math500": "MATH-500",
    "aime25": "AIME25",
    "humaneval": "HumanEval",
    "mbpp": "MBPP sanitized test",
    "livecodebench": "LiveCodeBench v1",
    "mt-bench": "MT-Bench",
    "specbench": "Spec-Bench",
    "ifeval": "IFEval",
    "tool": "BFCL v4, with tools",
}
"""Of sets, by what the prompts' categories or ids begin with."""
OWN = "written for this test"
"""All others: those of benchmarks/fresh.jsonl."""
ABOUT = {
    "benchmarks": ("all benchmark prompts", "so many of each set, drawn by the seed"),
    "untuned": (
        "prompts from other sets",
        "likewise; no training prompt comes from these sets, the last of which is "
        "benchmarks/fresh.jsonl",
    ),
}

SETTING = ("git_commit", "machine", "versions", "threads", "config")
"""What all results have in common; `config` names the models and how they were loaded."""
PROMPT = ("category", "id", "turn", "num_tools", "thinking")
"""What tells a turn of a prompt from others."""

Result = Mapping[str, Any]
Turn = Mapping[str, Any]


def read(path: Path) -> Result:
    """A result of one run of `bench speed`."""
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    if found.get("result") != "speed" or len(found["runs"]) != 1:
        raise SystemExit(f"{path} is no result of one run of `bench speed`")
    return found


def set_of(turn: Turn) -> str:
    """The name of the set that a prompt comes from."""
    for label in (turn["category"], turn["id"]):
        for begin, name in NAMES.items():
            if label == begin or label.startswith(f"{begin}-"):
                return name
    return OWN


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Tau, and speed-up with its band, over some turns of prompts."""
    rows = np.array(
        [
            (len(side["token_ids"]), side["total_seconds"])
            for turn in turns
            for side in (turn["drafted"], turn["plain"])
        ]
    ).reshape(len(turns), 4)
    tokens, seconds, plain_tokens, plain_seconds = rows.sum(axis=0)
    # An output of a single token has no pass.
    passes = np.array([turn["drafted"].get("num_passes", 0) for turn in turns])
    conversations = summed_by_prompt(rows, [(turn["category"], turn["id"]) for turn in turns])
    taus = np.array([turn["drafted"].get("acceptance_length", 0.0) for turn in turns])
    return {
        "tau": round((taus * passes).sum() / passes.sum(), 3),
        "speedup": round(tokens / seconds / (plain_tokens / plain_seconds), 3),
        "band": None
        if len(conversations) < 2
        else [round(end, 3) for end in bootstrap_band(conversations)],
    }


def row_of(name: str, greedy: Sequence[Turn], sampled: Sequence[Turn]) -> dict[str, Any]:
    """One row of the tables."""
    return {
        "name": name,
        "num_prompts": len(greedy),
        "greedy": figures(greedy),
        "without_loops": None,
        "sampled": figures(sampled),
    }


def run_of(kind: str, greedy: Result, sampled: Result) -> dict[str, Any]:
    """A run: its rows, and all of its prompts together."""
    turns = [result["runs"][0]["prompts"] for result in (greedy, sampled)]
    asked = [[[turn[name] for name in PROMPT] for turn in own] for own in turns]
    if asked[0] != asked[1]:
        raise SystemExit(
            f"the greedy and the sampled result of {kind!r} have different prompts; measure both "
            "with the same --prompts, --limit and --seed"
        )
    configs = [result["runs"][0]["config"] for result in (greedy, sampled)]
    if configs[0]["temperature"] != 0 or configs[1]["temperature"] == 0:
        raise SystemExit(
            f"the results of {kind!r} have the temperatures {configs[0]['temperature']} and "
            f"{configs[1]['temperature']}; give the greedy result first, then a sampled one"
        )
    if configs[0]["max_tokens"] != configs[1]["max_tokens"]:
        raise SystemExit(
            f"the results of {kind!r} have max_tokens {configs[0]['max_tokens']} and "
            f"{configs[1]['max_tokens']}; measure both with the same --max-tokens"
        )
    by_set = [dict[str, list[Turn]]() for _ in turns]
    for own, found in zip(turns, by_set, strict=True):
        for turn in own:
            found.setdefault(set_of(turn), []).append(turn)
    name, prompts = ABOUT[kind]
    everything = row_of(name, *turns)
    straight = [turn for turn in turns[0] if not turn["loops"]]
    everything["without_loops"] = {"num_outputs": len(straight), **figures(straight)}
    return {
        "date": greedy["date"][:10],
        "commit": greedy["git_commit"],
        "command": [" ".join(result["command"]) for result in (greedy, sampled)],
        "prompts": prompts,
        "max_tokens": configs[1]["max_tokens"],
        "sampled_temperature": configs[1]["temperature"],
        "same_tokens": {
            "num_outputs": sum(map(len, turns)),
            "num_same": sum(turn["identical"] for own in turns for turn in own),
        },
        "rows": [row_of(each, by_set[0][each], by_set[1][each]) for each in by_set[0]],
        "all": everything,
    }


def check_alike(results: Sequence[Result]) -> None:
    """Refuse results that one table must not show together."""
    for name in SETTING:
        values = [result.get(name) for result in results]
        if other := [value for value in values if value != values[0]]:
            raise SystemExit(
                f"the results differ in {name}: {values[0]} and {other[0]}; measure all of them "
                "with the same code, machine and models"
            )
    if any(str(result["git_commit"]).endswith("+") for result in results):
        raise SystemExit(
            f"the results are of {results[0]['git_commit']}, code with changes that no commit has; "
            "commit them and measure again"
        )


def summary(runs: Mapping[str, Sequence[Result]], machine: str) -> dict[str, Any]:
    """What the report reads. runs: greedy and sampled result of each."""
    check_alike([result for results in runs.values() for result in results])
    first = next(iter(runs.values()))[0]
    return {
        "result": "summary",
        "result_version": first["result_version"],
        "about": "Drafted over plain decoding of the default pair, one request at a time.",
        "machine": machine,
        "versions": first["versions"],
        "target": "smollm2-135m: SmolLM2-135M-Instruct, its 4-bit (Q4_1) file dequantized to "
        "bfloat16",
        "drafter": "smollm2-135m-dflash as the package has it: adaptive, with trees, lookup, "
        "n-grams and a Hydra head",
        "baseline": "plain decoding by this engine, without drafts; each prompt both ways in turns",
        "definitions": {
            "num_prompts": DEFINITIONS["num_prompts"],
            "tau": DEFINITIONS["acceptance_length"],
            "speedup": DEFINITIONS["speedup_over_plain"],
            "band": MEASURES["band"],
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

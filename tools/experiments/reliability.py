"""Predicted against kept: how well probabilities of candidates hold, before and after calibration.

    python tools/experiments/reliability.py --prompts gsm8k_test.jsonl:97 --limit 4 --tokens 64

A number behind a file takes every so manieth row. All prompts run at once, and all that is drafted
is verified, so that what is counted does not depend on this machine's speed. Each node is judged
whose parent was kept: what the drafter believed of it, what the calibration believed before it was
told, and whether the target chose it.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft import LLM, SamplingParams
from blockdraft.allocation.calibration import Calibration
from blockdraft.bench.workload import read_workload
from blockdraft.core.plan import ROOT

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass
class Bins:
    """Verdicts by what was predicted of them: number, sum of predictions, number kept."""

    sums: list[list[float]] = field(default_factory=lambda: [[0, 0.0, 0] for _ in EDGES])

    def add(self, predicted: float, kept: bool) -> None:
        """Count one verdict."""
        place = next(i for i, edge in enumerate(EDGES) if predicted <= edge + 1e-12)
        self.sums[place][0] += 1
        self.sums[place][1] += predicted
        self.sums[place][2] += kept

    @property
    def error(self) -> float:
        """Mean distance of predicted and kept over the bins, weighed by their verdicts (ECE)."""
        total = sum(num for num, _, _ in self.sums)
        return sum(abs(predicted - kept) for _, predicted, kept in self.sums) / max(1, total)


class Judge:
    """Is shown what was verified, and holds beliefs against verdicts."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.bins: defaultdict[tuple[str, str], Bins] = defaultdict(Bins)

    def verified(self, plan: Any, logits: Any, verdicts: Any) -> None:
        """See Observer."""
        for planned, verdict in zip(plan, verdicts, strict=True):
            proposal, kept = planned.proposal, {ROOT, *verdict.nodes}
            if not proposal:
                continue
            sequence = planned.row.sequence
            sampled = sequence.params.temperature > 0
            chances = self.calibration.probabilities(sequence.key, proposal, sampled=sampled)
            for node, parent in enumerate(proposal.tree.parents):
                if parent in kept:
                    depth = str(proposal.tree.depths[node])
                    for name, paths in (("drafter", proposal.probabilities), ("mended", chances)):
                        above = 1.0 if parent == ROOT else paths[parent]
                        chance = paths[node] / above if above else 0.0
                        for part in ("all", depth):
                            self.bins[name, part].add(min(chance, 1.0), node in kept)
            self.calibration.record(sequence.key, proposal, verdict.nodes, sampled=sampled)

    def reported(self, outputs: Any) -> None:
        """See Observer."""


def main() -> None:
    """Print a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE[:STEP]")
    parser.add_argument("--limit", type=int, default=4, help="prompts of a file")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--nodes", type=int, default=15)
    options = parser.parse_args()
    prompts = []
    for given in options.prompts:
        file, _, step = given.partition(":")
        rows = read_workload(Path(file))[:: int(step or 1)][: options.limit]
        prompts += [[{"role": "user", "content": row.text}] for row in rows]
    llm = LLM(adaptive=False, num_draft_tokens=options.nodes, max_concurrency=len(prompts))
    print(f"{len(prompts)} prompts, {llm.dtype}")
    for temperature in options.temperature:
        judge = llm.engine.observer = Judge()
        llm.chat(
            prompts, SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=5)
        )
        _print(temperature, judge)


def _print(temperature: float, judge: Judge) -> None:
    print(f"\nT {temperature:g}: predicted, kept, verdicts: of the drafter | mended")
    for drafter, mended in zip(
        judge.bins["drafter", "all"].sums, judge.bins["mended", "all"].sums, strict=True
    ):
        told = [
            f"{predicted / num:.3f} {kept / num:.3f} {num:5.0f}" if num else " " * 17
            for num, predicted, kept in (drafter, mended)
        ]
        print("  |  ".join(told))
    for part in sorted({part for _, part in judge.bins}):
        before, after = (judge.bins[name, part].error for name in ("drafter", "mended"))
        print(f"error, depth {part}: {before:.3f} of the drafter, {after:.3f} mended")
    for key, line in sorted(judge.calibration._lines.items()):
        print(key, f"scale {line.scale:.2f} bias {line.bias:+.2f}")


if __name__ == "__main__":
    main()

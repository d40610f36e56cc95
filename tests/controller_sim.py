"""A machine whose costs and drafter are known, for the controller to be measured against."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockdraft.allocation.controller import Candidate, Controller
from blockdraft.allocation.costs import StepCosts

Rates = Callable[[int, float], Sequence[float]]
"""Acceptance by position, each given that all before were accepted, of a sequence at a time."""


@dataclass
class Machine:
    """Seconds of a step, without noise. The defaults are those of a small model on two cores."""

    base: float = 0.016
    row: float = 0.00045
    draft_base: float = 0.005
    slot: float = 0.0002
    project_base: float = 0.0003
    project_row: float = 0.00002
    aftermath: float = 1.0
    """Of drafts, on a step behind them that has none: so many times its seconds."""
    slowdown: Callable[[float], float] = lambda now: 1.0

    def forward(self, num_rows: int) -> float:
        return self.base + self.row * (num_rows - 1)

    def draft(self, num_sequences: int, num_slots: int) -> float:
        return self.draft_base + self.slot * num_sequences * num_slots if num_sequences else 0.0

    def project(self, num_tokens: int) -> float:
        return self.project_base + self.project_row * num_tokens if num_tokens else 0.0

    def costs(self, error: float = 0.0) -> StepCosts:
        """What a calibration finds; `error` tilts the costs of rows."""
        rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return StepCosts(
            [(n, self.forward(n)) for n in rows[:4]],
            [(n, self.forward(n) * (1 + error * (n > 1))) for n in rows],
            [(n, self.draft(1, n)) for n in (2, 6, 16, 32, 96, 192, 512)],
        )


@dataclass
class Result:
    seconds: float = 0.0
    num_tokens: int = 0
    plain_seconds: float = 0.0
    """What plain decoding takes for as many tokens."""
    plans: list[list[int]] = field(default_factory=list)

    @property
    def over_plain(self) -> float:
        return self.seconds / self.plain_seconds


def simulate(
    controller: Controller,
    machine: Machine,
    rates: Rates,
    num_sequences: int,
    *,
    seconds: float = 60.0,
    limit: int = 5,
    noise: float = 0.05,
    outliers: float = 0.005,
    limits: Sequence[int] | None = None,
    seed: int = 0,
) -> Result:
    """Decode with `num_sequences` sequences that never end. Outliers are steps of 4 times."""
    luck, result = random.Random(seed), Result()
    candidates = [
        Candidate(key, limit if limits is None else limits[key]) for key in range(num_sequences)
    ]
    pending = [0] * num_sequences
    while result.seconds < seconds:
        depths = controller.limits(candidates, 0)
        result.plans.append(depths)
        slowdown = machine.slowdown(result.seconds)
        num_drafting = sum(depth > 0 for depth in depths)
        num_tokens = projected = 0
        for key, depth in enumerate(depths):
            if depth:
                projected, pending[key] = projected + pending[key], 0
            chances = rates(key, result.seconds)
            kept = 0
            while kept < depth and luck.random() < chances[kept]:
                kept += 1
            controller.record(key, depth, kept)
            num_tokens += 1 + kept
            pending[key] += 1 + kept

        def noisy(exact: float) -> float:
            factor = luck.lognormvariate(0.0, noise) * slowdown  # noqa: B023
            return exact * factor * (4.0 if luck.random() < outliers else 1.0)

        forward = machine.forward(num_sequences + sum(depths))
        if len(result.plans) > 1 and any(result.plans[-2]) and not any(depths):
            forward *= machine.aftermath
        times = {
            "limits": 0.0002,
            "forward": noisy(forward),
            "draft": noisy(machine.draft(num_drafting, 1 + max(depths))),
            "project": noisy(machine.project(projected)),
        }
        controller.record_times(**times)
        # Noise and outliers fall on plain decoding too, so seconds without them are compared.
        exact = forward
        exact += machine.draft(num_drafting, 1 + max(depths)) + machine.project(projected)
        result.seconds += exact * slowdown
        result.num_tokens += num_tokens
        result.plain_seconds += (
            machine.forward(num_sequences) * num_tokens / num_sequences * slowdown
        )
    return result

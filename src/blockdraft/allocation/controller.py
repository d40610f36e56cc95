"""How many tokens each sequence drafts in a step: as many as pay, on this machine, at this load.

A step of n sequences that draft d tokens in all costs a target forward of n + d rows and a draft
forward; it commits one token a sequence, and each draft with the probability that the target keeps
it and all before it. `AdaptiveDepth` learns both and takes the depths with the most tokens per
second. 0 is plain decoding. No torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np

from blockdraft.allocation.acceptance import Acceptance
from blockdraft.allocation.costs import StepCosts
from blockdraft.allocation.depths import DepthSearch, Plan
from blockdraft.allocation.switch import MARGIN, Probes, Switch

_SEQUENCE_MEMORY = 40.0
_ENGINE_MEMORY = 256.0
"""Observations that a rate of acceptance remembers, of one sequence and of all."""
_FORGOTTEN_STEPS = 256
"""A sequence that was not tested for so many steps is believed to be like all the others."""

_TRUST = 0.88
"""Of the rate that is predicted of drafts where several sequences share a step, so much is
believed: the best of many plans was lucky in part. A predicted gain of 20 % was none with two
sequences (docs/experiments/concurrency.md); some of that came from slower steps behind drafts,
which are charged to drafts by now."""
_IDLE_STEPS = 4
"""Where nothing was weighed, one step of so many is learned from."""
_OUTLIER = 2.0
"""A step counts as at most so many times its predicted seconds."""

_PROBE_DEPTH = 3
"""Tokens that a probed sequence drafts beyond its best depth."""
_PROBED_SEQUENCES = 4
_HOPED_RATE = 0.9
"""Acceptance by position that a probe can hope to find, as in a text that repeats itself. Where
even that would not pay there is nothing to find."""
_SURE_GAIN = 1.25
"""From this gain on no plain step is spent on comparison: no error of the costs is so large."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decoding sequence of the step about to run.

    `limit` is the most tokens that it may draft now: the request's own cap, the room that is left,
    the drafter's block. With 0 it never drafts.
    """

    key: int
    limit: int


@dataclass(frozen=True, slots=True)
class DepthUse:
    """Which depths were used. A pass is one sequence in one step.

    `shares` is the share of passes by depth, for depths that occurred. `num_switches` counts
    changes between plain decoding and drafting, `num_probes` the steps that tried something else.
    """

    num_passes: int
    mean_depth: float
    shares: dict[int, float]
    num_switches: int = 0
    num_probes: int = 0


class Controller:
    """Decides how many tokens each sequence drafts, and is told what came of it."""

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()

    def limits(self, candidates: Sequence[Candidate], num_other_rows: int) -> list[int]:
        """Most tokens that each candidate drafts; `num_other_rows` are prompt rows beside them."""
        raise NotImplementedError

    def record(self, key: int, num_drafted: int, num_accepted: int) -> None:
        """Take the outcome of one candidate of the last limits, before any cut at a stop."""

    def record_times(self, *, limits: float, project: float, draft: float, forward: float) -> None:
        """Take the seconds of the last step, after its outcomes.

        limits: making them. project: of the features of what was committed. draft: the draft
        forward. forward: the target's, verification and commit.
        """

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""

    def summary(self) -> DepthUse:
        """What was planned so far."""
        num_passes = self._used.total()
        return DepthUse(
            num_passes=num_passes,
            mean_depth=sum(k * count for k, count in self._used.items()) / max(1, num_passes),
            shares={depth: self._used[depth] / num_passes for depth in sorted(self._used)},
        )


class FixedDepth(Controller):
    """Drafts as many tokens as the limits allow, and learns nothing."""

    def limits(self, candidates: Sequence[Candidate], num_other_rows: int) -> list[int]:
        """See `Controller`."""
        depths = [candidate.limit for candidate in candidates]
        self._used.update(depths)
        return depths


@dataclass(slots=True)
class _Tracked:
    """One sequence: its acceptance, and the steps of its last test and probe.

    `acceptance` is that of all sequences until the first test, and again long after the last.
    """

    acceptance: Acceptance
    tested_at: int = -1
    probed_at: int = -1


@dataclass(slots=True)
class _Step:
    """The step that was planned last. `followed` is the plan that a probe deviates from."""

    plan: Plan
    plain: Plan
    followed: Plan
    num_other_rows: int
    best_depths: dict[int, int] = field(default_factory=dict)
    """Of the sequences that a probe makes draft further, by key."""
    paid: float = 0.0
    """For the probe, in seconds."""
    aftermath: float = 0.0
    """Seconds that the probe costs the next step."""
    is_idle: bool = False
    """Drafting is off, and no other plan was looked at."""
    num_accepted: int = 0
    surprised: bool = False
    caught_up: bool = True
    """Whoever drafted did so in the step before, so its features are those of one step."""

    def loss(self, seconds: float, tokens: float) -> float:
        """What a probe of so many seconds and tokens costs, in seconds."""
        rate = _believed_tokens(self.followed) / self.followed.seconds
        return seconds + self.aftermath - tokens / rate


class AdaptiveDepth(Controller):
    """Takes the depths that give the most tokens per second, plain decoding among them.

    Drafting is switched on when it is believed to gain 5 % (for several sequences: 19 % by
    prediction), and off when plain decoding is best, or when the tokens of the last drafted steps
    were not worth their time. Rare probes look for what following the plan cannot show: a drafter
    that has become good, blocks that should be longer, and, where drafting gains little, what a
    plain step costs by now.

    The same history gives the same plans. `max_depth` is the most that a sequence can draft.
    """

    def __init__(self, costs: StepCosts, max_depth: int) -> None:
        super().__init__()
        self._costs = costs
        self._everyone = Acceptance(max_depth, _ENGINE_MEMORY)
        self._tracked: dict[int, _Tracked] = {}
        self._num_steps = 0
        self._num_candidates = 0
        self._step: _Step | None = None
        self._behind_drafts = False
        self._news = True
        """All is new, or a sequence was tested. Without it, plain goes on until a probe is due."""
        self._switch = Switch()
        self._probes = Probes()

    def limits(self, candidates: Sequence[Candidate], num_other_rows: int) -> list[int]:
        """See `Controller`."""
        self._num_steps += 1
        depths = [0] * len(candidates)
        self._step = None
        limit = max((candidate.limit for candidate in candidates), default=0)
        if limit:
            plain = Plan(depths, len(depths), self._costs.plain(len(depths)))
            self._step = self._choose(plain, candidates, limit, num_other_rows)
            depths = self._step.plan.depths
        self._used.update(depths)
        return depths

    def _choose(
        self, plain: Plan, candidates: Sequence[Candidate], limit: int, num_other_rows: int
    ) -> _Step:
        if any(candidate.key not in self._tracked for candidate in candidates):
            self._welcome(candidates)
        if len(candidates) < self._num_candidates:
            self._probes.hurry()
        self._num_candidates = len(candidates)
        self._probes.pass_step(plain.seconds)
        if not (self._switch.on or self._news or self._probes.due):
            self._switch.update(1.0)
            return _Step(plain, plain, plain, num_other_rows, is_idle=True)
        if not (self._switch.on or self._news or self._is_promising(plain, limit)):
            self._probes.postpone()
            self._switch.update(1.0)
            return _Step(plain, plain, plain, num_other_rows, is_idle=True)
        self._news = False
        self._forget_old(candidates)
        search = DepthSearch(self._costs, self._survival(candidates), num_other_rows)
        best = search.best()
        gain = _trust(len(candidates)) * best.rate / plain.rate if best.num_drafting else 1.0
        self._switch.update(gain)
        followed = best if self._switch.on and gain > 1 else plain
        step = _Step(followed, plain, followed, num_other_rows)
        if self._probes.due:
            self._probe(step, search, candidates)
        return step

    def _is_promising(self, plain: Plan, limit: int) -> bool:
        """Drafting would pay if nearly all was kept: of one sequence, or of all."""
        num, depths = len(plain.depths), np.arange(1, limit + 1)
        kept = (_HOPED_RATE**depths).cumsum()
        for num_drafting in {1, num}:
            seconds = self._costs.forward(num + num_drafting * depths)
            seconds += self._costs.draft(num_drafting, 1 + depths)
            seconds += self._costs.project(num_drafting)
            rates = _trust(num) * (num + num_drafting * kept) / seconds
            if rates.max() >= (1 + MARGIN) * plain.rate:
                return True
        return False

    def _survival(self, candidates: Sequence[Candidate]) -> list[list[float]]:
        """Of each candidate, up to the largest limit; 0 beyond its own."""
        longest = max(candidate.limit for candidate in candidates)
        survival = []
        for candidate in candidates:
            rates = self._tracked[candidate.key].acceptance.rates[: candidate.limit]
            survival.append([*accumulate(rates, mul), *[0.0] * (longest - candidate.limit)])
        return survival

    def _welcome(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self._tracked.setdefault(candidate.key, _Tracked(self._everyone))
        self._probes.hurry()

    def _forget_old(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            tracked = self._tracked[candidate.key]
            if self._num_steps - tracked.tested_at > _FORGOTTEN_STEPS:
                tracked.acceptance = self._everyone

    def _probe(self, step: _Step, search: DepthSearch, candidates: Sequence[Candidate]) -> None:
        """Change the step into a probe, if there is something to learn and it can be afforded."""
        followed = step.followed
        depths = list(followed.depths)
        # Who was surprising keeps an early place, so that a few probes in a row settle it.
        further = sorted(
            (i for i, candidate in enumerate(candidates) if candidate.limit > depths[i]),
            key=lambda i: self._tracked[candidates[i].key].probed_at,
        )[:_PROBED_SEQUENCES]
        unsure = followed.num_drafting and followed.rate < _SURE_GAIN * step.plain.rate
        if unsure and (self._probes.num_probes % 2 or not further):
            depths, further = step.plain.depths, []
        for i in further:
            depths[i] = min(candidates[i].limit, depths[i] + _PROBE_DEPTH)
        if depths == followed.depths:
            return
        probe, num = search.price(depths), len(depths)
        step.aftermath = 0.0 if followed.num_drafting else self._costs.aftermath(num)
        step.paid = step.loss(probe.seconds, _believed_tokens(probe))
        if self._probes.afford(step.paid, step.plain.seconds):
            step.plan = probe
            step.best_depths = {candidates[i].key: followed.depths[i] for i in further}

    def record(self, key: int, num_drafted: int, num_accepted: int) -> None:
        """See `Controller`."""
        step = self._step
        if step is None or not num_drafted:
            return
        tracked = self._tracked[key]
        idle = self._num_steps - 1 - tracked.tested_at
        tracked.tested_at = self._num_steps
        step.caught_up = step.caught_up and not idle
        if tracked.acceptance is self._everyone:
            tracked.acceptance = self._everyone.start(_SEQUENCE_MEMORY)
        elif idle:
            tracked.acceptance.fade(idle)
        tracked.acceptance.record(num_drafted, num_accepted)
        self._everyone.record(num_drafted, num_accepted)
        self._news = True
        step.num_accepted += num_accepted
        if key in step.best_depths:
            if num_accepted > step.best_depths[key]:
                step.surprised = True
            else:
                tracked.probed_at = self._num_steps

    def record_times(self, *, limits: float, project: float, draft: float, forward: float) -> None:
        """See `Controller`."""
        step, behind_drafts = self._step, self._behind_drafts
        self._behind_drafts = step is not None and step.plan.num_drafting > 0
        if step is None:
            return
        planned, num = step.plan, len(step.plan.depths)
        num_tokens = num + step.num_accepted
        if planned is not step.followed:
            seconds = min(limits + draft + forward, _OUTLIER * planned.seconds)
            if step.num_other_rows:
                seconds = planned.seconds - float(self._costs.project(planned.num_drafting))
            # Not only what was predicted: the features of a prompt may have waited until now.
            loss = step.loss(seconds + project, num_tokens)
            self._probes.settle(step.surprised, step.paid - loss)
        # Prompt rows cost otherwise: only the last of them goes through the head.
        if step.num_other_rows:
            return
        if not planned.num_drafting:
            if behind_drafts:
                is_known = not self._switch.on
                self._costs.record_plain_behind_drafts(num, forward, is_known=is_known)
            # Right behind a forward even this takes its time.
            elif not step.is_idle or self._num_steps % _IDLE_STEPS == 0:
                self._costs.record_plain(num, forward)
        else:
            # Without drafts there would be no plan to make.
            self._costs.record_forward(num + sum(planned.depths), limits + forward)
            self._costs.record_draft(planned.num_drafting, 1 + max(planned.depths), draft)
            if step.caught_up:
                self._costs.record_project(planned.num_drafting, project)
            if planned is step.followed:
                worth = num_tokens * step.plain.seconds / num
                self._switch.measure(worth, planned.seconds)

    def close(self, key: int) -> None:
        """See `Controller`."""
        self._tracked.pop(key, None)

    def summary(self) -> DepthUse:
        """See `Controller`."""
        return replace(
            super().summary(),
            num_switches=self._switch.num_switches,
            num_probes=self._probes.num_probes,
        )


def _believed_tokens(plan: Plan) -> float:
    """Of a plan's tokens; plain ones are certain."""
    return plan.tokens * (_trust(len(plan.depths)) if plan.num_drafting else 1.0)


def _trust(num_sequences: int) -> float:
    return _TRUST if num_sequences > 1 else 1.0

"""Probabilities that hold: what drafters believe, corrected by what the target decided. No torch.

Products of draft probabilities are overconfident, each drafter in its own way, and the deeper the
more. So the probability of a node given its parent is corrected by a logistic line,

    logit(calibrated) = scale * logit(believed) + bias + offset of the request,

one for each source, depth, and greedy or sampled requests. Its scale stays positive, so the order
of the tokens of one slot stays what it was.
"""

from collections.abc import Sequence
from math import exp, inf, log

from blockdraft.core.plan import ROOT, Proposal

_DEEPEST = 8
"""Depths from here on share a line."""
_LARGEST_LOGIT = 6.0
"""Probabilities are clamped to 0.0025 to 0.9975: a drafter that always says 1 can be corrected."""
_SUREST = 1 / (1 + exp(-_LARGEST_LOGIT))
_LEAST_SURE = 1 - _SUREST
_SCALE_VARIANCE, _BIAS_VARIANCE, _OFFSET_VARIANCE = 0.05, 1.0, 0.3
"""How far scale, bias and a request's offset may be from 1, 0 and 0, before anything is known."""
_LARGEST_CHANGE = 1.0
"""One verdict moves the corrected logit of its node by at most so much."""
_SMALLEST_SCALE, _LARGEST_SCALE = 0.1, 4.0
_LARGEST_BIAS = 8.0
_LARGEST_OFFSET = 2.0
_KEPT = 1 - 1 / 512
_KEPT_OF_REQUEST = 1 - 1 / 128
"""What is left of the weight of earlier verdicts with each new one."""

Key = tuple[str, int, bool]
"""Of a line: the source of a node, its depth, and whether the request is sampled."""


class Line:
    """A logistic line, learned verdict by verdict (recursive least squares, linearized).

    What is known of scale and bias is kept as information, the inverse of their covariance: what
    verdicts told, which fades, and what was known at the start, which does not. So it is bounded,
    also where a drafter always believes the same, which tells little of scale and bias apart.
    """

    __slots__ = ("_cross", "_of_bias", "_of_scale", "bias", "scale")

    def __init__(self) -> None:
        self.scale, self.bias = 1.0, 0.0
        self._of_scale, self._of_bias = 1 / _SCALE_VARIANCE, 1 / _BIAS_VARIANCE
        self._cross = 0.0

    def at(self, belief: float) -> float:
        """The corrected logit of a logit."""
        return self.scale * belief + self.bias

    def record(self, belief: float, kept: bool, chance: float) -> None:
        """Learn from one verdict about a node that was believed to be kept with `chance`."""
        weight = chance * (1 - chance)
        self._of_scale = _faded(self._of_scale, 1 / _SCALE_VARIANCE) + weight * belief * belief
        self._of_bias = _faded(self._of_bias, 1 / _BIAS_VARIANCE) + weight
        self._cross = _faded(self._cross, 0.0) + weight * belief
        # The covariances of scale and bias with the corrected logit, and its variance.
        determinant = self._of_scale * self._of_bias - self._cross * self._cross
        with_scale = (self._of_bias * belief - self._cross) / determinant
        with_bias = (self._of_scale - self._cross * belief) / determinant
        variance = with_scale * belief + with_bias
        change = kept - chance
        change = min(max(change, -_LARGEST_CHANGE / variance), _LARGEST_CHANGE / variance)
        self.scale += with_scale * change
        self.bias += with_bias * change
        self.scale = min(max(self.scale, _SMALLEST_SCALE), _LARGEST_SCALE)
        self.bias = min(max(self.bias, -_LARGEST_BIAS), _LARGEST_BIAS)


def _faded(information: float, first: float) -> float:
    """What earlier verdicts told counts a little less; what was known at the start does not."""
    return first + _KEPT * (information - first)


class Offset:
    """How much better or worse a request is guessed than others: what its logits are shifted by."""

    __slots__ = ("_variance", "value")

    def __init__(self) -> None:
        self.value, self._variance = 0.0, _OFFSET_VARIANCE

    def record(self, kept: bool, chance: float) -> None:
        """Learn from one verdict."""
        self._variance /= 1 + chance * (1 - chance) * self._variance
        self.value += self._variance * (kept - chance)
        self.value = min(max(self.value, -_LARGEST_OFFSET), _LARGEST_OFFSET)
        self._variance = min(self._variance / _KEPT_OF_REQUEST, _OFFSET_VARIANCE)


class Calibration:
    """Corrects the probabilities of proposals, and is told what the target kept of them."""

    def __init__(self) -> None:
        self._lines: dict[Key, Line] = {}
        self._offsets: dict[int, Offset] = {}

    def probabilities(self, key: int, proposal: Proposal, *, sampled: bool) -> list[float]:
        """Of each node: that the target chooses the path to it; never rising along a path.

        key: of the sequence. sampled: whether its temperature is above 0.
        """
        offset = self._offsets[key].value if key in self._offsets else 0.0
        beliefs = _beliefs(proposal)
        found: list[float] = []
        for node, parent in enumerate(proposal.tree.parents):
            line = self._line(proposal, node, sampled)
            above = 1.0 if parent == ROOT else found[parent]
            found.append(above * _chance(line.at(beliefs[node]) + offset))
        return found

    def record(
        self, key: int, proposal: Proposal, kept_nodes: Sequence[int], *, sampled: bool
    ) -> None:
        """Learn from a verdict: of each node whose parent was kept it says whether it was right."""
        kept = {ROOT, *kept_nodes}
        offset = self._offsets.setdefault(key, Offset())
        beliefs = _beliefs(proposal)
        for node, parent in enumerate(proposal.tree.parents):
            if parent in kept:
                line = self._line(proposal, node, sampled)
                chance = _chance(line.at(beliefs[node]) + offset.value)
                line.record(beliefs[node], node in kept, chance)
                offset.record(node in kept, chance)

    def _line(self, proposal: Proposal, node: int, sampled: bool) -> Line:
        key = proposal.sources[node], min(proposal.tree.depths[node], _DEEPEST), sampled
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line()
        return line

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        self._offsets.pop(key, None)


def _beliefs(proposal: Proposal) -> list[float]:
    """Of each node the logit of its probability given its parent."""
    found = []
    for parent, probability in zip(proposal.tree.parents, proposal.probabilities, strict=True):
        above = 1.0 if parent == ROOT else proposal.probabilities[parent]
        found.append(logit(probability / above if above > 0.0 else 0.0))
    return found


def logit(probability: float) -> float:
    """The logit of a probability, in bounds; of what is no number the lowest."""
    # For each candidate of every step.
    if _LEAST_SURE < probability < _SUREST:
        return log(probability / (1 - probability))
    return _LARGEST_LOGIT if _SUREST <= probability < inf else -_LARGEST_LOGIT


def _chance(logit: float) -> float:
    """The probability of a logit, which is in bounds."""
    return 1 / (1 + exp(-logit))

"""The draft context against one computed from scratch.

What the drafter knows of the target never shows in the output: features of the wrong tokens only
make it guess worse. So the keys and values that it holds in the middle of a run are compared with
those of the features of one forward over the same tokens, or, where a drafter reads no features,
of the tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Tokens
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.context import LayerKV
from blockdraft.proof.cases import Case
from blockdraft.proof.lone import lone_sequence
from blockdraft.proof.ways import TREE_SIZE
from blockdraft.speculate.drafters.lazy_context import LazyContext

BOUNDS = {torch.bfloat16: 0.1, torch.float32: 1e-3, torch.float64: 1e-9}
"""Relative deviations that rounding may make: the projection, unlike the target, is not exact. The
features of a neighbor are off by about 1."""


@dataclass(frozen=True, slots=True)
class ContextCheck:
    """The largest deviation of a token's keys or values from those that they should be.

    Relative to their norm, over all draft layers and `num_tokens` tokens.
    """

    case_id: str
    num_tokens: int
    deviation: float
    bound: float

    @property
    def is_right(self) -> bool:
        """True if rounding explains what deviates, and there was something to look at."""
        return self.num_tokens > 0 and self.deviation <= self.bound


def keeps_context(engine: Engine) -> bool:
    """True if its drafter has a context to look at: a language model has a cache of its own."""
    return isinstance(engine.drafter, LazyContext)


def check_context(engine: Engine, case: Case) -> ContextCheck:
    """Decode a case with whole drafts, look at its draft context after each, keep the last look.

    Nothing may be running, and the engine `keeps_context`.
    """
    drafter = engine.drafter
    assert isinstance(drafter, LazyContext)
    # Alone: where others propose as much, it would not draft.
    params = SamplingParams(
        max_tokens=case.params.max_tokens, ignore_eos=True, drafters=(drafter.kind,)
    )
    # Adaptive drafting gives a bad drafter a rest. What is kept of a chain always comes first, and
    # what is kept of a tree may lie anywhere.
    engine.use_fixed_drafting(TREE_SIZE * drafter.max_nodes if engine.target.takes_trees else None)
    key = engine.add(case.prompt_ids, params)
    sequence = engine.progress[key].sequence
    held: list[LayerKV] = []
    positions: Sequence[int] = ()
    try:
        while engine.has_work:
            engine.step()
            if sequence.finish_reason is None and drafter.num_written(key):
                held = _held(drafter, key)
                positions = drafter.contexts.positions(key, drafter.num_written(key))
    finally:
        engine.take(key)
    deviation = bound = 0.0
    if positions:
        expected = _computed(engine, drafter, sequence, positions)
        deviation = max(_deviation(one, other) for one, other in zip(held, expected, strict=True))
        bound = BOUNDS[held[0][0].dtype]
    return ContextCheck(case.id, len(positions), deviation, bound)


@torch.inference_mode()
def _held(drafter: LazyContext, key: int) -> list[LayerKV]:
    """A copy of the keys and values of each draft layer."""
    view = drafter.contexts.view([key], [drafter.num_written(key)])
    config, weight = drafter.model.config, drafter.model.fc.weight
    empty = weight.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
    found = []
    for layer in range(config.num_hidden_layers):
        k, v = view.extend(layer, empty, empty)
        found.append((k.clone(), v.clone()))
    return found


@torch.inference_mode()
def _computed(
    engine: Engine, drafter: LazyContext, decoded: Tokens, positions: Sequence[int]
) -> list[LayerKV]:
    """Keys and values of each draft layer at rising positions; the target reads all at once."""
    token_ids = decoded.token_ids[: positions[-1] + 1]
    num_left = decoded.longest - len(token_ids)
    with lone_sequence(engine, token_ids, num_left, features=True) as sequence:
        row = Row(sequence, token_ids, 0)
        features = engine.target.forward(ForwardPlan([PlannedRow(row)])).features_of(0)
    found = drafter.fresh_context(token_ids, features)
    places = torch.tensor(positions, device=found[0][0].device)
    return [(k[:, :, places], v[:, :, places]) for k, v in found]


def _deviation(found: LayerKV, expected: LayerKV) -> float:
    """The largest over a layer's tokens: of the keys, or of the values."""
    return max(map(_largest_deviation, found, expected))


def _largest_deviation(found: Tensor, expected: Tensor) -> float:
    """[1, kv_heads, tokens, head_dim] each; a token's heads are looked at together."""
    difference = (found.double() - expected.double()).norm(dim=(1, 3))
    relative = difference / expected.double().norm(dim=(1, 3)).clamp_min(1e-30)
    # Python's max would drop what is no number, beside one that is.
    return float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max())

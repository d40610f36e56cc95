"""What a drafter would gain on known answers, as it is configured and with a value changed.

A wrong value raises no error; it only makes guesses worse. So the drafter guesses behind every
token of answers that are known, from features of the target computed once, and the same again with
layer ids one lower or higher, or with the target's rotation. What does better was meant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.sequence import Row
from blockdraft.engine.bundled_prompts import BundledAnswer
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.context import ConcatContext
from blockdraft.models.draft.denoising import denoise, greedy
from blockdraft.models.draft.masks import block_masks
from blockdraft.models.draft.modules import Rotary
from blockdraft.models.layers.graphs import without_graphs
from blockdraft.models.supported import layer_output
from blockdraft.models.target.transformers import TransformersTarget
from blockdraft.proof.lone import lone_sequence
from blockdraft.speculate.drafters.dflash import DFlashDrafter

AS_CONFIGURED = "as configured"
LEAST_GAIN = 0.02
"""Of tau, below which no variant is called better."""
STANDARD_ERRORS = 3.0
"""By which the mean gain over the texts must differ from nothing: with 20 texts, chance does that
less than once in 200 times."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A change of the drafter's config."""

    name: str
    layer_ids: tuple[int, ...]
    rope: Mapping[str, Any]


@dataclass(slots=True)
class Offline:
    """tau of every text for each variant, and guesses that are padding of the vocabulary.

    tau is one and the guesses that the answer agrees with, mean over the anchors of a text.
    """

    taus: dict[str, list[float]] = field(default_factory=dict)
    num_guesses: int = 0
    num_padding: int = 0

    @property
    def num_texts(self) -> int:
        """That were measured: not those of a single token."""
        return len(self.taus[AS_CONFIGURED])

    @property
    def padding_share(self) -> float:
        """Of all guesses of the configured drafter."""
        return self.num_padding / max(1, self.num_guesses)

    def tau(self, variant: str) -> float:
        """Mean over the texts."""
        return fmean(self.taus[variant])

    def is_better(self, variant: str) -> bool:
        """True if a variant does better beyond chance; one that was not tried does not."""
        if len(self.taus.get(variant, ())) < 2:
            return False
        usual = self.taus[AS_CONFIGURED]
        gains = [other - own for other, own in zip(self.taus[variant], usual, strict=True)]
        error = stdev(gains) / sqrt(len(gains))
        least = max(LEAST_GAIN * fmean(usual), STANDARD_ERRORS * error)
        return fmean(gains) > least

    def change(self, variant: str) -> str:
        """Both figures in words."""
        return f"{self.tau(variant):.2f} instead of {self.tau(AS_CONFIGURED):.2f}"

    def described(self) -> str:
        """All figures on one line."""
        return ", ".join(f"{name} {self.tau(name):.2f}" for name in self.taus)


def variants_of(
    config: DraftConfig, num_layers: int, target_rope: Mapping[str, Any]
) -> list[Variant]:
    """The config as it is, and what it is most often mistaken for."""
    ids, rope = config.target_layer_ids, config.rope
    found = [Variant(AS_CONFIGURED, ids, rope)]
    for name, by in (("one lower", -1), ("one higher", 1)):
        moved = tuple(index + by for index in ids)
        if moved and min(moved) >= 0 and max(moved) < num_layers:
            found.append(Variant(name, moved, rope))
    if dict(rope) != dict(target_rope):
        found.append(Variant("target rope", ids, target_rope))
    return found


def measure_offline(
    engine: Engine,
    answers: Sequence[BundledAnswer],
    target_rope: Mapping[str, Any],
    num_tokens: int,
) -> Offline:
    """Guess behind every token of the answers; nothing may be running.

    Args:
        engine: of the pair.
        answers: whose outputs are the target's greedy choices.
        target_rope: rotation to try.
        num_tokens: that the tokenizer knows.

    Raises:
        ModelError: transformers rejects the target's rotation for the drafter.
        ConfigError: the K/V memory is too small.
    """
    drafter, target = engine.drafter, engine.target
    assert isinstance(drafter, DFlashDrafter)
    assert isinstance(target, TransformersTarget)
    config = drafter.model.config
    variants = variants_of(config, len(target.layers), target_rope)
    wanted = sorted({index for variant in variants for index in variant.layer_ids})
    head = _head(drafter, target)
    measured = Offline({variant.name: [] for variant in variants})
    for answer in answers:
        if len(answer.output_ids) < 2:
            continue
        ids = [*answer.prompt_ids, *answer.output_ids]
        states = _layer_outputs(engine, target, ids, wanted)
        for variant in variants:
            features = None
            if variant.layer_ids:
                features = torch.cat([states[index] for index in variant.layer_ids], dim=-1)
            with _rotating(drafter, variant.rope):
                guesses = _guesses(drafter, head, features, ids, len(answer.prompt_ids))
            measured.taus[variant.name].append(_tau(guesses, ids, len(answer.prompt_ids)))
            if variant.name == AS_CONFIGURED:
                measured.num_guesses += guesses.numel()
                measured.num_padding += int((guesses >= num_tokens).sum())
    return measured


def _head(drafter: DFlashDrafter, target: TransformersTarget) -> Callable[[Tensor], Tensor]:
    """Its own or the target's, from hidden states [..., D] to logits [..., guessable tokens]."""
    own_head = drafter.model.own_head
    if own_head is not None:
        return lambda hidden: drafter.model.scaled_logits(F.linear(hidden, own_head))
    head = target.model.get_output_embeddings()

    def logits_of(hidden: Tensor) -> Tensor:
        logits: Tensor = drafter.model.scaled_logits(head(hidden))
        return logits if drafter.vocabulary_ids is None else logits[..., drafter.vocabulary_ids]

    return logits_of


@torch.inference_mode()
def _layer_outputs(
    engine: Engine, target: TransformersTarget, ids: Sequence[int], layer_ids: Sequence[int]
) -> dict[int, Tensor]:
    """[tokens, D] of each layer, from one pass over the tokens, which may be several forwards."""
    kept: dict[int, list[Tensor]] = {index: [] for index in layer_ids}

    def keep(index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept[index].append(layer_output(module, output)[0])

        return hook

    hooks = [target.layers[index].register_forward_hook(keep(index)) for index in layer_ids]
    try:
        with without_graphs(), lone_sequence(engine, ids, 0) as sequence:
            engine.target.forward(ForwardPlan([PlannedRow(Row(sequence, list(ids), 0))]))
    finally:
        for hook in hooks:
            hook.remove()
    # Rows that only fill a forward up are its last, and only the last forward has them.
    return {index: torch.cat(parts)[: len(ids)] for index, parts in kept.items()}


@contextmanager
def _rotating(drafter: DFlashDrafter, rope: Mapping[str, Any]) -> Iterator[None]:
    """Let the drafter rotate otherwise."""
    model = drafter.model
    usual = model.rotary
    model.rotary = Rotary(replace(model.config, rope=rope))
    try:
        yield
    finally:
        model.rotary = usual


@torch.inference_mode()
def _guesses(
    drafter: DFlashDrafter,
    head: Callable[[Tensor], Tensor],
    features: Tensor | None,
    ids: Sequence[int],
    num_prompt: int,
) -> Tensor:
    """Greedy guesses behind each token of the answer but the last: [anchors, slots] token ids."""
    model, device = drafter.model, drafter.embed_weight.device
    size = model.config.block_size
    anchors = torch.arange(num_prompt, len(ids) - 1, device=device)
    num_context = len(ids) - 1
    context = model.project_context(
        drafter.context_features(ids, features)[None, :num_context],
        torch.arange(num_context, device=device)[None],
    )
    masked = [model.config.mask_token_id] * (size - 1)
    slots = [[ids[anchor], *masked] for anchor in anchors.tolist()]
    positions = anchors[:, None] + torch.arange(size, device=device)
    masks = block_masks(model.config, anchors[None], size, num_context)

    def forward(token_ids: Tensor) -> Tensor:
        embeddings = model.embed(token_ids.view(1, -1), drafter.embed_weight)
        where = positions.view(1, -1), ConcatContext(context), masks, size
        hidden: Tensor = model(embeddings, *where)
        return hidden.view(len(anchors), size, -1)

    guess = greedy(head, drafter.vocabulary_ids)
    blocks = torch.tensor(slots, device=device)
    hidden = denoise(blocks, forward, guess, model.config.num_denoising_steps)
    hidden = hidden[:, model.config.first_slot :]
    anchor_ids = torch.tensor(ids, device=device)[anchors]
    return model.greedy_guesses(
        *(hidden, head(hidden), anchor_ids, drafter.vocabulary_ids),
        *(drafter.embed_weight, head),
    )


def _tau(guesses: Tensor, ids: Sequence[int], num_prompt: int) -> float:
    """Mean over the anchors of the bonus and the guesses before the first wrong one."""
    total = 0
    for row, guessed in enumerate(guesses.tolist()):
        expected = ids[num_prompt + row + 1 :]
        total += 1
        for guess, token in zip(guessed, expected, strict=False):
            if guess != token:
                break
            total += 1
    return total / len(guesses)

"""The held-out walk against decoding with a plain loop (reference case 31)."""

from collections import Counter

import pytest
import torch

from blockdraft.data.store import Example
from blockdraft.models.draft.context import ConcatContext
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.train.evaluate import HeldOut, num_accepted
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.base import TrainedDrafter
from blockdraft.train.kinds.block import BlockDrafter
from blockdraft.train.kinds.eagle3 import Eagle3Drafter
from tests.eagle import make_model
from tests.tiny import DFLASH2, LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target


def test_prefix_length_equals_a_loop():
    torch.manual_seed(0)
    right, keep = torch.rand(200, 7) < 0.7, torch.rand(200, 7) < 0.9
    expected = []
    for row in (right & keep).tolist():
        length = 0
        while length < 7 and row[length]:
            length += 1
        expected.append(length)
    assert num_accepted(right, keep).tolist() == expected


class KnowsAll(BlockDrafter):
    """Guesses each token of an answer, and of what lies behind it."""

    def greedy_guesses(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        return anchors[:, None] + 1 + torch.arange(self.num_slots)


@pytest.mark.parametrize("length", [2, 5, 6, 7, 11, 12])
def test_no_cycle_counts_more_tokens_than_the_answer_has(length: int) -> None:
    """The last one brings no bonus where all that is left was drafted."""
    drafter = KnowsAll(tiny_drafter())
    target = FrozenTarget(tiny_target(), LAYER_IDS)
    answer = tuple(range(10, 10 + length))
    example = Example(id="a", set="s", prompt_ids=(1, 2, 3), response_ids=answer)
    found = HeldOut(target, [example], 9).evaluate(drafter)
    # Each cycle but the last commits a block of 6; the first token of the answer is an anchor.
    assert found.tau == pytest.approx((length - 1) / -(-(length - 1) // 6))


def plain_walk(model: DraftModel, target: FrozenTarget, example: Example) -> tuple[int, int]:
    """(tokens, cycles) of one answer, one block at a time over a fresh context."""
    ids = torch.tensor([example.token_ids])
    features, _ = target.split(target.states(ids))
    anchor, tokens, cycles = len(example.prompt_ids), 0, 0
    size = model.config.block_size
    while anchor + 1 < len(example):
        positions = torch.arange(anchor, anchor + size)[None]
        slots = torch.tensor(
            [[example.token_ids[anchor]] + [model.config.mask_token_id] * (size - 1)]
        )
        context = ConcatContext(
            model.project_context(features[:, :anchor], torch.arange(anchor)[None])
        )
        embeddings = model.embed(slots, target.embed_weight)
        hidden = model(embeddings, positions, context, model.block_masks(anchor, size))
        logits = model.logits(hidden[0, 1:], target.lm_head_weight)
        if model.draft_vocabulary is not None:
            unknown = set(range(VOCAB_SIZE)) - set(model.draft_vocabulary)
            logits[:, list(unknown)] = -torch.inf
        guesses = logits.argmax(-1).tolist()
        accepted = 0
        for guess, token in zip(guesses, example.token_ids[anchor + 1 :], strict=False):
            if guess != token:
                break
            accepted += 1
        committed = min(accepted + 1, len(example) - 1 - anchor)
        anchor, tokens, cycles = anchor + committed, tokens + committed, cycles + 1
    return tokens, cycles


def guessable_examples(model: DraftModel, target: FrozenTarget) -> list[Example]:
    """Answers that the random drafter gets partly right: every third token is its own guess."""
    generator = torch.Generator().manual_seed(3)
    examples = []
    for number in range(5):
        ids = torch.randint(VOCAB_SIZE - 1, (8 + number,), generator=generator).tolist()
        prompt_len = len(ids) - 1
        while len(ids) < 30 + number:
            features, _ = target.split(target.states(torch.tensor([ids])))
            anchor, size = len(ids) - 1, model.config.block_size
            context = ConcatContext(
                model.project_context(features[:, :anchor], torch.arange(anchor)[None])
            )
            slots = torch.tensor([[ids[-1]] + [model.config.mask_token_id] * (size - 1)])
            positions = torch.arange(anchor, anchor + size)[None]
            hidden = model(
                model.embed(slots, target.embed_weight),
                positions,
                context,
                model.block_masks(anchor, size),
            )
            guesses = model.logits(hidden[0, 1:], target.lm_head_weight).argmax(-1).tolist()
            ids += [*guesses[: 1 + number], (guesses[-1] + 1) % (VOCAB_SIZE - 1)]
        examples.append(
            Example(
                id=str(number),
                set=f"set{number % 2}",
                prompt_ids=tuple(ids[:prompt_len]),
                response_ids=tuple(ids[prompt_len:]),
            )
        )
    return examples


@torch.no_grad()
def test_walk_equals_decoding_one_block_at_a_time():
    model, target = tiny_drafter(), FrozenTarget(tiny_target(), LAYER_IDS)
    examples = guessable_examples(model, target)
    metrics = HeldOut(target, examples, limit=10).evaluate(BlockDrafter(model))
    walks = {example.id: plain_walk(model, target, example) for example in examples}
    tokens, cycles = (sum(column) for column in zip(*walks.values(), strict=True))
    assert metrics.tau == pytest.approx(tokens / cycles)
    assert metrics.tau > 1.5
    for name in ("set0", "set1"):
        part = [walks[example.id] for example in examples if example.set == name]
        expected = sum(t for t, _ in part) / sum(c for _, c in part)
        assert metrics.tau_by_set[name] == pytest.approx(expected)
    assert metrics.accuracy[0] == 1.0  # as the examples were made
    assert metrics.accuracy[-1] < 1.0
    # Right slots come together, so the length that is expected of independent ones is another.
    product, expected_length = 1.0, 1.0
    for share in metrics.accuracy:
        product *= share
        expected_length += product
    assert metrics.marginal_tau == pytest.approx(expected_length)
    assert abs(metrics.marginal_tau - metrics.tau) > 0.05


@torch.no_grad()
def test_a_limited_drafter_is_judged_by_what_it_may_guess():
    """Decoding never proposes other tokens, however likely the drafter takes them to be."""
    model, target = tiny_drafter(), FrozenTarget(tiny_target(), LAYER_IDS)
    examples = guessable_examples(model, target)
    drafter, held_out = BlockDrafter(model), HeldOut(target, examples, limit=10)
    free = held_out.evaluate(drafter).tau
    (often, _), *_ = Counter(t for e in examples for t in e.response_ids).most_common()
    drafter.limit_vocabulary(sorted(set(range(VOCAB_SIZE)) - {often}))
    walks = [plain_walk(model, target, example) for example in examples]
    tokens, cycles = (sum(column) for column in zip(*walks, strict=True))
    assert held_out.evaluate(drafter).tau == pytest.approx(tokens / cycles)
    assert tokens / cycles < free - 0.1


def limited_drafter(kind: str, target: FrozenTarget, known: list[int]) -> TrainedDrafter:
    drafter: TrainedDrafter
    if kind == "eagle3":
        model = make_model(draft_vocab_size=VOCAB_SIZE)
        drafter = Eagle3Drafter(model, LAYER_IDS, target.lm_head_weight, 6)
    else:
        drafter = BlockDrafter(tiny_drafter(**BLOCKS[kind]))
    drafter.limit_vocabulary(known)
    return drafter


BLOCKS: dict[str, dict[str, object]] = {
    "dflash2": {"dflash2": DFLASH2},
    "diffusion": {"target_layer_ids": (), "num_denoising_steps": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", *BLOCKS])
def test_no_kind_is_judged_by_tokens_that_it_may_not_guess(kind, monkeypatch):
    known = list(range(1, VOCAB_SIZE, 9))
    target = FrozenTarget(tiny_target(), () if kind == "diffusion" else LAYER_IDS)
    drafter = limited_drafter(kind, target, known)
    read = set[int]()
    embed = drafter.model.embed

    def embed_and_tell(token_ids, weight):
        read.update(token_ids.flatten().tolist())
        return embed(token_ids, weight)

    monkeypatch.setattr(drafter.model, "embed", embed_and_tell)
    answer = [token for token in range(VOCAB_SIZE - 1) if token not in known][:40]
    example = Example(id="a", set="s", prompt_ids=(0, 2), response_ids=tuple(answer))
    metrics = HeldOut(target, [example], limit=1).evaluate(drafter)
    assert metrics.tau == 1.0
    assert not any(metrics.accuracy)
    # Several denoising steps read their own guesses.
    assert bool(read & set(known)) == (kind == "diffusion")


def test_limit_takes_examples_evenly():
    target = FrozenTarget(tiny_target(), LAYER_IDS)
    examples = [
        Example(id=str(i), set=str(i), prompt_ids=(1, 2), response_ids=(3, 4, 5, 6))
        for i in range(10)
    ]
    metrics = HeldOut(target, examples, limit=5).evaluate(BlockDrafter(tiny_drafter()))
    assert sorted(metrics.tau_by_set) == ["0", "2", "4", "6", "8"]

"""Block diffusion without features of the target: output is plain decoding's, context the tokens'.

What several denoising steps do is written here once more, slot by slot.
"""

from dataclasses import replace

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.context import ConcatContext
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.speculate.drafters.diffusion import DiffusionDrafter
from tests.parity.checks import generate, generate_plain
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.tiny import tiny_drafter, tiny_drafter_folder, tiny_target, tiny_target_folder

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 9
SETTINGS = {
    "greedy": SamplingParams(max_tokens=24),
    "sampled": SamplingParams(max_tokens=24, temperature=0.9, seed=3),
    "tree": SamplingParams(max_tokens=24, num_draft_tokens=12),
    "short": SamplingParams(max_tokens=3),
}


def diffusion(num_steps: int, **changes: object) -> DraftModel:
    return tiny_drafter(
        torch.float64, target_layer_ids=(), num_denoising_steps=num_steps, **changes
    )


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_output_is_that_of_plain_decoding(way: Way, num_steps: int, setting: str) -> None:
    target = make_target(way, tiny_target(dtype=torch.float64), layer_ids=())
    drafter = make_dflash(target, diffusion(num_steps))
    assert isinstance(drafter, DiffusionDrafter)
    assert drafter.feature_layers == ()
    found = generate(target, drafter, PROMPT, SETTINGS[setting])
    plain = make_target(way, tiny_target(dtype=torch.float64), layer_ids=())
    assert found == generate_plain(plain, PROMPT, SETTINGS[setting])
    assert found.acceptance.drafted
    assert drafter._known == {}


def by_definition(model: DraftModel, embedding: torch.Tensor, head: torch.Tensor,
                  ids: list[int], num_steps: int) -> list[int]:  # fmt: skip
    """The greedy guesses behind the tokens `ids`, from these alone."""
    size, mask = model.config.block_size, model.config.mask_token_id
    num_context = len(ids) - 1
    context = model.project_context(
        embedding[torch.tensor(ids[:-1])][None], torch.arange(num_context)[None]
    )
    positions = torch.arange(num_context, num_context + size)[None]
    fixed: dict[int, int] = {}
    for step in range(num_steps):
        block = [ids[-1], *(fixed.get(slot, mask) for slot in range(1, size))]
        hidden = model(
            embedding[torch.tensor([block])],
            positions,
            ConcatContext(context),
            model.block_masks(num_context, size),
        )
        shares, best = (hidden[0] @ head.T).softmax(-1).max(-1)
        left = sorted(
            (slot for slot in range(1, size) if slot not in fixed), key=lambda slot: -shares[slot]
        )
        count = (step + 1) * (size - 1) // num_steps - len(fixed)
        fixed |= {slot: int(best[slot]) for slot in left[:count]}
    return [fixed[slot] for slot in range(1, size)]


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_a_proposal_is_what_its_definition_says(way: Way) -> None:
    every = {}
    for num_steps in (1, 2, 4):
        target = make_target(way, tiny_target(dtype=torch.float64), layer_ids=())
        model = diffusion(num_steps, block_size=8)
        for weight in model.layers.parameters():  # else every mask guesses by itself alone
            weight.mul_(10)
        drafter = make_dflash(target, model)
        weights = target.model.get_input_embeddings().weight.detach()
        head = target.model.get_output_embeddings().weight.detach()
        proposed: list[tuple[list[int], list[int]]] = []
        propose = drafter._draft_rows

        def watched(rows: list[Row], propose=propose, proposed=proposed) -> object:
            found = propose(rows)
            proposed.extend(
                (list(row.sequence.token_ids), list(proposal.tree.tokens))
                for row, proposal in zip(rows, found, strict=True)
            )
            return found

        drafter._draft_rows = watched
        generate(target, drafter, PROMPT, SamplingParams(max_tokens=30))
        assert len(proposed) > 10
        for ids, tokens in proposed:
            expected = by_definition(model, weights, head, ids, num_steps)
            assert tokens == expected[: len(tokens)]
        every[num_steps] = proposed
    assert every[1] != every[4], "what was fixed must matter"


@pytest.mark.parametrize("way", WAYS)
def test_a_reused_prefix_has_the_tokens_own_context(way: Way) -> None:
    """The first request never drafts, so nobody has written keys of the pages that it leaves."""
    target = make_target(way, tiny_target(dtype=torch.float64), layer_ids=())
    drafter = make_dflash(target, diffusion(1))
    fresh = make_target(way, tiny_target(dtype=torch.float64), layer_ids=())
    alone = generate(fresh, make_dflash(fresh, diffusion(1)), PROMPT, SETTINGS["greedy"])
    engine = Engine(target, drafter)
    for number, settings in enumerate(
        (replace(SETTINGS["greedy"], num_draft_tokens=0), SETTINGS["greedy"])
    ):
        key = engine.add(PROMPT, settings)
        while engine.has_work:
            engine.step()
        record = engine.take(key)
        assert record.sequence.output_ids == alone.token_ids
        if way == "paged":
            assert bool(record.sequence.num_reused) == bool(number)
    assert record.acceptance == alone.acceptance


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 12}, {"adaptive": True}], ids=str)
def test_many_at_once(tmp_path, options) -> None:
    folders = (
        tiny_target_folder(tmp_path),
        tiny_drafter_folder(tmp_path, target_layer_ids=(), num_denoising_steps=3),
    )
    llm = load_llm(folders, **options)
    assert llm.engine.drafter.kind == "diffusion"
    prompts = ["the abc", "the abc!!", "the abc the the", "ab" * 30, "the abc"]
    found = llm.generate(prompts, params())
    plain = llm.generate(prompts, params(drafters=()))
    assert [g.completions[0].token_ids for g in found] == [
        g.completions[0].token_ids for g in plain
    ]
    assert_nothing_left(llm)

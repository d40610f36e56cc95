"""The EAGLE-3 module: equal to a literal reference, in decoding and in the steps of training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.models.draft.eagle3 import Eagle3Model, GrowingKV
from tests.eagle import Reference, make_model
from tests.tiny import HIDDEN_SIZE, VOCAB_SIZE

SHAPES: list[dict[str, object]] = [
    {},
    {"norm_before_residual": True},
    {"head_norms": True},
    {"draft_vocab_size": VOCAB_SIZE},
    {"target_hidden_size": 24, "target_layer_ids": (0, 2)},
    {"target_hidden_size": 24, "target_layer_ids": (0, 2), "fc_norm": True},
    {"norm_before_fc": True, "norm_output": True},
]


def step_mask(num_pairs: int, num_steps: int) -> torch.Tensor:
    """What the pairs of a training step see: [1, 1, t, num_steps * t], True where they do.

    Of the first step all pairs up to their own; of the later ones that with their own index.
    """
    causal = torch.ones(num_pairs, num_pairs, dtype=torch.bool).tril()
    own = torch.eye(num_pairs, dtype=torch.bool)
    return torch.cat((causal, *[own] * (num_steps - 1)), dim=1)[None, None]


@pytest.mark.parametrize("fields", SHAPES)
def test_training_steps_are_the_reference_along_each_drafted_chain(
    fields: dict[str, object],
) -> None:
    model = make_model(**fields)
    config = model.config
    num_tokens, num_steps = 9, 4
    embed = torch.randn(VOCAB_SIZE, config.hidden_size)
    token_ids = torch.randint(VOCAB_SIZE, (num_tokens + num_steps,)).tolist()
    features = torch.randn(num_tokens, config.num_features * config.target_hidden_size)
    found = []
    with torch.no_grad():
        hidden, steps = model.fuse(features[None]), GrowingKV()
        for step in range(num_steps):
            # Each pair goes on with the token that really follows.
            following = torch.tensor([token_ids[1 + step : 1 + step + num_tokens]])
            positions = torch.arange(num_tokens)[None] + step
            hidden = model(
                model.embed(following, embed),
                hidden,
                positions,
                steps,
                step_mask(num_tokens, step + 1),
            )
            found.append(model.logits(hidden)[0])
    reference = Reference(model, embed)
    known = model.draft_vocabulary or list(range(VOCAB_SIZE))
    for place in range(num_tokens):
        path = token_ids[place + 2 : place + 1 + num_steps]
        wanted = reference.path_logits(token_ids[: place + 2], features[: place + 1], path)
        for step in range(num_steps):
            torch.testing.assert_close(
                found[step][place], wanted[step][known], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("fields", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_gradients_reach_all_weights_through_all_steps(fields: dict[str, object]) -> None:
    model = make_model(scale=1.0, **fields).train()
    embed = torch.randn(VOCAB_SIZE, model.config.hidden_size)
    hidden, steps = model.fuse(torch.randn(2, 6, 3 * HIDDEN_SIZE)), GrowingKV()
    for step in range(3):
        tokens = torch.randint(VOCAB_SIZE, (2, 6))
        positions = torch.arange(6).expand(2, -1) + step
        hidden = model(model.embed(tokens, embed), hidden, positions, steps, step_mask(6, step + 1))
    model.logits(hidden).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("fields", SHAPES)
def test_a_saved_drafter_is_loaded_again(fields: dict[str, object], tmp_path: Path) -> None:
    model = make_model(**fields)
    model.own_embedding = torch.randn(VOCAB_SIZE, model.config.hidden_size)
    model.save_pretrained(tmp_path)
    loaded = Eagle3Model.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert loaded.draft_vocabulary == model.draft_vocabulary
    assert loaded.own_embedding is not None
    torch.testing.assert_close(loaded.own_embedding, model.own_embedding)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"norm_before_fc": True, "norm_output": True}, {"input_norm.weight"}),
        ({"fc_norm": True}, {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}),
    ],
)
def test_norms_are_saved_where_other_engines_look(
    fields: dict[str, object], names: set[str], tmp_path: Path
) -> None:
    """Their tensors, and their keys both at the top of the config and in `eagle_config`."""
    make_model().save_pretrained(tmp_path / "without")
    make_model(**fields).save_pretrained(tmp_path / "with")
    plain, normed = (
        set(load_file(tmp_path / own / "model.safetensors")) for own in ("without", "with")
    )
    assert normed - plain == names
    raw = json.loads((tmp_path / "with" / "config.json").read_text(encoding="utf-8"))
    assert {name: raw[name] for name in fields} == fields
    assert {name: raw["eagle_config"][name] for name in fields} == fields

"""A pair that is known by hand: the target says one token forever, and the drafter guesses it.

Dimension 0 of every embedding is 1, and the head gives ANSWER for it. Layer SIGN_LAYER of the
target makes it -1, the next one 1 again. The drafter negates the feature it reads: it is right only
with the output of SIGN_LAYER, and guesses other tokens with the layer before or behind.
"""

import json
from pathlib import Path

import torch

from blockdraft.measure.identity import hash_text
from blockdraft.models.draft.checkpoint import write_provenance
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.text.tokenizer import load_tokenizer
from tests.tiny import (
    HIDDEN_SIZE,
    TEXT_VOCAB_SIZE,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)

ANSWER = 65
MASK = 264
SIGN_LAYER = 1
BLOCK_SIZE = 6
TAU = 63 / 11
"""64 tokens: the first by the prompt's pass, then whole blocks of 6, and 3 that are left."""
SWITCH = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"


def write_pair(root: Path) -> tuple[Path, Path]:
    """Folders of target and drafter; the provenance says all that a check compares with."""
    target, drafter = root / "target", root / "drafter"
    _write_target(target)
    model = _drafter()
    chat_template = load_tokenizer(target).chat_template
    facts = {
        "target": {
            "weights_sha256": weights_sha256(target),
            "dtype": "float32",
            "template_sha256": hash_text(chat_template),
            "thinking": "template",
        },
        "drafter": model.config.to_dict(),
        "expected": {"tau": dict.fromkeys(("math", "code", "chat", "writing"), TAU)},
    }
    model.save_pretrained(drafter, facts)
    return target, drafter


def edit_facts(drafter: Path, part: str, **changes: object) -> None:
    """Change values of a part of the provenance; without changes the part is taken out."""
    facts = json.loads((drafter / "provenance.json").read_text(encoding="utf-8"))
    if changes:
        facts[part] |= changes
    else:
        del facts[part]
    write_provenance(drafter, facts)


def add_switch(target: Path) -> str:
    """Give the chat template a switch for thinking, which is on by itself; returns its hash."""
    path = target / "chat_template.jinja"
    path.write_text(path.read_text(encoding="utf-8") + SWITCH, encoding="utf-8")
    return hash_text(load_tokenizer(target).chat_template)


def _write_target(folder: Path) -> None:
    model = tiny_target(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=1024)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        signs = torch.randint(
            2, (TEXT_VOCAB_SIZE, HIDDEN_SIZE), generator=torch.Generator().manual_seed(0)
        )
        embedding = 2.0 * signs - 1.0
        model.lm_head.weight.copy_(0.1 * embedding)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[ANSWER] = 10.0 * torch.eye(HIDDEN_SIZE)[0]
        embedding[:, 0] = 1.0
        embedding[MASK, 0] = 0.0
        model.model.embed_tokens.weight.copy_(embedding)
        for layer in model.model.layers[SIGN_LAYER : SIGN_LAYER + 2]:
            layer.self_attn.v_proj.weight[0, 0] = 1.0
            layer.self_attn.o_proj.weight[0, 0] = -2.0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def _drafter() -> torch.nn.Module:
    model = tiny_drafter(
        vocab_size=TEXT_VOCAB_SIZE,
        target_layer_ids=(SIGN_LAYER,),
        mask_token_id=MASK,
        block_size=BLOCK_SIZE,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.fc.weight.copy_(-torch.eye(HIDDEN_SIZE))
        model.layers[0].self_attn.v_proj.weight[0, 0] = 1.0
        model.layers[0].self_attn.o_proj.weight[0, 0] = 50.0
    return model

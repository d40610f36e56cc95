"""Tiny EAGLE-3 drafters, and their forward in the most literal form, token by token."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.eagle3_config import Eagle3Config
from tests.tiny import HIDDEN_SIZE, LAYER_IDS, VOCAB_SIZE

KNOWN = sorted({(7 * i) % VOCAB_SIZE for i in range(60)})
"""The draft vocabulary of the tiny drafters."""


def make_config(**fields: object) -> Eagle3Config:
    """A shape for `tiny_target`; fields replace its own."""
    config = Eagle3Config(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=len(KNOWN),
        target_hidden_size=HIDDEN_SIZE,
        target_layer_ids=LAYER_IDS,
    )
    return replace(config, **fields)  # type: ignore[arg-type]


def make_model(seed: int = 0, scale: float = 8.0, **fields: object) -> Eagle3Model:
    """A drafter with random weights, large enough for its choices to depend on all of its input."""
    torch.manual_seed(seed)
    config = make_config(**fields)
    model = Eagle3Model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    if model.draft_vocabulary is not None:
        model.draft_vocabulary = KNOWN[: config.draft_vocab_size]
    return model


class Reference:
    """The drafter of one sequence as the paper says it, one pair after another.

    embed_weight: [V, D] of the target.
    """

    def __init__(self, model: Eagle3Model, embed_weight: Tensor) -> None:
        self._weights = {name: value.detach() for name, value in model.state_dict().items()}
        self._config, self._embed_weight = model.config, embed_weight
        self._known = model.draft_vocabulary or list(range(model.config.vocab_size))

    def context(self, token_ids: list[int], features: Tensor) -> tuple[Tensor, "Cache"]:
        """What comes out behind tokens 0 to n, of which the first n have features [n, F].

        Returns the hidden state [D] behind the last token, and the cache of all pairs.
        """
        cache: Cache = []
        for place, feature in enumerate(features):
            fused = self.fuse(feature)
            hidden = self.step(cache, token_ids[place + 1], fused, place)
        return hidden, cache

    def fuse(self, feature: Tensor) -> Tensor:
        """The hidden state [D] of a token, of the target's features [F] of it."""
        if self._config.norm_before_fc:
            feature = self._norm(feature, "input_norm.weight")
        if self._config.fc_norm:
            size = self._config.target_hidden_size
            feature = torch.cat(
                [
                    self._norm(feature[start : start + size], f"fc_norm.{start // size}.weight")
                    for start in range(0, len(feature), size)
                ]
            )
        return self._weights["fc.weight"] @ feature

    def step(self, cache: "Cache", token_id: int, hidden: Tensor, position: int) -> Tensor:
        """One pair, whose key and value are added to the cache; returns the hidden state [D]."""
        w, config = self._weights, self._config
        normed = self._norm(hidden, "midlayer.hidden_norm.weight")
        embedded = self._norm(self._embed_weight[token_id], "midlayer.input_layernorm.weight")
        x = torch.cat((embedded, normed))
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q = (w["midlayer.self_attn.q_proj.weight"] @ x).view(heads, -1)
        k = (w["midlayer.self_attn.k_proj.weight"] @ x).view(kv_heads, -1)
        v = (w["midlayer.self_attn.v_proj.weight"] @ x).view(kv_heads, -1)
        if config.head_norms:
            q = torch.stack([self._norm(own, "midlayer.self_attn.q_norm.weight") for own in q])
            k = torch.stack([self._norm(own, "midlayer.self_attn.k_norm.weight") for own in k])
        q, k = (self._rotated(own, position) for own in (q, k))
        cache.append((k, v))
        out = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = torch.stack([q[head] @ key[group] for key, _ in cache])
            weights = torch.softmax(scores / math.sqrt(config.head_dim), 0)
            values = torch.stack([value[group] for _, value in cache])
            out.append(weights @ values)
        attended = w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        x = attended + (normed if config.norm_before_residual else hidden)
        y = self._norm(x, "midlayer.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(w["midlayer.mlp.gate_proj.weight"] @ y)
        up = w["midlayer.mlp.up_proj.weight"] @ y
        out = x + w["midlayer.mlp.down_proj.weight"] @ (gate * up)
        return self._norm(out, "norm.weight") if config.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        """[D] -> [V]; tokens that the head does not know have -inf."""
        if not self._config.norm_output:
            hidden = self._norm(hidden, "norm.weight")
        found = self._weights["lm_head.weight"] @ hidden
        whole = torch.full((self._config.vocab_size,), -torch.inf)
        for row, token_id in enumerate(self._known):
            whole[token_id] = found[row]
        return whole

    def path_logits(self, token_ids: list[int], features: Tensor, path: list[int]) -> Tensor:
        """[1 + path, V] behind the last token, and behind each token of a drafted path."""
        hidden, cache = self.context(token_ids, features)
        found = [self.logits(hidden)]
        for depth, token_id in enumerate(path):
            hidden = self.step(cache, token_id, hidden, len(features) + depth)
            found.append(self.logits(hidden))
        return torch.stack(found)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = (x * x).sum() / len(x)
        return x / torch.sqrt(mean + self._config.rms_norm_eps) * self._weights[name]

    def _rotated(self, heads: Tensor, position: int) -> Tensor:
        half = self._config.head_dim // 2
        rotated = heads.clone()
        for place in range(half):
            angle = position * self._config.rope["rope_theta"] ** (-place / half)
            cos, sin = math.cos(angle), math.sin(angle)
            first, second = heads[:, place], heads[:, place + half]
            rotated[:, place] = first * cos - second * sin
            rotated[:, place + half] = second * cos + first * sin
        return rotated


Cache = list[tuple[Tensor, Tensor]]
"""Key and value [kv_heads, head_dim] of each pair."""

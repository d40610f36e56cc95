"""A pre-norm decoder layer with rotated heads and a gated MLP, in a few operations of a backend.

Target and drafter run the same one; they differ in how a norm rounds.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.interface import Backend, HeadParts, LayerParts, LayerStack, Rotation
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention, kinds_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values, each [.., heads, rows, head_dim] -> [.., rows, heads, head_dim]."""


class DecoderLayer:
    """norm, products and attention, then norm, products and gate, with both residuals.

    products: what is called for the products of `parts`, in the order in which they are there.
    whole: the layer in one call over pages, where that can be. is_usual: False if its input is not
    as wide as its output, which no backend runs whole.
    """

    def __init__(self, backend: Backend, parts: LayerParts, *, is_usual: bool = True) -> None:
        self.backend = backend
        self.parts = parts
        self.products: Sequence[Callable[[Tensor], Tensor]] = (
            parts.qkv, parts.o, parts.gate_up, parts.down,
        )  # fmt: skip
        self.whole = backend.layer(parts) if is_usual else None

    def use_parts(self) -> None:
        """Never run in one call."""
        self.whole = None

    def over_pages(
        self,
        plan: AttentionPlan,
        index: int,
        attention: LayerAttention,
        hidden: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """The `index`-th layer of the plan's pages, [.., rows, size] -> the same."""
        if self.whole is not None:
            output = plan.run_layer(self.whole, index, attention, hidden, rotation)
            if output is not None:
                return output
        return self.in_parts(
            hidden, rotation, lambda q, k, v: _over(plan, index, attention, q, k, v)
        )

    def in_parts(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The same with any attention, operation by operation."""
        normed = self.backend.norm(hidden, self.parts.norm)
        attended = self.attention(normed, rotation, attend)
        hidden, normed = self.backend.add_norm(attended, hidden, self.parts.mlp_norm)
        return hidden + self.mlp(normed)

    def attention(self, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """What the attention adds to the residual."""
        parts, (qkv_of, o_of, _, _) = self.parts, self.products
        qkv = qkv_of(normed)
        heads = qkv.view(*qkv.shape[:-1], sum(parts.num_heads), parts.head_dim)
        rotated = self.backend.rotate_(heads, parts.num_heads, rotation, parts.head_norms)
        q, k, v = (part.transpose(-3, -2) for part in rotated)
        return o_of(attend(q, k, v).flatten(-2))

    def mlp(self, normed: Tensor) -> Tensor:
        """What the MLP adds to the residual."""
        _, _, gate_up_of, down_of = self.products
        return down_of(self.backend.gate(gate_up_of(normed), self.parts.activation))


def stack_of(
    layers: Sequence[DecoderLayer],
    attentions: Sequence[LayerAttention],
    kv: PagedKV,
    kept: Sequence[int] = (),
    head: HeadParts | None = None,
) -> LayerStack | None:
    """All layers of a model over its pages in one call; None where one of them runs in parts.

    attentions: of each layer. kept, head: see Backend.stack.
    """
    whole = [layer.whole for layer in layers]
    found = [layer for layer in whole if layer is not None]
    if not whole or len(found) < len(whole):
        return None
    scorings = [attention.scoring for attention in attentions]
    _, kinds = kinds_of(attentions)
    return layers[0].backend.stack(found, kv, scorings, kinds, kept, head)


def _over(
    plan: AttentionPlan, index: int, attention: LayerAttention, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention of all rows of a forward; targets have a dimension of one in front."""
    if q.ndim == 3:
        return plan.attend(index, attention, q, k, v)
    return plan.attend(index, attention, q[0], k[0], v[0])[None]

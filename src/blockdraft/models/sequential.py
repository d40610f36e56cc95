"""Any transformers causal LM as a target, one sequence after another.

The path that every faster one is held against.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.cache.kv import KVCache
from blockdraft.core.errors import ModelError
from blockdraft.core.sequence import Batch, DraftBlock, Row
from blockdraft.models.attention import EXACT_ATTENTION
from blockdraft.models.exact import (
    INEXACT_RULE,
    PROBE_SPLITS,
    RowRule,
    Split,
    first_variant_split,
    model_rule,
)
from blockdraft.models.target import TargetOutput

STOCK_ATTENTION = "sdpa"


class SequentialTarget:
    """A transformers model, one K/V cache per sequence, one forward per row.

    With `exact`, attention is replaced by the row-invariant one and no forward runs on fewer rows
    than the precision allows, so a row's logits have the same bits in whatever company. `release`
    gives the model back as it was; the target is also a context manager that does so.

    Raises:
        ModelError: recurrent layers, which cannot be rolled back here, or a layer id out of range.
    """

    def __init__(
        self, model: PreTrainedModel, *, layer_ids: Sequence[int] = (), exact: bool = True
    ) -> None:
        self.model = model
        self.exact = exact
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_context: int = getattr(config, "max_position_embeddings", 2**31)
        self.layers = _decoder_layers(model)
        self.layer_ids = tuple(layer_ids)
        self.rule = _model_rule(model) if exact else INEXACT_RULE
        self._caches: dict[int, KVCache] = {}
        self._captured: dict[int, Tensor] = {}
        _check_supported(model, self.layer_ids, len(self.layers))
        self._stock_attention: str = model.config._attn_implementation
        model.set_attn_implementation(EXACT_ATTENTION if exact else STOCK_ATTENTION)
        self._hooks = [self._capture(index) for index in sorted(set(self.layer_ids))]
        self._hooks.append(model.get_output_embeddings().register_forward_pre_hook(_pack_input))

    def _capture(self, index: int) -> torch.utils.hooks.RemovableHandle:
        """Keep the output of a decoder layer: the residual stream before the next norm.

        transformers' hidden_states[index + 1] is the same tensor except for the last layer, where
        it is taken after the final norm; here and in vLLM and SGLang it is before.
        """

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[index] = output[0] if isinstance(output, tuple) else output

        return self.layers[index].register_forward_hook(keep)

    @torch.inference_mode()
    def forward(self, batch: Batch, block: DraftBlock) -> TargetOutput:
        """See Target.forward. Sequences new to the target get a cache."""
        outputs = [self._forward_row(row, draft) for row, draft in zip(batch, block, strict=True)]
        return TargetOutput([o[0] for o in outputs], [o[1] for o in outputs])

    def _forward_row(self, row: Row, draft: list[int]) -> tuple[Tensor, Tensor | None]:
        cache = self._caches.setdefault(row.sequence.key, KVCache(len(self.layers)))
        assert cache.length == row.sequence.num_cached
        num_choices = 1 + len(draft) if row.is_complete else 0
        return self._run(cache, row.new_ids + draft, num_choices)

    def _run(
        self, cache: KVCache, token_ids: list[int], num_choices: int
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [num_choices, V] of the last tokens and features [tokens, ..] of all of them."""
        pieces = []
        while len(token_ids) > self.rule.max_rows:
            pieces.append(self._run_piece(cache, token_ids[: self.rule.max_rows], 0)[1])
            token_ids = token_ids[self.rule.max_rows :]
        assert num_choices <= len(token_ids)
        logits, features = self._run_piece(cache, token_ids, num_choices)
        if features is not None and pieces:
            features = torch.cat([*(piece for piece in pieces if piece is not None), features])
        return logits, features

    def _run_piece(
        self, cache: KVCache, token_ids: list[int], num_choices: int
    ) -> tuple[Tensor, Tensor | None]:
        start, num_real = cache.length, len(token_ids)
        # Rows that only fill up repeat the last token at its own position, so that no position past
        # the end is ever used; causal attention hides them from the real rows.
        num_fill = -num_real % self.rule.row_multiple
        position_ids = [*range(start, start + num_real), *[start + num_real - 1] * num_fill]
        ids = torch.tensor([token_ids + token_ids[-1:] * num_fill, position_ids])
        ids = ids.to(self.model.device)
        num_rows = num_choices + num_fill
        num_rows += -num_rows % self.rule.row_multiple  # the head is a linear layer like the others
        logits = self.model(
            input_ids=ids[:1],
            position_ids=ids[1:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_rows,
        ).logits[0]
        cache.truncate(start + num_real)
        end = logits.shape[0] - num_fill
        return logits[end - num_choices : end], self._take_features(num_real)

    def _take_features(self, num_real: int) -> Tensor | None:
        if not self.layer_ids:
            return None
        features = torch.cat([self._captured[i][0, :num_real] for i in self.layer_ids], dim=-1)
        self._captured.clear()
        return features

    def truncate(self, key: int, length: int) -> None:
        """Keep the first `length` cached tokens of a sequence."""
        self._caches[key].truncate(length)

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self._caches.pop(key, None)

    def cached_tokens(self, key: int) -> int:
        """Number of cached tokens of a sequence."""
        return self._caches[key].length

    @torch.inference_mode()
    def logits_of_split(self, token_ids: Sequence[int], split: Sequence[int]) -> Tensor:
        """Logits [tokens, V] of `token_ids`, run in forwards of the given lengths."""
        assert sum(split) == len(token_ids)
        cache, logits, done = KVCache(len(self.layers)), [], 0
        for length in split:
            logits.append(self._run(cache, list(token_ids[done : done + length]), length)[0])
            done += length
        self._captured.clear()
        return torch.cat(logits)

    def check_row_invariance(self, splits: tuple[Split, ...] = PROBE_SPLITS, seed: int = 0) -> None:
        """Run the same tokens in different company, as deployed, and compare all bits.

        Raises:
            ModelError: some split changes some logit.
        """
        generator = torch.Generator().manual_seed(seed)
        length = sum(splits[0])
        ids = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        split = first_variant_split(lambda s: self.logits_of_split(ids, s), splits)
        if split is not None:
            raise ModelError(
                f"{type(self.model).__name__} in {self.model.dtype} on {self.model.device}: "
                f"logits change with the number of rows (forwards of {split} tokens), so drafted "
                "output may differ from plain; use float32 or --exact off"
            )

    def release(self) -> None:
        """Give the model back as it was: no hooks, its own attention."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._caches.clear()
        self.model.set_attn_implementation(self._stock_attention)

    @contextmanager
    def released_after(self) -> Iterator["SequentialTarget"]:
        """Release on leaving, also after an exception."""
        try:
            yield self
        finally:
            self.release()


def _pack_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give the head's input [1, rows, hidden] the strides of a fresh tensor.

    The model cuts the wanted rows out of a longer batch; oneDNN refuses such strides in bfloat16,
    and the fallback is many times slower and gives other bits.
    """
    hidden = args[0]
    return (hidden.reshape(-1, hidden.shape[-1]).view(hidden.shape), *args[1:])


def _model_rule(model: PreTrainedModel) -> RowRule:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return model_rule(model.dtype, min(linear.weight.numel() for linear in linears))


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} is not supported: it keeps no list of decoder layers"
        )
    return layers


def _check_supported(model: PreTrainedModel, layer_ids: tuple[int, ...], num_layers: int) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    recurrent = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if recurrent:
        raise ModelError(
            f"{type(model).__name__} is not supported: layers of kind {', '.join(recurrent)} "
            "cannot be rolled back yet; use a model with attention layers only"
        )
    wrong = [index for index in layer_ids if not 0 <= index < num_layers]
    if wrong:
        raise ModelError(
            f"target layer ids {wrong} do not exist in {type(model).__name__} with {num_layers} "
            f"layers (0 to {num_layers - 1}); the drafter was made for another target"
        )

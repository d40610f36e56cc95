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
from blockdraft.models.attention import EXACT_ATTENTION, STOCK_ATTENTION
from blockdraft.models.exact import (
    INEXACT_RULE,
    NUM_COPIED,
    PROBE_SPLITS,
    TAIL_SPLIT,
    RowRule,
    Split,
    border_probe,
    first_variant_split,
    model_rule,
)
from blockdraft.models.supported import check_supported, decoder_layers
from blockdraft.models.target import TargetOutput


class SequentialTarget:
    """A transformers model, one K/V cache per sequence, one forward per row.

    With `exact`, attention is replaced by the row-invariant one and no forward runs on fewer rows
    than the precision allows, so a row's logits have the same bits in whatever company. The model
    runs in evaluation mode. `release` gives it back as it was; `released_after` is a context that
    does so.

    Raises:
        ModelError: the model is not supported, see `check_supported`; it is left as it was.
    """

    def __init__(
        self, model: PreTrainedModel, *, layer_ids: Sequence[int] = (), exact: bool = True
    ) -> None:
        self.model = model
        self.exact = exact
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_context: int = getattr(config, "max_position_embeddings", 2**31)
        self.layer_ids = tuple(layer_ids)
        check_supported(model, self.layer_ids, exact=exact)
        self.layers = decoder_layers(model)
        self.rule = _model_rule(model) if exact else INEXACT_RULE
        self._caches: dict[int, KVCache] = {}
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._own_attention: str = model.config._attn_implementation
        self._training = [module for module in model.modules() if module.training]
        try:
            self._prepare(EXACT_ATTENTION if exact else STOCK_ATTENTION)
        except BaseException:
            self.release()
            raise

    def _prepare(self, attention: str) -> None:
        self.model.eval()  # which also rests gradient checkpointing: it would drop the cache
        self.model.set_attn_implementation(attention)
        # transformers only warns of a model whose attention cannot be replaced.
        if self.model.config._attn_implementation != attention:
            raise ModelError(
                f"{type(self.model).__name__} is not supported: its attention cannot be replaced; "
                "use a model that supports transformers' attention interface"
            )
        for index in sorted(set(self.layer_ids)):
            self._hooks.append(self._capture(index))
        head = self.model.get_output_embeddings()
        self._hooks.append(head.register_forward_pre_hook(_pack_input))

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
        # A sequence that never drafts needs no features: plain decoding does not pay for them.
        with_features = bool(self.layer_ids) and row.sequence.params.max_draft_tokens != 0
        return self._run(cache, row.new_ids + draft, num_choices, with_features=with_features)

    def _run(
        self,
        cache: KVCache,
        token_ids: list[int],
        num_choices: int,
        *,
        with_features: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [num_choices, V] of the last tokens and features [tokens, ..] of all of them."""
        pieces = []
        while len(token_ids) > self.rule.max_rows:
            piece, token_ids = token_ids[: self.rule.max_rows], token_ids[self.rule.max_rows :]
            pieces.append(self._run_piece(cache, piece, 0, with_features)[1])
        assert num_choices <= len(token_ids)
        logits, features = self._run_piece(cache, token_ids, num_choices, with_features)
        if features is not None and pieces:
            features = torch.cat([*(piece for piece in pieces if piece is not None), features])
        return logits, features

    def _run_piece(
        self, cache: KVCache, token_ids: list[int], num_choices: int, with_features: bool
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
        captured = [self._captured[index][0, :num_real] for index in self.layer_ids]
        self._captured.clear()
        features = torch.cat(captured, dim=-1) if with_features else None
        return logits[end - num_choices : end], features

    def truncate(self, key: int, length: int) -> None:
        """See Target.truncate."""
        if key in self._caches:
            self._caches[key].truncate(length)

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self._caches.pop(key, None)

    @torch.inference_mode()
    def logits_of_split(
        self, token_ids: Sequence[int], split: Sequence[int], cache: KVCache | None = None
    ) -> Tensor:
        """Logits [tokens, V] of `token_ids`, run in forwards of the given lengths."""
        assert sum(split) == len(token_ids)
        cache, logits, done = cache or KVCache(len(self.layers)), [], 0
        for length in split:
            logits.append(self._run(cache, list(token_ids[done : done + length]), length)[0])
            done += length
        return torch.cat(logits)

    @torch.inference_mode()
    def logits_at_border(self, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Logits [tail, V] of the last tokens of one forward, and of the same tokens in a few.

        The `start` tokens before them are copies of a short context: what they say does not matter.
        """
        cache, tail = KVCache(len(self.layers)), sum(TAIL_SPLIT)
        if start:
            self._run(cache, list(token_ids[: min(start, NUM_COPIED)]), 0)
            cache.repeat(start)
        together, _ = self._run(cache, list(token_ids), tail)
        cache.truncate(cache.length - tail)
        return together, self.logits_of_split(token_ids[-tail:], TAIL_SPLIT, cache)

    def check_row_invariance(self, splits: tuple[Split, ...] = PROBE_SPLITS, seed: int = 0) -> None:
        """Run the same tokens in different company, as deployed, and compare all bits.

        First the splits, then the widest forward, placed so that its last tokens cross a border of
        the key tiles. Longer contexts are not tested here.

        Raises:
            ModelError: some company changes some logit, or the model does not run.
        """
        generator = torch.Generator().manual_seed(seed)
        start, num_rows = border_probe(self.rule, self.max_context)
        length = max(sum(splits[0]), num_rows)
        ids = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        try:
            split = first_variant_split(lambda s: self.logits_of_split(ids[: sum(s)], s), splits)
            if split is None and not torch.equal(*self.logits_at_border(ids[:num_rows], start)):
                split = (num_rows,)
        # What a model that torch cannot run in this precision or on this device raises.
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise ModelError(
                f"{self._described} does not run: {reason}; use another dtype"
            ) from error
        if split is not None:
            raise ModelError(
                f"{self._described}: logits change with the number of rows (forwards of {split} "
                f"tokens), so drafted output may differ from plain; use {self._remedy}"
            )

    @property
    def _described(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__} in {dtype} on {self.model.device}"

    @property
    def _remedy(self) -> str:
        return "--exact off" if self.model.dtype == torch.float32 else "float32 or --exact off"

    def release(self) -> None:
        """Give the model back as it was: no hooks, its own attention and training flags."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._caches.clear()
        for module in self._training:
            module.training = True
        self._training = []
        self.model.set_attn_implementation(self._own_attention)

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

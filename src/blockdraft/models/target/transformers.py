"""What every target made of a transformers model shares: its preparation, and the test of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from blockdraft.core.errors import ModelError
from blockdraft.core.libraries import may_have_come_late
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.core.recorder import NO_RECORDER, Recorder, Work
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import RowRule
from blockdraft.models.layers.elementwise import keep_vectors_whole
from blockdraft.models.layers.experts import EXACT_EXPERTS, forget_row_multiple, set_row_multiple
from blockdraft.models.layers.fused import speed_up
from blockdraft.models.layers.norms import replace_norms
from blockdraft.models.layers.recurrent import run_step_by_step
from blockdraft.models.layers.request_rotation import RequestRotation
from blockdraft.models.layers.row_blocks import keep_rows_apart, keeps_any_rows
from blockdraft.models.layers.tensors import with_fresh_strides
from blockdraft.models.supported import (
    CANNOT_RUN,
    GENERATE,
    check_supported,
    context_of,
    decoder_layers,
    is_quantized,
    layer_output,
)
from blockdraft.models.target.exact import (
    CHECK_SPLITS,
    INEXACT_RULE,
    RowsDepend,
    Split,
    border_check,
    first_variant_split,
)

_OWN_SETTINGS = (
    *("_attn_implementation", "_experts_implementation", "return_dict"),
    *("output_hidden_states", "output_attentions", "output_router_logits"),
)
"""What a target changes in a model's configs. The first ones first: attentions that are put out
must not be those of another implementation."""


class TransformersTarget:
    """A transformers model with its attention replaced and the wanted layers' outputs captured.

    With `exact` no forward runs on fewer rows than the precision allows, so a row's logits have the
    same bits in whatever company. The model runs in evaluation mode. `release` gives it back as it
    was; `released_after` is a context that does so.

    Raises:
        ModelError: the model is not supported, see `check_supported`; it is left as it was.
    """

    def __init__(
        self, model: PreTrainedModel, attention: str, *, layer_ids: Sequence[int], exact: bool
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        """Of embedding and head; layers may lie elsewhere."""
        self.exact = exact
        self.recorder: Recorder = NO_RECORDER
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_context = context_of(model)
        self.layer_ids = tuple(layer_ids)
        check_supported(model, self.layer_ids, exact=exact)
        self.layers = decoder_layers(model)
        self.rule = _model_rule(model) if exact else INEXACT_RULE
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._own_settings = [(config, _settings(config)) for config in _configs(model)]
        self._undo = ExitStack()
        self._rotation = RequestRotation(model)
        self._training = [module for module in model.modules() if module.training]
        try:
            self._prepare(attention)
        except BaseException:
            self.release()
            raise

    def _prepare(self, attention: str) -> None:
        self.model.eval()  # which also rests gradient checkpointing: it would drop the cache
        for config, own in self._own_settings:
            # What else is put out would be kept by hooks that transformers never takes back.
            _set(config, {name: name == "return_dict" for name in _OWN_SETTINGS[2:] if name in own})
        replace_attention(self.model, attention)
        if self.exact:
            self.model.set_experts_implementation(EXACT_EXPERTS)
            set_row_multiple(self.model, self.rule.row_multiple)
        # Before any hook: it would not be called inside a layer that is fused.
        self._undo = self._speed_up()
        if self.exact and self.rule.runs_on_vectors:
            self._undo.enter_context(keep_rows_apart(self.model, self.rule))
            self._undo.enter_context(keep_vectors_whole(self.model, self.rule.row_multiple))
            if self.rule.row_multiple > 1 and keeps_any_rows(self.model):
                self.rule = replace(self.rule, row_multiple=1)
        if self.exact and self.rule.replaces_norms:
            self._undo.enter_context(replace_norms(self.model))
        self._undo.enter_context(run_step_by_step(self.model))
        self._undo.enter_context(self._rotation.replace())
        for index in sorted(set(self.layer_ids)):
            self._hooks.append(self._capture(index))
        head = self.model.get_output_embeddings()
        self._hooks.append(head.register_forward_pre_hook(_fresh_input))

    def _speed_up(self) -> ExitStack:
        return speed_up(self.model)

    def _capture(self, index: int) -> torch.utils.hooks.RemovableHandle:
        """Keep the output of a decoder layer: the residual stream before the next norm.

        transformers' hidden_states[index + 1] is the same tensor except for the last layer, where
        it is taken after the final norm; here and in vLLM and SGLang it is before.
        """

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[index] = layer_output(module, output)

        return self.layers[index].register_forward_hook(keep)

    def _take_features(self, num_rows: int, wanted: bool) -> Tensor | None:
        """[num_rows, num_features * hidden] of the first rows of the last forward."""
        found = [self._captured[index] for index in self.layer_ids] if wanted else []
        self._captured.clear()
        if not found:
            return None
        captured = [one[0, :num_rows].to(self.device) for one in found]
        if self.recorder.measures:
            self.recorder.add("capture", Work(rows=num_rows))
        with self.recorder.phase("capture"):
            return torch.cat(captured, dim=-1)

    def logits_of_split(self, token_ids: Sequence[int], split: Split) -> Tensor:
        """Logits [tokens, V] of `token_ids`, run in forwards of the given lengths."""
        raise NotImplementedError

    def logits_at_border(self, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Logits [tail, V] of the last tokens of one forward, and of the same tokens in a few.

        `start` tokens stand before them; what they say does not matter.
        """
        raise NotImplementedError

    def check_row_invariance(self, splits: tuple[Split, ...] = CHECK_SPLITS) -> None:
        """Run the same tokens in different company, as deployed, and compare all bits.

        First the splits, then the widest forward, placed so that its last tokens cross a border of
        the key tiles. Longer contexts are not tested here.

        Raises:
            RowsDepend: some company changes some logit, logits are no numbers, or the model does
                not run.
        """
        generator = torch.Generator().manual_seed(0)
        # Half of what fits: others share the memory.
        most = min(self.max_context, self._num_memory_tokens // 2)
        start, num_rows = border_check(self.rule, most)
        length = max(sum(splits[0]), num_rows)
        ids = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        try:
            split = first_variant_split(lambda s: self.logits_of_split(ids[: sum(s)], s), splits)
            if split is None and not torch.equal(*self.logits_at_border(ids[:num_rows], start)):
                split = (num_rows,)
        # Such as one that torch cannot run in this precision or on this device.
        except CANNOT_RUN as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).split("\n")[0]
            raise RowsDepend(
                f"{self._described} does not run: {reason}; use another dtype or another model"
            ) from error
        if split is not None:
            if self.logits_of_split(ids[: sum(splits[0])], splits[0]).isnan().any():
                wider = "" if self.model.dtype == torch.float32 else ", or use float32"
                raise RowsDepend(
                    f"{self._described}: its logits are NaN, which damaged weights or another "
                    f"model's config cause; download the model again{wider}"
                )
            raise RowsDepend(
                f"{self._described}: logits change with the number of rows (forward passes of "
                f"{split} tokens), so drafted output may differ from plain; use {self._remedy}"
            )

    @property
    def _num_memory_tokens(self) -> int:
        """Tokens that the K/V memory holds."""
        raise NotImplementedError

    @property
    def _described(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__} in {dtype} on {self.device}"

    @property
    def _remedy(self) -> str:
        remedies = ["--exact off"]
        # Its package computes as it likes, whatever the dtype.
        if is_quantized(self.model):
            remedies.insert(0, "its full-precision weights with --quantize")
        elif self.model.dtype != torch.float32:
            remedies.insert(0, "float32")
        if self.device.type != "cpu":
            remedies.insert(0, "--device cpu")
        late = ", or import blockdraft before torch multiplies" if may_have_come_late() else ""
        return " or ".join(remedies) + late

    def release(self) -> None:
        """Give the model back as it was: no hooks, its own settings and training flags."""
        self._undo.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module in self._training:
            module.training = True
        self._training = []
        for config, own in self._own_settings:
            _set(config, own)
        forget_row_multiple(self.model)

    @contextmanager
    def released_after(self) -> Iterator[Self]:
        """Release on leaving, also after an exception."""
        try:
            yield self
        finally:
            self.release()


def replace_attention(model: PreTrainedModel, attention: str) -> None:
    """Let the layers of a model call another attention.

    Raises:
        ModelError: they would not.
    """
    model.set_attn_implementation(attention)
    # transformers only warns of a model whose attention cannot be replaced.
    if model.config._attn_implementation != attention:
        raise ModelError(
            f"{type(model).__name__} is not supported: its attention cannot be replaced; "
            f"use a model that supports transformers' attention interface, or {GENERATE}"
        )


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """All configs of a model, each once, those of a whole before those of its parts.

    The parts of a model for text and images may have settings of their own.
    """
    found: dict[int, PretrainedConfig] = {}
    queue = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while queue:
        config = queue.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = [getattr(config, name, None) for name in config.sub_configs]
            queue += [part for part in parts if part is not None]
    return list(found.values())


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _OWN_SETTINGS if hasattr(config, name)}


def _set(config: PretrainedConfig, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def filled(num_rows: int, rule: RowRule) -> int:
    """The number of rows of a forward that computes `num_rows` wanted ones."""
    return -(-num_rows // rule.row_multiple) * rule.row_multiple


def _fresh_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The head's input [1, rows, hidden]: the model cuts the wanted rows out of a longer batch."""
    return (with_fresh_strides(args[0]), *args[1:])


def _model_rule(model: PreTrainedModel) -> RowRule:
    # Routers and experts are no nn.Linear; experts are stacked.
    sizes = [p.shape[-2] * p.shape[-1] for p in model.parameters() if p.ndim >= 2]
    return backend_for(model.dtype, model.device).rule.for_weights_from(min(sizes))

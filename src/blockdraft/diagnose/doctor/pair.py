"""What a pair's files say of it, before anything is loaded."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from blockdraft.core.config import LLMConfig, Thinking
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.engine.trained_thinking import trained_thinking
from blockdraft.hub.resolve import resolve_drafter, resolve_model
from blockdraft.models.draft.checkpoint import read_config, read_provenance
from blockdraft.models.draft.config_reader import read_fields
from blockdraft.models.draft.speculators_layout import published_layout
from blockdraft.models.target.loading import resolve_device, resolve_dtype, target_without_weights
from blockdraft.speculate.drafters.shapes import DrafterShape, read_shape
from blockdraft.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair as it is written down.

    config, thinking: how it is to be run. target: its modules without weights. raw: the drafter's
    config.json; `fields`: what it comes to, and `trained`: what its trainer says that it was; empty
    if they cannot be read, and for a drafter that fills no blocks. shape: what all kinds have, None
    if it cannot be read. facts: its provenance, empty without. refusal: why it cannot run.
    """

    config: LLMConfig
    thinking: Thinking
    device: str
    dtype: torch.dtype
    target_folder: Path
    drafter_folder: Path
    target: PreTrainedModel
    tokenizer: Tokenizer
    raw: Mapping[str, Any]
    fields: Mapping[str, Any]
    trained: Mapping[str, Any]
    facts: Mapping[str, Any]
    shape: DrafterShape | None
    refusal: str | None

    @property
    def fills_blocks(self) -> bool:
        """True for the kinds whose config is that of DFlash."""
        return self.shape is None or self.shape.block_size is not None

    @property
    def target_config(self) -> Any:
        """Of the language model."""
        return self.target.config.get_text_config()

    @property
    def num_rows(self) -> int:
        """Rows of the target's embedding."""
        return int(self.target.get_input_embeddings().weight.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens that the tokenizer knows; rows beyond are padding."""
        return self.tokenizer.backend.get_vocab_size(with_added_tokens=True)

    def fact(self, part: str, name: str) -> Any:
        """A value of the provenance; None if it is not there."""
        values = self.facts.get(part)
        return values.get(name) if isinstance(values, Mapping) else None

    @property
    def known_thinking(self) -> str | None:
        """See `trained_thinking`."""
        return trained_thinking(self.config.drafter, self.drafter_folder)


def read_pair(config: LLMConfig, thinking: Thinking) -> Pair:
    """Read all that says what a pair is; its weights stay where they are.

    Raises:
        ConfigError: there is no drafter, or the chat template cannot be told about thinking.
        ModelError: a model cannot be found, or what it is cannot be read at all.
    """
    target_folder = resolve_model(config.target)
    drafter_folder = resolve_drafter(config, target_folder)
    if drafter_folder is None:
        raise ConfigError("there is no drafter to examine; name one with --drafter")
    tokenizer = load_tokenizer(target_folder, trust_remote_code=config.trust_remote_code)
    if thinking != "template" and not tokenizer.has_thinking_switch:
        raise ConfigError(
            f"--thinking is {thinking}, but the chat template of {config.target} has no such "
            "switch; leave it out"
        )
    device = resolve_device(config.device)
    target = target_without_weights(target_folder, trust_remote_code=config.trust_remote_code)
    raw: Mapping[str, Any] = read_config(drafter_folder)
    facts = read_provenance(drafter_folder)
    with suppress(ModelError):  # reading its shape says why
        raw = published_layout(raw)
    dtype = resolve_dtype(config.dtype, device)
    fields: Mapping[str, Any] = {}
    trained: Mapping[str, Any] = {}
    shape, refusal = None, None
    try:
        shape = read_shape(
            drafter_folder, target, dtype, trust_remote_code=config.trust_remote_code
        )
        refusal = shape.refusal
    except ModelError as error:
        refusal = str(error)
    if shape is None or shape.block_size is not None:
        fields = _read_fields(raw)
        written = facts.get("drafter")
        trained = _read_fields(written) if isinstance(written, Mapping) else {}
    return Pair(
        config=config,
        thinking=thinking,
        device=device,
        dtype=dtype,
        target_folder=target_folder,
        drafter_folder=drafter_folder,
        target=target,
        tokenizer=tokenizer,
        raw=raw,
        fields=fields,
        trained=trained,
        facts=facts,
        shape=shape,
        refusal=refusal,
    )


def _read_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of DraftConfig; empty if they cannot be read."""
    with suppress(ModelError):  # reading the shape says why
        return read_fields(raw)
    return {}

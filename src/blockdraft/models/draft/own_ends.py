"""What some drafters bring of their own: an embedding, a head, an embedding of the mask token.

Most take all three from the target. The head may know a part of the vocabulary only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockdraft.core.errors import ModelError
from blockdraft.core.files import replace_file
from blockdraft.hub.folder import INDEX_NAME, MASK_FILE, read_index
from blockdraft.models.draft.checkpoint import WEIGHTS_NAME, plain_name
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.eagle3_config import AnyDraftConfig
from blockdraft.models.draft.speculators_layout import (
    OF_THE_VERIFIER,
    d2t_of,
    draft_vocabulary_of,
    over_whole_vocabulary,
)

EMBEDDING_NAME = "embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
_CONFIDENCE = "confidence_head."
"""Of DSpark: how likely each slot is right. Here that is measured, see `allocation.calibration`."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnEnds:
    """Of a checkpoint; None is taken from the target.

    embedding: [V, D]. head: [V or len(token_ids), D]. token_ids: that the head knows, ascending;
    None if all.
    """

    embedding: Tensor | None
    head: Tensor | None
    token_ids: list[int] | None


def take_own_ends(tensors: dict[str, Tensor], config: DraftConfig, folder: Path) -> OwnEnds:
    """Take them out of a checkpoint's tensors, of which the layers remain.

    Raises:
        ModelError: one is not of the config's sizes, or the draft vocabulary is damaged.
    """
    unused = [name for name in tensors if config.dspark and name.startswith(_CONFIDENCE)]
    for name in (*OF_THE_VERIFIER, *unused):
        tensors.pop(name, None)
    token_ids = draft_vocabulary_of(tensors, config.vocab_size, folder)
    num_known = config.vocab_size if token_ids is None else len(token_ids)
    embedding = tensors.pop(EMBEDDING_NAME, None)
    head = tensors.pop(HEAD_NAME, None)
    check_shape(embedding, EMBEDDING_NAME, (config.vocab_size,), config, folder)
    check_shape(head, HEAD_NAME, (config.vocab_size, num_known), config, folder)
    if token_ids is not None and head is not None and len(head) != num_known:
        head = head[token_ids]
    if token_ids is not None:
        over_whole_vocabulary(tensors, token_ids, config.vocab_size)
    return OwnEnds(embedding, head, None if token_ids is None else token_ids.tolist())


def saved_ends(
    embedding: Tensor | None, head: Tensor | None, token_ids: list[int] | None
) -> dict[str, Tensor]:
    """What `take_own_ends` takes out again, by the names that other engines read too."""
    saved = {
        name: t for name, t in ((EMBEDDING_NAME, embedding), (HEAD_NAME, head)) if t is not None
    }
    if head is not None and token_ids is not None:
        saved["d2t"] = d2t_of(token_ids)
    return saved


def check_shape(
    found: Tensor | None, name: str, num_rows: Iterable[int], config: AnyDraftConfig, folder: Path
) -> None:
    """Compare an embedding or a head, if there is one, with the config.

    num_rows: how many it may have.

    Raises:
        ModelError: it is of another shape.
    """
    expected = [[rows, config.hidden_size] for rows in sorted(set(num_rows))]
    if found is not None and list(found.shape) not in expected:
        raise ModelError(
            f"{folder} holds {name} {list(found.shape)} instead of "
            f"{' or '.join(map(str, expected))}; use the files of one checkpoint"
        )


def has_own_ends(folder: Path) -> bool | None:
    """Whether the checkpoint has embedding and head: by names in its files; None without these.

    Raises:
        ModelError: the files are damaged.
    """
    names = _tensor_names(folder)
    return None if names is None else names >= {EMBEDDING_NAME, HEAD_NAME}


def has_own_embedding(folder: Path) -> bool | None:
    """The same of the embedding."""
    names = _tensor_names(folder)
    return None if names is None else EMBEDDING_NAME in names


def _tensor_names(folder: Path) -> set[str] | None:
    index = folder / INDEX_NAME
    try:
        if (folder / WEIGHTS_NAME).is_file():
            with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
                names = set(file.keys())
        elif index.is_file():
            names = set(read_index(index))
        else:
            return None
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot read {folder} ({error}); copy the checkpoint again") from error
    return {plain_name(name) for name in names}


def read_mask_embedding(folder: Path, config: DraftConfig) -> Tensor | None:
    """[D], learned in training, in place of the target's embedding of the mask token.

    The file holds the vector, or a dictionary with the vector and perhaps its token.

    Raises:
        ModelError: it is damaged, or of another drafter.
    """
    path = folder / MASK_FILE
    if not path.exists():
        return None
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    # What torch raises for a damaged or a forbidden file.
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ModelError(f"cannot read {path} ({reason}); copy the checkpoint again") from error
    if isinstance(content, dict):
        token_id = content.get("mask_token_id", config.mask_token_id)
        if token_id != config.mask_token_id:
            raise ModelError(
                f"{path} is of mask token {token_id}, and config.json names "
                f"{config.mask_token_id}; use the files of one checkpoint"
            )
        vectors = [value for value in content.values() if isinstance(value, Tensor)]
        content = vectors[0] if len(vectors) == 1 else None
    if not isinstance(content, Tensor) or content.numel() != config.hidden_size:
        raise ModelError(
            f"{path} holds no vector of {config.hidden_size} numbers; copy the checkpoint again"
        )
    return content.flatten()


def write_mask_embedding(folder: Path, vector: Tensor | None, mask_token_id: int) -> None:
    """What `read_mask_embedding` reads; None removes that of an earlier checkpoint."""
    path = folder / MASK_FILE
    if vector is None:
        path.unlink(missing_ok=True)
        return
    content = {"mask_token_id": mask_token_id, "embedding": vector.detach().cpu()}
    replace_file(path, lambda part: torch.save(content, part))

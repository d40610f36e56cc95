"""What the frozen target says about a text: the drafter's context features and its final states.

Shapes: b sequences, S tokens, K features, D the target's hidden size.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.errors import ModelError
from blockdraft.core.files import folder_lock, full_disk_refused, reserve_disk, write_whole
from blockdraft.data.dataset import Batch, Row, collate
from blockdraft.data.identity import texts_sha256
from blockdraft.data.store import Example, TextStore
from blockdraft.models.layers.request_rotation import RequestRotation
from blockdraft.models.supported import decoder_layers, decoder_of, layer_output

logger = logging.getLogger(__name__)

KEY = "key.json"
CPU_TOKENS = 2048
"""Tokens of one forward of the target on a CPU."""
ALONE_EXAMPLES = 32
"""Texts of like length that are padded together before they are packed or kept."""


def use_plain_attention(model: PreTrainedModel, name: Literal["sdpa", "eager"]) -> None:
    """Let a model attend causally and with a gradient, whatever its config asks for.

    Where its class does without `sdpa` (gpt-oss), `eager` takes its place.
    """
    try:
        model.set_attn_implementation(name)
    except ValueError:
        model.set_attn_implementation("eager")


class TextRotation:
    """Lets rotations of type longrope turn each text as decoding does, see `request_rotation`.

    By itself transformers would turn all texts of a forward by long factors if one of them is long,
    or if only its padding reaches beyond the original context.

    Attributes:
        decides: whether the model has such a rotation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._rotation = RequestRotation(model)
        self.decides = self._rotation.long_from is not None

    @contextmanager
    def of(self, lengths: Tensor) -> Iterator[None]:
        """For a forward of rows that hold one text each, of so many tokens [b]."""
        rotation = self._rotation
        if rotation.long_from is None:
            yield
            return
        is_long = lengths > rotation.long_from
        are_alike = bool((is_long == is_long[0]).all())
        rotation.is_long = bool(is_long[0]) if are_alike else is_long[:, None]
        # Only meanwhile: real decoding of the same model has a rotation that follows its requests.
        with rotation.replace():
            yield


class FrozenTarget:
    """A target that is only read.

    States of a text are [b, S, (K + 1) * D]: the outputs of the layers `layer_ids` side by side
    (the residual stream, as decoding takes them), then the final state that the head reads.

    Where processes share its layers, a forward is one of all processes: `most` then says how many
    any of them wants, and those that want fewer make up for it. `tick` is called after each.

    Raises:
        ModelError: the model keeps no list of layers, or an id is out of range, or a device map
            leaves its embedding or head without values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: Sequence[int],
        most: Callable[[int], int] | None = None,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._decoder, self._tick = decoder_of(model), tick
        layers = decoder_layers(model)
        if max(layer_ids, default=-1) >= len(layers):
            raise ModelError(
                f"{type(model).__name__} has no decoder layers {list(layer_ids)} to read features "
                f"from; choose other target_layer_ids"
            )
        model.eval().requires_grad_(False)
        self._rotation = TextRotation(model)
        self.rotates_by_text = self._rotation.decides
        # On a CPU the fused kernel is slower than plain products in whole forwards (12 texts of
        # 256 tokens, bfloat16, 2 cores: 2350 tokens a second against 2900).
        use_plain_attention(model, "eager" if model.device.type == "cpu" else "sdpa")
        self.is_shared = most is not None
        self.most = most or (lambda number: number)
        self.embed_weight: Tensor = model.get_input_embeddings().weight
        head: Tensor = model.get_output_embeddings().weight
        if self.embed_weight.is_meta or head.is_meta:
            raise ModelError(
                f"{type(model).__name__} does not fit: device_map left its embedding or head out "
                "of memory; use more devices"
            )
        self.lm_head_weight: Tensor = head.to(self.embed_weight.device)
        self.hidden_size: int = self.embed_weight.shape[1]
        self.layer_ids = tuple(layer_ids)
        self._captured: dict[int, Tensor] = {}
        for index in set(layer_ids):
            layers[index].register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[index] = layer_output(module, output)

        return hook

    @torch.no_grad()
    def states(self, token_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """States [b, S, (K + 1) * D] of texts.

        Args:
            token_ids: [b, S], padded on the right.
            lengths: [b], tokens of each text; None if none is padded.
        """
        if lengths is None:
            lengths = torch.full_like(token_ids[:, 0], token_ids.shape[1])
        rows = token_ids.shape[0]
        if token_ids.device.type == "cpu":
            # Scores of many texts at once leave the caches; a few texts fill the cores already.
            rows = max(1, CPU_TOKENS // token_ids.shape[1])
        parts = torch.split(token_ids, rows)
        num_forwards = self.most(len(parts))
        states = torch.cat(
            [self._states(*part) for part in zip(parts, torch.split(lengths, rows), strict=True)]
        )
        for _ in range(num_forwards - len(parts)):
            self._states(token_ids[:1, :1], lengths[:1])
        return states

    def _states(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        # No mask: rows are causal, so nothing real looks at the padding.
        with self._rotation.of(lengths):
            last = self._decoder(input_ids=token_ids, use_cache=False).last_hidden_state
        parts = [self._captured[index] for index in self.layer_ids]
        self._captured.clear()
        self._tick()
        # Layers may lie on several devices.
        return torch.cat([part.to(token_ids.device) for part in (*parts, last)], dim=-1)

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States -> context features [b, S, K * D] and final states [b, S, D]."""
        return states[..., : -self.hidden_size], states[..., -self.hidden_size :]


class FeatureCache:
    """States of training examples, kept on disk from the first time that they are computed.

    The files are mapped into memory; what is read often stays in the system's page cache. A folder
    left by an earlier run is used again if target, features, precision and examples are the same,
    and grows if there are only more examples behind those.

    Args:
        target: to compute what the folder lacks.
        examples: in the order of the files.
        folder: where; None computes everything anew each time.
        target_sha256: what the target is known by, see `data.identity`.
    """

    def __init__(
        self,
        target: FrozenTarget,
        examples: Sequence[Example],
        folder: Path | None,
        target_sha256: str,
    ) -> None:
        self._target = target
        self._examples = examples
        self._folder = folder
        self._width = (len(target.layer_ids) + 1) * target.hidden_size
        self._lengths: list[int] = TextStore.of(examples).lengths.tolist()
        if folder is None:
            return
        self._starts = [0, *accumulate(self._lengths)]
        self._open(folder, target_sha256)

    def _open(self, folder: Path, target_sha256: str) -> None:
        dtype = self._target.embed_weight.dtype
        folder.mkdir(parents=True, exist_ok=True)
        states, filled = folder / "states.bin", folder / "filled.bin"
        made_as = f"{target_sha256} {self._target.layer_ids} {self._target.hidden_size} {dtype}"
        if self._target.rotates_by_text:
            made_as += " rotated by text"  # earlier versions rotated all texts of a batch alike
        key = _key(made_as, self._examples)
        is_short = self._is_short(states, len(self._examples)) or not filled.exists()
        if _read_key(folder) != key or is_short:
            with folder_lock(folder):
                self._make(folder, key)
        size = self._starts[-1] * self._width
        flat = torch.from_file(str(states), shared=True, size=size, dtype=dtype)
        self._states = flat.view(-1, self._width)
        self._filled = torch.from_file(
            str(filled), shared=True, size=len(self._examples), dtype=torch.uint8
        )

    def _make(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Let the folder be of these examples; what it holds of the first of them stays."""
        states, filled = folder / "states.bin", folder / "filled.bin"
        kept = _read_key(folder)
        is_other = kept != _key(key["made_as"], self._examples[: kept["num_examples"]])
        if filled.exists() and (is_other or self._is_short(states, kept["num_examples"])):
            what = "features of something else" if is_other else "only part of its features"
            logger.warning("%s holds %s; they are computed again", folder, what)
            # The flags first: without them nothing counts as there.
            filled.unlink()
            states.unlink(missing_ok=True)
        with full_disk_refused(folder):
            itemsize = self._target.embed_weight.dtype.itemsize
            reserve_disk(states, self._starts[-1] * self._width * itemsize)
            # torch overwrites the first byte of a file that it lengthens; new flags read as zero.
            filled.touch()
            os.truncate(filled, len(self._examples))
            write_whole(folder / KEY, json.dumps(key))

    def _is_short(self, states: Path, num_examples: int) -> bool:
        """True if the file was deleted or cut off: mapped, what it lacks would read as zeros."""
        size = self._starts[num_examples] * self._width * self._target.embed_weight.dtype.itemsize
        return not states.exists() or states.stat().st_size < size

    def get(self, rows: Sequence[Row], batch: Batch) -> Tensor:
        """States [b, S, (K + 1) * D] of the rows of examples of which `batch` was made.

        What stands in the padding is arbitrary but finite. Where processes share the target all
        of them call, also without rows.
        """
        device = batch.token_ids.device
        is_plain = self._folder is None and not self._target.is_shared
        if rows and is_plain and all(len(row) == 1 for row in rows):
            return self._target.states(batch.token_ids, batch.lengths)
        states_of = self._alone if self._folder is None else self._cached
        parts = states_of(rows, device)
        like = next(iter(parts.values())) if parts else self._target.embed_weight
        states = like.new_zeros(*batch.token_ids.shape, self._width)
        for number, row in enumerate(rows):
            start = 0
            for index in row:
                part = parts[index]
                states[number, start : start + len(part)] = part
                start += len(part)
        return states.to(device, non_blocking=True)

    def _alone(self, rows: Sequence[Row], device: torch.device) -> dict[int, Tensor]:
        """States of each example, none of which sees another."""
        indices = sorted((index for row in rows for index in row), key=self._length)
        parts: dict[int, Tensor] = {}
        starts = range(0, len(indices), ALONE_EXAMPLES)
        num_calls = self._target.most(len(starts))
        for start in starts:
            some = indices[start : start + ALONE_EXAMPLES]
            batch = collate([self._examples[index] for index in some], device)
            computed = self._target.states(batch.token_ids, batch.lengths)
            parts |= {index: computed[row, : self._length(index)] for row, index in enumerate(some)}
        for _ in range(num_calls - len(starts)):
            self._target.states(torch.zeros(1, 1, dtype=torch.long, device=device))
        return parts

    def missing(self) -> list[int]:
        """The examples whose states are not in the folder yet."""
        return (self._filled == 0).nonzero().squeeze(1).tolist()

    def put(self, index: int, states: Tensor) -> None:
        """Keep the states [S, (K + 1) * D] of an example in the folder."""
        self._states[self._starts[index] : self._starts[index + 1]] = states
        # Only now: a killed run leaves no example that counts as filled and is not.
        self._filled[index] = 1

    def _cached(self, rows: Sequence[Row], device: torch.device) -> dict[int, Tensor]:
        indices = [index for row in rows for index in row]
        missing = [index for index in indices if not self._filled[index]]
        for index, part in self._alone([missing], device).items():
            self.put(index, part)
        return {i: self._states[self._starts[i] : self._starts[i + 1]] for i in indices}

    def _length(self, index: int) -> int:
        return self._lengths[index]


def _key(made_as: str, examples: Sequence[Example]) -> dict[str, Any]:
    """What a folder's states are of, and how they were made."""
    return {"num_examples": len(examples), "made_as": made_as, "sha256": texts_sha256(examples)}


def _read_key(folder: Path) -> dict[str, Any]:
    """The folder's own key; one that no states have, if it cannot be read."""
    try:
        key: dict[str, Any] = json.loads((folder / KEY).read_text(encoding="utf-8"))
        return {**key, "num_examples": int(key["num_examples"])}
    except (OSError, ValueError, TypeError, KeyError):
        return {"num_examples": 0}

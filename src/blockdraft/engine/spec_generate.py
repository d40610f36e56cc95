"""The published interface of a DFlash drafter: `draft.spec_generate(target=..., input_ids=...)`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.errors import ModelError, RequestError
from blockdraft.core.request import SamplingParams, check_count
from blockdraft.engine.engine import Engine
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.draft import dflash
from blockdraft.models.target.loading import check_pair
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.kinds import block_drafter


class DraftModel(dflash.DraftModel):
    """A DFlash drafter that can also decode together with a transformers model."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a drafter given by a name of the catalog, a folder, or a hub id.

        Raises:
            ModelError: it cannot be found, or is not a drafter that this version runs.
        """
        return super().from_pretrained(resolve_model(str(folder)), dtype, device)

    def spec_generate(
        self,
        target: PreTrainedModel,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] | None = None,
        *,
        seed: int | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        """Continue a prompt with the target's own tokens, drafted by this model.

        The output is the target's, whatever the drafter guesses. `target` runs in evaluation mode
        and is left as it was, also after an exception. Loading an `LLM` tests that this machine's
        kernels keep drafted output equal to plain; here nothing is tested, to save a second a call.
        On a CPU both models compute from packed copies of their weights while the call lasts, which
        takes a moment to make and as much memory again. Autocast does not apply: both models
        compute in the type of their weights.

        Args:
            target: a causal LM of the same type and on the same device as the drafter.
            input_ids: [1, prompt], int32 or int64.
            max_new_tokens: most tokens to add.
            temperature: 0 is greedy.
            stop_token_ids: any of these ends the output, and is part of it.
            seed: of the sampling; None draws one.
            block_size: at most the checkpoint's, which is the default.

        Returns:
            [1, prompt + new], on the device of `input_ids`.

        Raises:
            ModelError: the target is not supported, or the drafter does not fit it.
            RequestError: a parameter is out of its range.
        """
        _check_input(input_ids)
        check_count("max_new_tokens", max_new_tokens, 1)
        stop_ids = () if stop_token_ids is None else stop_token_ids
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature,
            # Any iterable will do: it is checked there, and becomes a tuple.
            stop_token_ids=cast("tuple[int, ...]", stop_ids),
            seed=seed,
        )
        if block_size is not None:
            _check_block_size(block_size, self.config.block_size)
            params = replace(params, num_draft_tokens=block_size - 1)
        _check_same_type(self, target)
        check_pair(target, self.config)
        with _own_types_and_devices(target):
            output_ids = self._decode(target, input_ids[0].tolist(), params)
        return torch.cat([input_ids, input_ids.new_tensor([output_ids])], dim=1)

    def _decode(
        self, target: PreTrainedModel, prompt_ids: list[int], params: SamplingParams
    ) -> list[int]:
        sequential = SequentialTarget(target, layer_ids=self.config.target_layer_ids)
        with sequential.released_after():
            embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
            engine = Engine(sequential, block_drafter(self, embedding.weight, head.weight))
            key = engine.add(prompt_ids, params)
            while engine.has_work:
                engine.step()
            return engine.take(key).sequence.output_ids


@contextmanager
def _own_types_and_devices(target: PreTrainedModel) -> Iterator[None]:
    """Neither autocast nor another default device decides where and how numbers are computed."""
    with torch.autocast(target.device.type, enabled=False), torch.device("cpu"):
        yield


def _check_input(input_ids: object) -> None:
    remedy = "give one sequence of token ids, [1, prompt], int32 or int64"
    if not isinstance(input_ids, Tensor):
        raise RequestError(f"input_ids is {input_ids!r:.60}; {remedy}")
    # The output is of the same type, so it must have room for every id.
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise RequestError(f"input_ids are {input_ids.dtype}; {remedy}")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise RequestError(f"input_ids have shape {list(input_ids.shape)}; {remedy}")


def _check_block_size(block_size: int, trained: int) -> None:
    if type(block_size) is not int or not 1 <= block_size <= trained:
        raise RequestError(
            f"block_size is {block_size!r}; give a number from 1 (plain decoding) to {trained}, "
            "the size that the drafter was trained with"
        )


def _check_same_type(model: dflash.DraftModel, target: PreTrainedModel) -> None:
    if not isinstance(target, nn.Module):
        raise ModelError(f"the target is {target!r:.60}; give a loaded model of transformers")
    own = model.fc.weight
    if own.dtype != target.dtype or own.device != target.device:
        raise ModelError(
            f"the drafter is {own.dtype} on {own.device} and the target {target.dtype} on "
            f"{target.device}; make them equal, for example with draft.to(target.device, "
            "target.dtype)"
        )

"""Models whose weights are read from a GGUF file as they are.

Blocks of 32 numbers become weights in groups, number by number: Q4_1 and Q8_0 are such groups, and
Q4_0 is one whose minimum is -8 scales. What other types hold is dequantized. Names and orders of
tensors are those of transformers' own GGUF reader.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from blockdraft.core.errors import ModelError
from blockdraft.core.machine import give_back_memory
from blockdraft.kernels.weights import GROUP, GroupWeight
from blockdraft.models.layers.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    num_bytes,
    replace_module,
    warn_if_slow,
)

_PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
_ROTATION_FACTORS = "rope_freqs.weight"
"""By what each frequency of the rotation is divided: so files say RoPE of type llama3."""

logger = logging.getLogger(__name__)


def load_gguf_model(
    path: Path, folder: Path, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """The model of a folder with the weights of a GGUF file, in evaluation mode.

    Raises:
        ModelError: the file lacks a weight, or has one that the model does not.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _make_rotations(model, config, device)
    reader = gguf.GGUFReader(path)
    _read(reader, path, model, dtype, device)
    _tie(model)
    missing = sorted(
        name
        for name, held in (*model.named_parameters(), *model.named_buffers())
        if held.device.type == "meta"
    )
    if missing:
        raise _unsupported(path, f"lacks {missing[0]} and {len(missing) - 1} more")
    give_back_memory()
    logger.info("weights of %s take %.3g GiB", path.name, num_bytes(model) / 2**30)
    warn_if_slow(model)
    return model.eval()


def in_groups(data: np.ndarray, kind: Kind, dtype: torch.dtype) -> GroupWeight | None:
    """A tensor [outputs, bytes] in blocks, as it is; None if its blocks are of another kind."""
    if kind not in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        return None
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert block_size == GROUP
    blocks = data.reshape(data.shape[0], -1, block_bytes)
    scales = _halves(blocks[..., :2])
    if kind == Kind.Q8_0:
        return GroupWeight(_copied(blocks[..., 2:]).view(torch.int8), scales, None, dtype)
    if kind == Kind.Q4_0:
        return GroupWeight(_copied(blocks[..., 2:]), scales, scales * -8, dtype)
    return GroupWeight(_copied(blocks[..., 4:]), scales, _halves(blocks[..., 2:4]), dtype)


def _copied(part: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(part, dtype=np.uint8, order="C"))


def _halves(part: np.ndarray) -> Tensor:
    return _copied(part).view(torch.float16)[..., 0]


def _unsupported(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path} {what}; use the model's original Hugging Face folder with --quantize"
    )


def _read(
    reader: Any, path: Path, model: PreTrainedModel, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Give a model on the meta device its parameters."""
    architecture = reader.get_field("general.architecture").contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(model.config.to_dict())
    names: Mapping[str, str] = get_gguf_hf_weights_map(model, processor)
    read: Counter[Kind] = Counter()
    dequantized: Counter[Kind] = Counter()
    for tensor in reader.tensors:
        if tensor.name == _ROTATION_FACTORS:
            _slow_down(model, torch.from_numpy(np.array(tensor.data, dtype=np.float32)))
            continue
        if tensor.name not in names:
            # transformers leaves it out without a word.
            raise _unsupported(path, f"holds {tensor.name}, for which the model has no place")
        module_name, _, part = names[tensor.name].rpartition(".")
        module = model.get_submodule(module_name)
        shape, expected = [*map(int, reversed(tensor.shape))], [*getattr(module, part).shape]
        if shape != expected:
            raise _unsupported(path, f"holds {tensor.name} {shape} instead of {expected}")
        is_known = part == "weight" and type(module) in (nn.Linear, nn.Embedding)
        grouped = in_groups(tensor.data, tensor.tensor_type, dtype) if is_known else None
        if grouped is not None:
            grouped = grouped.at(_order(processor, tensor.name, grouped.shape[0])).to(device)
            replace_module(model, module, _quantized(module, grouped))
            read[tensor.tensor_type] += 1
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = np.array(processor.process(values, tensor.name).weights)
        held = torch.from_numpy(values).to(device, dtype)
        setattr(module, part, nn.Parameter(held, requires_grad=False))
        dequantized[tensor.tensor_type] += tensor.tensor_type not in _PLAIN
    logger.info("read as they are: %s", _counted(read))
    if others := +dequantized:
        logger.warning(
            "no kernel reads these types, so their tensors are dequantized to %s: %s",
            str(dtype).removeprefix("torch."), _counted(others),
        )  # fmt: skip


def _order(processor: Any, name: str, num_rows: int) -> Tensor:
    """Which rows of a tensor become rows 0, 1, ...: llama.cpp has those of heads in another order.

    The reader is asked with the numbers of the rows in place of their values.
    """
    numbers = np.arange(num_rows, dtype=np.float32)[:, None]
    return torch.from_numpy(processor.process(numbers, name).weights[:, 0].astype(np.int64))


def _quantized(module: nn.Module, weight: GroupWeight) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(weight, module.padding_idx)
    assert isinstance(module, nn.Linear)
    return QuantizedLinear(weight, module.bias)


def _tie(model: PreTrainedModel) -> None:
    """A head that the file does not have is the embedding."""
    if not model.config.tie_word_embeddings:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, QuantizedEmbedding):
        replace_module(model, head, QuantizedLinear(embedding.quantized, None))
    else:
        head.weight = embedding.weight


def _make_rotations(model: PreTrainedModel, config: Any, device: torch.device | str) -> None:
    """They have numbers of their own, which no file holds."""
    for module in list(model.modules()):
        if any(buffer.device.type == "meta" for buffer in module.buffers(recurse=False)):
            replace_module(model, module, type(module)(config=config).to(device))


def _slow_down(model: PreTrainedModel, factors: Tensor) -> None:
    """Divide the frequencies [head_dim / 2] of a model's rotations."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in ("inv_freq", "original_inv_freq"):
                buffer /= factors.to(buffer.device)


def _counted(kinds: Mapping[Kind, int]) -> str:
    return ", ".join(f"{number} of {kind.name}" for kind, number in kinds.items()) or "none"

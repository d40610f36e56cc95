"""Loading a target, and refusing a drafter that was made for another one."""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from blockdraft.core.config import Quantize
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.core.threads import SERVING, num_threads
from blockdraft.hub.folder import gguf_file
from blockdraft.hub.model_config import load_config
from blockdraft.kernels.backends import in_hardware
from blockdraft.kernels.torch.cards import settle_cards
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.eagle3_config import AnyDraftConfig, Eagle3Config
from blockdraft.models.layers.quantized import quantize_model
from blockdraft.models.supported import (
    decoder_layers,
    is_quantized,
    quantization_of,
    quantized_by,
)
from blockdraft.models.target.stored import (
    check_scheme,
    check_unpacked,
    unused_bias,
    whole_number,
)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_SCALES = ("weight_scale", "scales", "weight_g_idx")
"""How the names of tensors begin without which packed weights are others."""

_REMEDY = "use a drafter made for this target, or none to decode plainly"

logger = logging.getLogger(__name__)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """A precision by name; "auto" is bfloat16 where the hardware multiplies it, else float32.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if in_hardware(torch.bfloat16, device) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> str:
    """A device by name; "auto" is a GPU that CUDA can use, else the CPU, and is logged once.

    Raises:
        ConfigError: the device is unknown, absent, or holds no numbers.
    """
    if name == "auto":
        return _chosen_device()
    if (reason := _unusable_because(name)) is not None:
        raise ConfigError(f"device {name!r} is not usable ({reason}); use cpu or auto")
    return name


@lru_cache
def _chosen_device() -> str:
    if not torch.cuda.is_available():
        logger.info("device auto: cpu, because CUDA finds no GPU")
        return "cpu"
    if (reason := _unusable_because("cuda")) is not None:
        logger.warning("device auto: cpu, because the GPU is not usable (%s)", reason)
        return "cpu"
    logger.info("device auto: cuda, %s", torch.cuda.get_device_name())
    return "cuda"


def _unusable_because(device: str) -> str | None:
    try:
        torch.zeros(1, device=device).item()  # the meta device makes tensors, but without numbers
    # RuntimeError: an unknown name or an absent device; AssertionError: torch built without it.
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n")[0]
    return None


def use_threads(asked: int | None, how: str = SERVING) -> None:
    """Set torch's threads, which are the kernels' too; see `num_threads`."""
    torch.set_num_threads(num_threads(asked, torch.get_num_threads(), how))


def load_target_model(
    folder: Path,
    dtype: torch.dtype,
    device: str = "cpu",
    device_map: str | Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> PreTrainedModel:
    """Load a causal LM from a folder, in evaluation mode, its weights quantized or not.

    With `device_map` transformers spreads it over the devices that there are. Only with
    `trust_remote_code` is code of the folder run.

    Raises:
        ModelError: transformers cannot load it, it cannot be quantized, or see `load_config`.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    method = quantized_by(config)
    transformers_logging.disable_progress_bar()
    settle_device(device)
    if (path := gguf_file(folder)) is not None:
        if device_map is not None:
            raise ModelError(f"{path} runs on one device; leave out device_map")
        return _load_gguf(path, folder, dtype, device, quantize)
    try:
        _check_method(config)
        check_scheme(config)
        model, report = _auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            # Else transformers says which differ in a table on the terminal only.
            ignore_mismatched_sizes=True,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            **({"config": config} if _unpacks_at_load(config) else {}),
        )
        if method is not None and not is_quantized(model):
            check_unpacked(folder, config, model)
        model = (model if device_map else model.to(device)).eval()
    # transformers raises any type for a broken folder; all mean the same to a user.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if method is not None:
            raise _not_quantized_here(folder, method, error) from error
        raise _unusable(folder, error) from error
    assert isinstance(model, PreTrainedModel)
    _check_weights(folder, report, model, method)
    if method is not None and not is_quantized(model) and dtype.itemsize > 2:
        # transformers unpacked it (fp8, mxfp4), and left its other weights as they are stored.
        # Never to fewer bits: some models keep a part in more.
        model = model.to(dtype)
    if quantize is not None:
        quantize_model(model, quantize)
    return model


def _check_weights(
    folder: Path, report: Mapping[str, Any], model: PreTrainedModel, method: str | None
) -> None:
    """Refuse weights that do not fill a model: transformers warns, and fills in random numbers.

    It takes whole numbers as they are. Of weights that the model has no place for it warns too, and
    they stay unused: some folders hold parts that are for training, or for images. But without its
    scales a weight is another, and a layer without its bias computes something else.
    """
    if differing := sorted(report["mismatched_keys"]):
        name, found, expected = differing[0]
        raise _unusable(
            folder,
            f"{name} is {list(found)} in its weights and {list(expected)} by its config.json "
            f"({len(differing) - 1} more differ)",
        )
    if missing := sorted(report["missing_keys"]):
        raise _unusable(folder, f"its weights lack {missing[0]} and {len(missing) - 1} more")
    unused = set(report["unexpected_keys"])
    for name in sorted(unused):
        module, _, part = name.rpartition(".")
        if part.startswith(_SCALES) and f"{module}.weight" not in unused:
            told = (
                "its config.json does not say how"
                if method is None
                else f"transformers does not use it, though config.json says {method}"
            )
            raise ModelError(
                f"{folder} holds {name}: its weights are quantized, and {told}; give the model's "
                "full-precision weights with --quantize"
            )
    if method is None and (name := whole_number(folder, unused, model)) is not None:
        raise ModelError(
            f"{folder} holds {name} in whole numbers, and its config.json does not say of which "
            "values; give the model's full-precision weights"
        )
    if (bias := unused_bias(folder, unused, model)) is not None:
        raise ModelError(
            f"{folder} holds {bias}, for which {type(model).__name__} has no place by its "
            "config.json; correct that: some models have a setting such as attention_bias"
        )


def settle_device(device: str) -> None:
    """Before anything is computed on it, for this process; see `settle_cards`."""
    if torch.device(device).type == "cuda":
        settle_cards()


def _auto_class(config: PretrainedConfig) -> Any:
    """By what transformers makes the model: some it knows as models for text and images only.

    Of these the part for text is used.
    """
    kind = type(config)
    is_wrapper = (
        kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    return AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM


def _load_gguf(
    path: Path, folder: Path, dtype: torch.dtype, device: str, quantize: Quantize | None
) -> PreTrainedModel:
    if quantize is not None:
        raise ModelError(f"{path} is quantized already; leave out --quantize")
    # The reader's package is not needed for anything else, training for instance.
    from blockdraft.models.target.gguf import load_gguf_model

    try:
        return load_gguf_model(path, folder, dtype, device)
    except ModelError:
        raise
    # The readers raise any type for a broken file; all mean the same to a user.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _unusable(path, error) from error


def _check_method(config: PretrainedConfig) -> None:
    """Raise ValueError for a method that transformers would skip, and take its numbers as they are.

    Those of eight bits fit, and are wrong without their scales.
    """
    found = quantization_of(config)
    if found and "quant_method" in found and not AutoHfQuantizer.supports_quant_method(found):
        raise ValueError(f"transformers {version('transformers')} does not know this method")


def _unpacks_at_load(config: Any) -> bool:
    """True if a config now asks for what transformers would else do in the first forward."""
    if quantized_by(config) != "compressed-tensors":
        return False
    # Also where the part for text alone says so (Kimi-K2.5): else layers for images are packed too.
    config.quantization_config = {**quantization_of(config), "dequantize": True}
    return True


def _not_quantized_here(folder: Path, method: str, reason: Exception) -> ModelError:
    """transformers' reason names the package that is missing, and how to install it."""
    return ModelError(
        f"{folder} is quantized by {method}, and this installation cannot load it: "
        f"{_first_line(reason)}; or give the model's full-precision weights with --quantize"
    )


def _first_line(reason: object) -> str:
    if isinstance(reason, KeyError):
        return f"{reason} is unknown or missing"
    return str(reason).strip().split("\n")[0].rstrip(".") or type(reason).__name__


def _unusable(folder: Path, reason: object) -> ModelError:
    return ModelError(
        f"cannot load a causal LM from {folder}: {_first_line(reason)}; check the folder, or "
        "delete it and download it again"
    )


def target_without_weights(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The modules of a causal LM on the meta device: their shapes, at no cost.

    Raises:
        ModelError: transformers does not know the model, or see `load_config`.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    # transformers raises any type for a broken folder; all mean the same to a user.
    except Exception as error:
        raise _unusable(folder, error) from error
    assert isinstance(model, PreTrainedModel)
    return model


def check_pair(model: PreTrainedModel, draft: DraftConfig, *, has_own_ends: bool = False) -> None:
    """Refuse a drafter that cannot work with a target.

    has_own_ends: it brings embedding and head, so its width may be another than the target's.

    Raises:
        ModelError: says which size differs, and both values.
    """
    num_layers = len(decoder_layers(model))
    _check_sizes(model, draft, may_be_of_other_width=has_own_ends)
    if draft.num_target_layers is not None:
        _check_equal("number of target layers", draft.num_target_layers, num_layers)
    num_rows = model.get_input_embeddings().weight.shape[0]
    if draft.mask_token_id >= num_rows:
        raise ModelError(
            f"the drafter does not fit the target: mask token {draft.mask_token_id} is outside the "
            f"target's embedding of {num_rows} rows; {_REMEDY}"
        )
    _check_layers(draft.target_layer_ids, num_layers)


def check_eagle3(
    model: PreTrainedModel, draft: Eagle3Config, *, has_embedding: bool = False
) -> tuple[int, ...]:
    """Refuse an EAGLE-3 drafter that cannot work with a target; returns the layers that it reads.

    has_embedding: it brings one, so its width may be another than the target's.

    Raises:
        ModelError: says which size differs, and both values.
    """
    _check_sizes(model, draft, may_be_of_other_width=has_embedding)
    num_layers = len(decoder_layers(model))
    layer_ids = draft.layers_of(num_layers)
    _check_layers(layer_ids, num_layers)
    return layer_ids


def _check_sizes(
    model: PreTrainedModel, draft: AnyDraftConfig, *, may_be_of_other_width: bool
) -> None:
    config = model.config.get_text_config()
    features = "hidden size of the target's features"
    _check_equal(features, draft.target_hidden_size, config.hidden_size)
    _check_equal("vocabulary size", draft.vocab_size, config.vocab_size)
    if not may_be_of_other_width:
        width = model.get_input_embeddings().weight.shape[1]
        _check_equal("hidden size", draft.hidden_size, width)


def _check_equal(what: str, of_drafter: int, of_target: int) -> None:
    if of_drafter != of_target:
        raise ModelError(
            f"the drafter does not fit the target: {what} is {of_drafter} in the drafter and "
            f"{of_target} in the target; {_REMEDY}"
        )


def _check_layers(layer_ids: Sequence[int], num_layers: int) -> None:
    wrong = [i for i in layer_ids if i >= num_layers]
    if wrong:
        raise ModelError(
            f"the drafter does not fit the target: it reads layers {wrong}, and the target has "
            f"layers 0 to {num_layers - 1}; {_REMEDY}"
        )

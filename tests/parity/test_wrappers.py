"""Models for text and images, in text use: their folders load, and drafts change nothing.

transformers knows most of them by another auto class than causal LMs.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.core.request import SamplingParams
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import load_target_model, target_without_weights
from blockdraft.models.target.paged import PagedTarget
from tests.batched import Request, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity.checks import stock_greedy
from tests.parity.test_architectures import IN_ONE_FORWARD, RECURRENT
from tests.tiny import NUM_LAYERS, TINY_SIZES, VOCAB_SIZE, randomize

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_DEEP_VISION = {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_THREE_AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}

WRAPPERS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "Gemma3": ("Gemma3Config", {"sliding_window": 24}, _VISION),
    "Gemma4": (
        "Gemma4Config",
        {**IN_ONE_FORWARD["Gemma4"], "pad_token_id": 0},
        {**_VISION, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "Kimi_K25": ("Kimi_K25Config", IN_ONE_FORWARD["DeepseekV3"], _VISION),
    # For sound; hands positions on to its part for text without naming them.
    "MossTranscribeDiarize": (
        "MossTranscribeDiarizeConfig",
        {"model_type": "qwen3"},
        {**_VISION, "max_source_positions": 16},
    ),
    "Mistral3": ("Mistral3Config", {"model_type": "mistral"}, _VISION),
    "Qwen2_5_VL": ("Qwen2_5_VLConfig", {"rope_parameters": _THREE_AXES}, _DEEP_VISION),
    "Qwen3VL": ("Qwen3VLConfig", {"rope_parameters": _THREE_AXES}, _DEEP_VISION),
    "Qwen3_5": ("Qwen3_5Config", RECURRENT["Qwen3_5"], _DEEP_VISION),
    # Its logits are those of all rows, whichever are wanted.
    "VideoLlama3": ("VideoLlama3Config", {"model_type": "qwen2"}, _VISION),
}
"""The config, and options of its parts for text and for images or sound."""


def write_wrapper(folder: Path, name: str, **changes: object) -> PreTrainedModel:
    """A folder as published: both parts; returns its model, in float64.

    changes: options of the part for text.
    """
    config_name, text, other = WRAPPERS[name]
    kind = getattr(transformers, config_name)
    part = "vision_config" if "vision_config" in kind.sub_configs_defaults else "audio_config"
    own_text = {**TINY_SIZES, "vocab_size": VOCAB_SIZE, **text, **changes}
    config = kind(text_config=own_text, **{part: other})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        randomize(model)
    model.double().save_pretrained(folder)
    return model.eval()


def requests() -> list[Request]:
    """Greedy and sampled, beyond the windows; two have a beginning of a page in common."""
    draw = random.Random(1)
    prompts = [tuple(draw.randrange(VOCAB_SIZE) for _ in range(n)) for n in (70, 3, 33)]
    prompts.append(prompts[0][:64] + prompts[2])
    params = (
        SamplingParams(max_tokens=24, logprobs=0),
        SamplingParams(max_tokens=24, temperature=3.0, seed=7, logprobs=0),
    )
    return [Request(p, params[i % 2], arrival=3 * i) for i, p in enumerate(prompts)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRAPPERS)
def test_its_folder_drafts_what_it_decodes(name: str, tmp_path: Path) -> None:
    whole = write_wrapper(tmp_path, name)
    assert len(decoder_layers(target_without_weights(tmp_path))) == NUM_LAYERS
    model = load_target_model(tmp_path, torch.float64)
    model.set_experts_implementation("eager")  # the default one has no float64
    whole.set_experts_implementation("eager")
    with PagedTarget(model, Pages(20)).released_after() as target:
        target.check_row_invariance()
        plain = run_alone(target, requests())
        drafter = NoisyOracleDrafter(15, VOCAB_SIZE, seed=3)
        known = [answer.token_ids for answer in plain]
        drafted = run_batched(target, drafter, requests(), known=known, prefill_chunk=7)
    assert drafted.answers == plain
    assert sum(answer.acceptance.num_accepted for answer in drafted.answers) > 10
    assert len({token for answer in plain for token in answer.token_ids}) >= 8
    for request, answer in list(zip(requests(), plain, strict=True))[::2]:
        assert answer.token_ids == stock_greedy(whole, request.prompt, 24)

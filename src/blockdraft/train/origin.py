"""What a drafter was made for, and what may be expected of it: facts that its users compare with.

`blockdraft doctor` reads them, years later perhaps, on another machine.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from blockdraft.core.config import Thinking
from blockdraft.core.errors import RequestError
from blockdraft.data.identity import template_sha256
from blockdraft.data.shards import told_thinking
from blockdraft.engine.bundled_prompts import (
    answer_bundled,
    describe_answers,
    encode_bundled,
    read_bundled,
)
from blockdraft.engine.trained_thinking import MIXED
from blockdraft.models.draft.checkpoint import read_provenance, write_provenance
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train.config import TrainConfig
from blockdraft.train.true_tau import serving

logger = logging.getLogger(__name__)


def describe_target(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The target by its weights, precision and chat template; what is not known is None.

    `thinking` is what the template was told when the answers were made.

    Raises:
        ConfigError: a manifest of answers is damaged.
        ModelError: the target's weights cannot be read.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        config.target, local_files_only=True, trust_remote_code=False
    )
    told = told_thinking(config.data)
    return {
        "weights_sha256": weights_sha256(config.target),
        "dtype": str(dtype).removeprefix("torch."),
        "quantize": config.quantize,
        "template_sha256": template_sha256(tokenizer) if tokenizer.chat_template else None,
        "thinking": MIXED if len(told) > 1 else next(iter(told), None),
    }


def write_expected(
    folder: Path, config: TrainConfig, model: PreTrainedModel, tick: Callable[[], object]
) -> None:
    """Measure the drafter in a folder, and add tau of each category to its provenance.

    Nothing happens if it is there already, or if the target cannot take the bundled prompts.

    Raises:
        ModelError: the target cannot be served.
    """
    facts = read_provenance(folder)
    if "expected" in facts:
        return
    tokenizer = load_tokenizer(config.target)
    told = facts["target"]["thinking"]
    thinking: Thinking = told if told in ("on", "off") else "template"
    try:
        encoded = encode_bundled(tokenizer, read_bundled(), thinking)
        with serving(model, folder) as engine:
            answers = answer_bundled(engine, encoded, tokenizer.eos_ids, tick)
    except RequestError as error:
        logger.warning("what to expect of the drafter is not known: %s", error)
        return
    write_provenance(
        folder, facts | {"expected": {"thinking": thinking, **describe_answers(answers)}}
    )

"""Hashes of what a proof has asked and got. Loads no model library."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from blockdraft.measure.identity import hash_text
from blockdraft.proof.corpus import ProofPrompt


def hash_prompts(prompts: Sequence[ProofPrompt]) -> str:
    """SHA-256 over what is asked; the same as that of certificates which know no system message."""
    return hash_value([_facts(prompt) for prompt in prompts])


def _facts(prompt: ProofPrompt) -> dict[str, Any]:
    facts = asdict(prompt)
    if prompt.system is None:
        del facts["system"]
    return facts


def hash_value(value: Any) -> str:
    """SHA-256 of plain values. Floats count to the last bit: JSON writes them to be read back."""
    return hash_text(json.dumps(value, sort_keys=True))

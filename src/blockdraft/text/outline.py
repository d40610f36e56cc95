"""What is known of a target before its weights are read, and what can be refused then."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.request import SamplingParams, check_length
from blockdraft.text.grammar import Grammars
from blockdraft.text.tokenizer import Tokenizer

Check = Callable[[Sequence[int], SamplingParams], None]
"""Raises RequestError where prompt ids cannot be answered with these parameters.

Before weights are read it is the check of an outline, and afterwards that of the engine.
"""


@dataclass(frozen=True, slots=True)
class Outline:
    """A tokenizer, and what the target's config says; None where it says nothing."""

    tokenizer: Tokenizer
    max_context: int | None
    vocab_size: int | None

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse a request that no weights could answer.

        Raises:
            ContextTooLong: prompt and max_tokens do not fit the target's context.
            RequestError: the grammar cannot be used.
        """
        if self.max_context is not None:
            described = f"the context of {self.max_context}"
            check_length(len(prompt_ids), params, described, self.max_context)
        if params.grammar is not None and self.vocab_size is not None:
            Grammars(self.tokenizer, self.vocab_size).compile(params.grammar)


def outline_of(folder: Path, tokenizer: Tokenizer) -> Outline:
    """The outline of the model in a folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    of_text = config.get("text_config") or config

    def number(name: str) -> int | None:
        value: Any = of_text.get(name)
        return value if isinstance(value, int) else None

    return Outline(tokenizer, number("max_position_embeddings"), number("vocab_size"))

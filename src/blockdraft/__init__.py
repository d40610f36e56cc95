"""Exact block-diffusion speculative decoding.

    from blockdraft import LLM, SamplingParams

    llm = LLM()
    print(llm.chat([{"role": "user", "content": "Hi!"}], SamplingParams(max_tokens=32)))

Importing this package imports no torch; the first use of a name that needs it does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockdraft.core.errors import (
    BlockdraftError,
    ConfigError,
    ContextTooLong,
    DiskError,
    ModelError,
    NetworkError,
    RequestError,
)
from blockdraft.core.grammar import Grammar
from blockdraft.core.libraries import keep_rows_invariant
from blockdraft.core.receipt import Receipt
from blockdraft.core.request import SamplingParams
from blockdraft.core.threads import bound_spin

if TYPE_CHECKING:
    from blockdraft.engine.audit import Audit
    from blockdraft.engine.completion import Chunk, Completion, Generation
    from blockdraft.engine.spec_generate import DraftModel
    from blockdraft.llm import LLM

__all__ = [  # noqa: RUF022 - plainly sorted
    "Audit",
    "BlockdraftError",
    "Chunk",
    "Completion",
    "ConfigError",
    "ContextTooLong",
    "DiskError",
    "DraftModel",
    "Generation",
    "Grammar",
    "LLM",
    "ModelError",
    "NetworkError",
    "Receipt",
    "RequestError",
    "SamplingParams",
]

bound_spin()
keep_rows_invariant()

_LAZY = {
    "Audit": "blockdraft.engine.audit",
    "LLM": "blockdraft.llm",
    "Chunk": "blockdraft.engine.completion",
    "Completion": "blockdraft.engine.completion",
    "DraftModel": "blockdraft.engine.spec_generate",
    "Generation": "blockdraft.engine.completion",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The default pair behind a real server, loaded once a process."""

from functools import lru_cache

from blockdraft import LLM
from tests.exact.prompts import read_prompts

NUM_PROMPTS = 32


@lru_cache
def default_llm() -> LLM:
    """As `blockdraft serve` loads it: the default target and drafter, exact, adaptive depth."""
    return LLM(max_concurrency=32)


@lru_cache
def prompts() -> tuple[str, ...]:
    """Every seventh or so of the 200 prompts that exactness is tested with."""
    texts = [row["text"] for row in read_prompts() if row["text"].strip()]
    step = len(texts) // NUM_PROMPTS
    return tuple(texts[::step][:NUM_PROMPTS])

"""The default pair behind a real server, loaded once a process."""

from functools import lru_cache

from blockdraft import LLM
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.exact.prompts import read_prompts

NUM_PROMPTS = 32
MEMORY = 0.5


@lru_cache
def default_llm() -> LLM:
    """As `blockdraft serve` loads it: the default target and drafter, exact, adaptive drafting.

    With so little memory for keys and values that a batch fills it.
    """
    llm = LLM(max_concurrency=32, memory=MEMORY)
    _touch_pages(llm)
    return llm


@lru_cache
def prompts() -> tuple[str, ...]:
    """Every seventh or so of the 200 prompts that exactness is tested with."""
    texts = [row["text"] for row in read_prompts() if row["text"].strip()]
    step = len(texts) // NUM_PROMPTS
    return tuple(texts[::step][:NUM_PROMPTS])


def _touch_pages(llm: LLM) -> None:
    """Write to all K/V memory: the system provides it when it is first used, which is no leak."""
    engine = llm.engine
    assert isinstance(engine.target, PagedTarget)
    assert isinstance(engine.drafter, DFlashDrafter)
    assert isinstance(engine.drafter.contexts, PagedContexts)
    for kv in (engine.target.kv, engine.drafter.contexts.kv):
        for layer in kv.pools:
            layer.zero_()

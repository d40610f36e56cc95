"""Write the table of target families in docs/supported-models.md, from runs of tiny models.

    python -m tools.families            # all families, a few minutes
    python -m tools.families --check    # exit status 1 if the page says something else

Run it in the root of the repository. Each family of the tests is built with random weights. What
the table says is asked of the target, or seen in a short run: nothing is typed in.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.config import Quantize
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.models.layers.quantized import quantize_model
from blockdraft.models.layers.recurrent import copies_states
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged
from blockdraft.models.target.sequential import SequentialTarget
from tests.batched import Request, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity.test_architectures import IN_ONE_FORWARD, ONE_AFTER_ANOTHER, RECURRENT, build
from tests.tiny import ALL_KINDS, VOCAB_SIZE, tiny_target

PAGE = Path("docs/supported-models.md")
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADER = (
    "| families | path | batched | trees | prefix reuse | rollback memory | quantized |",
    "|---|---|---|---|---|---|---|",
)
MIN_DISTINCT = 8
"""Tokens that an output must have, so that equality says something."""


@dataclass(frozen=True)
class Facts:
    """What was found of one family. `quantized`: bits whose drafted output equals plain."""

    family: str
    path: str
    is_batched: bool
    takes_trees: bool
    reuses_prefixes: bool
    has_states: bool
    copies_states: bool
    quantized: tuple[str, ...]

    @property
    def found(self) -> str:
        """All but the name, in Markdown."""
        cells = (
            self.path,
            _yes(self.is_batched),
            _yes(self.takes_trees),
            _yes(self.reuses_prefixes),
            self._rollback_memory,
            ", ".join(self.quantized) or "no",
        )
        return " | ".join(cells)

    @property
    def _rollback_memory(self) -> str:
        if not self.has_states:
            return "none"
        copied = "a copy of the states for each candidate"
        return copied if self.copies_states else "the anchor's states, inputs of each candidate"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _makers() -> dict[str, Callable[[], PreTrainedModel]]:
    """How to build each family of the tests, in float32."""
    options = {**IN_ONE_FORWARD, **RECURRENT}
    options |= {name: given for name, (given, _) in ONE_AFTER_ANOTHER.items()}
    found: dict[str, Callable[[], PreTrainedModel]] = {
        type(tiny_target(kind)).__name__: partial(tiny_target, kind) for kind in ALL_KINDS
    }
    for name, given in options.items():
        found[f"{name}ForCausalLM"] = partial(build, name, given, torch.float32)
    return {name.removesuffix("ForCausalLM"): make for name, make in found.items()}


def make(family: str) -> PreTrainedModel:
    """A tiny model of a family with random weights, in float32."""
    return _makers()[family]()


def families() -> list[str]:
    """The names of all, in order."""
    return sorted(_makers(), key=str.lower)


def examine(family: str) -> Facts:
    """Build a family and run it.

    Raises:
        AssertionError: drafted output differs from plain, or says too little.
    """
    make = _makers()[family]
    target = _target(make())
    with target.released_after():
        target.check_row_invariance()
        num_reused = check_drafted_equals_plain(family, target)
        path = "pages" if isinstance(target, PagedTarget) else "a cache for each sequence"
        has_states = target.state_bytes() > 0
        copies = copies_states(target.model)
    return Facts(
        family=family,
        path=f"{path}, states token by token" if has_states else path,
        is_batched=isinstance(target, PagedTarget),
        takes_trees=target.takes_trees,
        reuses_prefixes=num_reused > 0,
        has_states=has_states,
        copies_states=copies,
        quantized=tuple(bits for bits in get_args(Quantize) if _runs_in(family, make, bits)),
    )


def _target(model: PreTrainedModel) -> PagedTarget | SequentialTarget:
    """On the path that an engine would take."""
    try:
        return PagedTarget(model, Pages(20))
    except NotPaged:
        return SequentialTarget(model)


def _runs_in(family: str, make: Callable[[], PreTrainedModel], bits: Quantize) -> bool:
    with suppress(ModelError):
        model = make()
        quantize_model(model, bits)
        with _target(model).released_after() as target:
            target.check_row_invariance()
            check_drafted_equals_plain(f"{family} in {bits}", target)
        return True
    return False


def check_drafted_equals_plain(family: str, target: PagedTarget | SequentialTarget) -> int:
    """Three requests together with drafts, and each alone without; returns the tokens reused.

    Raises:
        AssertionError: they differ, or the outputs have too few distinct tokens.
    """
    shared = tuple(range(PAGE_SIZE))
    prompts = [(*shared, 5, 9), (8, 3, 20), (*shared, 70, 4, 2)]
    params = (
        SamplingParams(max_tokens=16, logprobs=0),
        SamplingParams(max_tokens=16, temperature=1.0, seed=3, logprobs=0),
        SamplingParams(max_tokens=16, logprobs=0),
    )
    requests = [
        Request(*one, arrival=3 * i) for i, one in enumerate(zip(prompts, params, strict=True))
    ]
    plain = run_alone(target, requests)
    known = [answer.token_ids for answer in plain]
    before = target.memory.num_reused_tokens if isinstance(target, PagedTarget) else 0
    drafter = NoisyOracleDrafter(8, VOCAB_SIZE, seed=3)
    drafted = run_batched(target, drafter, requests, known=known)
    assert drafted.answers == plain, f"{family}: drafted output differs from plain"
    distinct = {token for answer in plain for token in answer.token_ids}
    assert len(distinct) >= MIN_DISTINCT, f"{family}: {len(distinct)} distinct tokens say little"
    return target.memory.num_reused_tokens - before if isinstance(target, PagedTarget) else 0


def table(facts: Iterable[Facts]) -> str:
    """In Markdown, a row for all families of which the same was found."""
    alike: dict[str, list[str]] = {}
    for one in facts:
        alike.setdefault(one.found, []).append(one.family)
    rows = (f"| {', '.join(names)} | {found} |" for found, names in alike.items())
    return "\n".join([*HEADER, *rows])


def documented(page: str) -> dict[str, str]:
    """What the table of a page says of each family; see `Facts.found`."""
    rows = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[len(HEADER) :]
    split = (row.strip("| ").split(" | ", maxsplit=1) for row in rows)
    return {family: found for names, found in split for family in names.split(", ")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine all families; write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check: bool = parser.parse_args(arguments).check
    facts = []
    for family in families():
        facts.append(examine(family))
        print(f"{family}: {facts[-1].found}", flush=True)
    before = PAGE.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n{table(facts)}\n{END}{rest.partition(END)[2]}"
    if check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

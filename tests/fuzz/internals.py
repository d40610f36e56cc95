"""All that the fuzz knows of the inside of engines: caches, kernels, what a step did."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.sequence import Sequence
from blockdraft.engine.engine import Engine
from blockdraft.engine.samples import Samples
from blockdraft.models.draft.config import DFlash2Config, DFlyConfig, DominoConfig, DSparkConfig
from blockdraft.models.draft.config_reader import MarkovHeadType
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.verify import Verdict
from blockdraft.text.grammar import Grammars
from blockdraft.text.tokenizer import Tokenizer
from tests.fuzz.cases import DTYPES, MAX_DRAFT_TOKENS, Case, ModelShape
from tests.fuzz.oracle import ErringOracle
from tests.parity.targets import make_dflash
from tests.tiny import SPECIAL_TOKENS, TEXT_VOCAB_SIZE, tiny_drafter, tiny_tokenizer

AnyTarget = PagedTarget | SequentialTarget


@contextmanager
def backend(shape: ModelShape) -> Iterator[None]:
    """Kernels or not, and how many threads."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        if not shape.has_kernels:
            stack.enter_context(patch("blockdraft.kernels.cpu.backend.library", lambda: None))
        torch.set_num_threads(shape.num_threads)
        stack.callback(torch.set_num_threads, threads)
        yield


@contextmanager
def opened(
    model: PreTrainedModel, shape: ModelShape, num_pages: int, *, reuse: bool = True
) -> Iterator[AnyTarget]:
    """A target with features of some layers, released in the end."""
    layer_ids = layer_ids_of(shape)
    if shape.way == "paged":
        try:
            target: AnyTarget = PagedTarget(
                model, Pages(num_pages, reuse=reuse), layer_ids=layer_ids
            )
        except NotPaged:
            target = SequentialTarget(model, layer_ids=layer_ids)
    else:
        target = SequentialTarget(model, layer_ids=layer_ids)
    with target.released_after():
        yield target


def layer_ids_of(shape: ModelShape) -> tuple[int, ...]:
    """The layers whose outputs the drafter reads."""
    return (0, shape.num_layers - 1)


def make_drafter(case: Case, target: AnyTarget) -> ErringOracle | Drafter:
    """The drafter of a case; an oracle is told the answers later."""
    shape, engine = case.model, case.engine
    if engine.drafter == "oracle":
        return ErringOracle(MAX_DRAFT_TOKENS, shape.vocab_size, engine.accuracies, case.seed)
    draft = tiny_drafter(
        DTYPES[shape.dtype],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        num_target_layers=shape.num_layers,
        target_layer_ids=layer_ids_of(shape),
        intermediate_size=shape.intermediate_size,
        head_dim=shape.head_dim,
        **_ADDED.get(engine.drafter, lambda shape: {})(shape),
    )
    return make_dflash(target, draft)


def _dflash2_of(shape: ModelShape) -> dict[str, Any]:
    """Two taps or three, and groups of any size that divides."""
    groups = [size for size in (1, 2, 10, 16, 32) if shape.hidden_size % size == 0]
    config = DFlash2Config(
        conv_kernel_size=2 + shape.seed % 2,
        conv_group_size=groups[shape.seed % len(groups)],
        selector_rank=4,
        selector_top_k=1 + shape.seed % 16,
    )
    return {"dflash2": config}


def _dspark_of(shape: ModelShape) -> dict[str, Any]:
    """Each kind of Markov head; the anchor's slot drafts or not."""
    kinds = get_args(MarkovHeadType)
    kind = kinds[shape.seed % len(kinds)]
    config = DSparkConfig(markov_rank=1 + shape.seed % 9, markov_head_type=kind)
    return {"dspark": config, "drafts_from_anchor": kind == "rnn" or shape.seed % 2 == 0}


def _domino_of(shape: ModelShape) -> dict[str, Any]:
    """Some of the first slots stay as they are."""
    config = DominoConfig(
        emb_dim=1 + shape.seed % 9, gru_hidden_dim=5, pure_draft_prefix_len=shape.seed % 3
    )
    return {"domino": config, "drafts_from_anchor": shape.seed % 2 == 0}


def _dfly_of(shape: ModelShape) -> dict[str, Any]:
    """With and without a correction; the anchor's slot drafts or not."""
    config = DFlyConfig(hidden_correction_intermediate_size=shape.seed % 9)
    return {"dfly": config, "drafts_from_anchor": shape.seed % 2 == 0}


_ADDED: Mapping[str, Callable[[ModelShape], dict[str, Any]]] = {
    "dflash2": _dflash2_of,
    "dspark": _dspark_of,
    "domino": _domino_of,
    "dfly": _dfly_of,
    "dflare": lambda shape: {"dflare": True},
}


def make_samples(engine: Engine) -> Samples:
    """Text around an engine; a small vocabulary has no token that ends an answer."""
    inner = tiny_tokenizer()
    vocab_size = engine.target.vocab_size
    ends = frozenset({inner.eos_token_id}) if vocab_size >= TEXT_VOCAB_SIZE else frozenset()
    assert inner.eos_token_id == inner.convert_tokens_to_ids(SPECIAL_TOKENS[1])
    tokenizer = Tokenizer(inner, ends)
    return Samples(engine, tokenizer, Grammars(tokenizer, vocab_size))


@dataclass
class Trace:
    """What was computed for one sample, as bits.

    `logits`: the position of a kept token and the logits [V] behind it, again for what was computed
    again. `memory`: each time the target forgot the sequence, at its end or before, keys and values
    of its cached tokens, [2, kv_heads, tokens, head_dim] of every layer.
    """

    sequence: Sequence
    logits: list[tuple[int, Tensor]] = field(default_factory=list)
    memory: list[list[Tensor]] = field(default_factory=list)


class Recorder:
    """Observes an engine, and its target as it forgets a sequence. Changes nothing.

    `widths` are those of the verifies; `num_branched` of them had more than one path.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.traces: dict[int, Trace] = {}
        self.widths: set[int] = set()
        self.num_drafted = 0
        self.num_rejected = 0
        self.num_branched = 0
        engine.observer = self
        self._close = engine.target.close
        engine.target.close = self._closing

    def follow(self, key: int) -> Trace:
        """Note from now on what is computed for a sequence that was just added."""
        trace = self.traces[key] = Trace(self.engine.progress[key].sequence)
        return trace

    def verified(self, plan: ForwardPlan, logits: Tensor, verdicts: list[Verdict]) -> None:
        """See Observer.verified."""
        done = 0
        for planned, verdict in zip(plan, verdicts, strict=True):
            own = logits[done : done + planned.num_logits]
            done += planned.num_logits
            self._note_logits(planned, own, verdict)
            if planned.row.is_complete and not planned.row.is_prompt:
                self.widths.add(1 + len(planned.tree))
                self.num_branched += not planned.tree.is_chain
                self.num_drafted += len(planned.tree)
                self.num_rejected += len(planned.tree) - verdict.num_accepted

    def _note_logits(self, planned: PlannedRow, logits: Tensor, verdict: Verdict) -> None:
        """Those behind kept tokens, with the position of the token that they choose."""
        sequence, nodes = planned.row.sequence, verdict.nodes
        noted = self.traces[sequence.key].logits
        num_new = planned.num_logits - len(planned.tree)
        known_end = len(sequence.token_ids) + len(verdict.token_ids)
        new_end = sequence.num_cached + len(planned.row.new_ids)
        kept = enumerate(logits[:num_new], start=new_end - num_new + 1)
        behind = enumerate((logits[num_new + node] for node in nodes), start=new_end + 1)
        for position, found in [*kept, *behind]:
            if position < known_end:
                noted.append((position, found.clone()))

    def reported(self, outputs: list[StepOutput]) -> None:
        """See Observer.reported."""

    def _closing(self, key: int) -> None:
        trace = self.traces.get(key)
        if trace is not None:
            memory = _cached(self.engine.target, trace.sequence)
            if memory:
                trace.memory.append(memory)
        self._close(key)


def _cached(target: AnyTarget, sequence: Sequence) -> list[Tensor]:
    """Copies of the keys and values of a sequence, by layer; empty if nothing is held of it."""
    num = sequence.num_cached
    if isinstance(target, PagedTarget):
        if sequence.key not in target.memory._tables:
            return []
        slots = torch.tensor(target.memory.slots(sequence.key, 0, num), dtype=torch.long)
        return [pool.flatten(2, 3)[:, :, slots] for pool in target.kv.pools]
    cache = target._caches.get(sequence.key)
    if cache is None:
        return []
    return [
        torch.cat([layer.keys, layer.values])[:, :, :num].clone()
        for layer in cache.layers
        if layer.is_initialized
    ]


def check_pages(target: AnyTarget) -> None:
    """Every page is free, kept or held, and counted right."""
    if isinstance(target, PagedTarget):
        target.memory.check_integrity()


def check_nothing_left(samples: Samples) -> None:
    """Nobody remembers a sequence that has ended."""
    engine = samples.engine
    assert not engine.progress, "the engine remembers a sequence"
    assert not engine.has_work, "the engine still has work"
    target = engine.target
    if isinstance(target, PagedTarget):
        memory = target.memory
        assert memory.num_available == memory.num_pages - 1, "pages are held"
    else:
        assert not target._caches, "caches are held"


def num_preempted(engine: Engine) -> int:
    return engine.scheduler.num_preempted


def num_reused(target: AnyTarget) -> int:
    """Tokens that were taken over from earlier sequences."""
    return target.memory.num_reused_tokens if isinstance(target, PagedTarget) else 0


def stock_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[tokens, V] of one forward of a copy of the model, by transformers alone."""
    untouched = copy.deepcopy(model)
    with torch.inference_mode():
        return untouched(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

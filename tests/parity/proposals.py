"""Whether drafters that fill blocks propose what their definition says, node by node."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockdraft.core.plan import ROOT, Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.context import ConcatContext
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.interface import Target
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.sampler.noise import gumbel_noise
from blockdraft.speculate.sampler.philox import Stream
from tests.batched import LogitsRecorder, Request, run_alone, run_batched
from tests.parity.checks import generate, generate_plain, plain_features
from tests.parity.targets import Way, make_dflash, make_target
from tests.tiny import VOCAB_SIZE, tiny_target

Fault = Callable[[], AbstractContextManager[object]]

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 7


def in_trees(num_nodes: int | None) -> Callable[[Engine, int], None]:
    """Trees of so many nodes, or chains, from the first step on."""
    return lambda engine, key: engine.use_fixed_drafting(num_nodes)


def noted_proposals(drafter: Any) -> list[tuple[Row, Proposal]]:
    """Grows with what the drafter proposes from now on, and for which rows."""
    noted: list[tuple[Row, Proposal]] = []
    real = drafter.propose

    def propose(rows: Sequence[Row]) -> list[Proposal]:
        proposals: list[Proposal] = real(rows)
        noted.extend(zip(rows, proposals, strict=True))
        return proposals

    drafter.propose = propose
    return noted


def check_output(
    target: Target, drafter: Any, params: SamplingParams, num_nodes: int | None = None
) -> list[tuple[Row, Proposal]]:
    """Output is plain decoding's; what was proposed, in trees of so many nodes or in chains."""
    noted = noted_proposals(drafter)
    found = generate(target, drafter, PROMPT, params, after_step=in_trees(num_nodes))
    assert found == generate(target, drafter, PROMPT, replace(params, num_draft_tokens=0))
    return noted


def check_together(
    model: DraftModel,
    asked: Sequence[Mapping[str, Any]],
    num_requests: int,
    num_nodes: int | None,
) -> None:
    """Requests that come one after another, drafted in one batch, have what each has alone."""
    requests = [
        Request(
            tuple(PROMPT[index:]),
            SamplingParams(max_tokens=10 + index, seed=index, **asked[index % len(asked)]),
            arrival=index // 3,
        )
        for index in range(num_requests)
    ]
    with make_target("paged", tiny_target()).released_after() as target:
        expected = run_alone(target, requests)
        batched = run_batched(
            target,
            make_dflash(target, model),
            requests,
            after_step=lambda engine: engine.use_fixed_drafting(num_nodes),
        )
    assert batched.answers == expected
    assert batched.engine.proposer.failures.num_failures == 0


def check_no_numbers(make: Callable[[], DraftModel], asked: Sequence[dict[str, Any]]) -> None:
    """A drafter whose logits are no numbers changes no output, whatever is asked."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        for params in asked:
            with make_target("sequential", tiny_target()).released_after() as target:
                model = make()
                with torch.no_grad():
                    model.norm.weight.fill_(bad)
                options = SamplingParams(max_tokens=12, **{"seed": 3, **params})
                check_output(target, make_dflash(target, model), options)


class Oracle:
    """What a drafter has to think behind a sample's tokens, from these tokens alone."""

    def __init__(self, drafter: DFlashDrafter, model: DraftModel, target: Any) -> None:
        self.drafter, self.model, self.target = drafter, model, target

    @torch.no_grad()
    def open(self, sample: Sample, num_slots: int) -> None:
        """Fill a block in which so many slots draft, behind a fresh context."""
        ids, model = sample.token_ids, self.model
        features = plain_features(self.target, ids[:-1], self.drafter)
        num = len(ids) - 1
        context = ConcatContext(model.project_context(features, torch.arange(num)[None]))
        first = 0 if model.config.drafts_from_anchor else 1
        slots = [ids[-1], *[model.config.mask_token_id] * (num_slots + first - 1)]
        embeddings = model.embed(torch.tensor([slots]), self.drafter.embed_weight)
        positions = torch.arange(num, num + len(slots))[None]
        hidden = model(embeddings, positions, context, model.block_masks(num, len(slots)))
        head = self.target.model.get_output_embeddings().weight
        self.hidden = hidden[0, first:]
        self.logits = model.logits(hidden, head)[0, first:]
        self.sample = sample

    def noise(self, slot: int) -> Tensor:
        """[V], what the sample's own noise adds to the logits of a slot."""
        params = self.sample.params
        if params.temperature == 0:
            return torch.zeros(VOCAB_SIZE, dtype=torch.float64)
        position = len(self.sample.token_ids) + slot
        stream = Stream(self.sample.seed, self.sample.sample_index, position)
        return params.temperature * torch.from_numpy(gumbel_noise(stream, VOCAB_SIZE))

    def ranked(self, path: Sequence[int]) -> list[int]:
        """The tokens behind a path, the drafter's choice first."""
        raise NotImplementedError


class OwnLogits(DFlashDrafter):
    """Its slots have the target's own logits [V] of a plain run, by position.

    A base beside that of another kind, or by itself.
    """

    known: dict[int, Tensor]

    def _proposals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Proposal]:
        starts = [len(row.sequence.token_ids) for row in rows]
        # Behind the end of the plain run nothing counts.
        behind = logits.new_zeros(self.embed_weight.shape[0])
        own = [[self.known.get(s + i, behind) for i in range(logits.shape[1])] for s in starts]
        return super()._proposals(hidden, torch.stack([torch.stack(one) for one in own]), rows)


def check_own_logits(
    target: SequentialTarget, drafter: OwnLogits, params: SamplingParams, *, least_drafted: int
) -> None:
    """One rule chooses on both sides, so all is accepted, at any temperature."""
    recorder = LogitsRecorder(target)
    plain = generate_plain(recorder, PROMPT, params)
    drafter.known = {position: own for (_, position), own in recorder.logits.items()}
    drafted = generate(target, drafter, PROMPT, params)
    assert drafted.token_ids == plain.token_ids
    acceptance = drafted.acceptance
    assert sum(acceptance.drafted.values()) > least_drafted
    assert acceptance.accepted == acceptance.drafted, "a guess from the target's logits is rejected"


def check_proposal(oracle: Oracle, row: Row, num_slots: int, proposal: Proposal) -> None:
    """Every node has the most probable children that the definition gives it, in their order."""
    oracle.open(row.sequence, num_slots)
    tree = proposal.tree
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(tree.tokens[node])
    for node in [ROOT, *range(len(tree))]:
        path = [tree.tokens[one] for one in tree.path(node)]
        if found := children.get(node):
            assert found == oracle.ranked(path)[: len(found)], "another candidate is best"
    assert len(tree.through([])) == min(oracle.model.config.num_drafted, row.num_slots)


def check_model(
    way: Way,
    model: DraftModel,
    make_oracle: Callable[[DFlashDrafter, DraftModel, Any], Oracle],
    num_nodes: int | None,
    **params: Any,
) -> None:
    """Step by step over some cycles, for a few samples side by side."""
    with make_target(way, tiny_target(dtype=torch.float64)).released_after() as target:
        drafter = make_dflash(target, model)
        assert drafter.kind == model.config.kind
        engine = Engine(target, drafter)
        if num_nodes is not None:
            engine.use_fixed_drafting(num_nodes)
        real, oracle, seen = drafter.propose, make_oracle(drafter, model, target), []

        def propose(rows: Sequence[Row]) -> list[Proposal]:
            proposals = real(rows)
            # Blocks of a forward are as long as the longest.
            size = max((row.num_slots for row in rows), default=0) if way == "paged" else None
            for row, own in zip(rows, proposals, strict=True):
                seen.append((copy.deepcopy(row), size or row.num_slots, own))
            return proposals

        drafter.propose = propose
        keys = [engine.add(PROMPT[start:], SamplingParams(max_tokens=8, **params))
                for start in (0, 9, 40)]  # fmt: skip
        while engine.has_work:
            engine.step()
        for key in keys:
            engine.take(key)
        assert engine.proposer.failures.num_failures == 0
        assert len(seen) > 8
        for row, num_slots, proposal in seen:
            check_proposal(oracle, row, num_slots, proposal)

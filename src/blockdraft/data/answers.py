"""Answers of a target in bulk: many prompts at once, one token each per forward.

Made for throughput, not for exactness: training data needs the target's own words, not the same
bits as the engine. Free slots are refilled while the others go on, and an answer that has begun to
loop is cut off, since it would be filtered anyway.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from blockdraft.data.support import check_full_attention, check_plain_head
from blockdraft.text.kinds import distinct_ngram_share, loops

ATTENTION = "blockdraft_slots"
KEY_MULTIPLE = 64
REFILL_AT = 8
"""Free slots that are filled together, which costs less than one prompt at a time."""
LOOP_CHECK_EVERY = 32


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to write; temperature 0 is greedy, `sample` counts answers to the same prompt."""

    id: str
    set: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The target's tokens for one job; finish is "stop", "length" or "loop"."""

    job: Job
    response_ids: tuple[int, ...]
    finish: str


class Writer(Protocol):
    """Answers jobs."""

    def write(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Yield answers as they finish, in no particular order."""


def has_begun_to_loop(response_ids: Sequence[int]) -> bool:
    """True if an unfinished answer repeats itself; looked for every LOOP_CHECK_EVERY tokens.

    The tail alone is looked at: a fresh loop hides behind a long good beginning.
    """
    if len(response_ids) < 3 * LOOP_CHECK_EVERY or len(response_ids) % LOOP_CHECK_EVERY:
        return False
    return distinct_ngram_share(response_ids[-2 * LOOP_CHECK_EVERY :]) < 0.5


@dataclass
class _Slot:
    job: Job
    tokens: list[int] = field(default_factory=list)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """K/V of all slots in one buffer [slots, kv_heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, owner: "_SlotCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.owner.slots, key_states.shape[1], self.owner.capacity, key_states.shape[3])
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of the owner's rows; returns those to attend over.

        All are [rows, kv_heads, tokens, head_dim]: several tokens are prompts of newly filled
        slots, which see themselves only, and one token is the next of every slot.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        owner = self.owner
        if key_states.shape[2] > 1:
            length = key_states.shape[2]
            self.keys[owner.rows, :, :length] = key_states
            self.values[owner.rows, :, :length] = value_states
            return key_states, value_states
        self.keys[owner.rows, :, owner.positions] = key_states[:, :, 0]
        self.values[owner.rows, :, owner.positions] = value_states[:, :, 0]
        # Whole buffers: a slice is not contiguous, and the matrix product would copy it first.
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    def get_max_cache_shape(self) -> int:
        return self.owner.capacity


class _SlotCache(Cache):  # type: ignore[misc]
    """`rows` and `positions` say where the next update writes."""

    def __init__(self, num_layers: int, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.rows, self.positions = torch.empty(0), torch.empty(0)
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])


def _slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    key_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[slots, heads, q, head_dim] against [slots, kv_heads, keys, head_dim]; causal if q > 1."""
    if key_bias is None:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None
    slots, heads, _, head_dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    grouped = query.reshape(slots * kv_heads, heads // kv_heads, head_dim)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)).float()
    scores = scores.view(slots, kv_heads, -1, num_keys) * scaling + key_bias
    weights = scores.softmax(dim=-1).to(value.dtype).view(slots * kv_heads, -1, num_keys)
    return torch.bmm(weights, value.flatten(0, 1)).view(slots, 1, heads, head_dim), None


AttentionInterface.register(ATTENTION, _slot_attention)


class AnswerWriter:
    """Writes answers with `slots` rows a forward.

    The model's attention implementation is replaced, so the writer owns the model from now on.

    Raises:
        ModelError: the model's attention or logits are of a kind that is not written here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Iterable[int],
        slots: int,
        capacity: int,
        seed: int,
    ) -> None:
        self.capacity = -(-capacity // KEY_MULTIPLE) * KEY_MULTIPLE
        purpose = "writing answers in bulk"
        check_full_attention(model, self.capacity, purpose)
        check_plain_head(model, purpose, "use another target")
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.stop_ids = frozenset(stop_ids)
        self.cache = _SlotCache(model.config.num_hidden_layers, slots, self.capacity)
        self.slots: list[_Slot | None] = [None] * slots
        self.next_ids = torch.zeros(slots, dtype=torch.long, device=model.device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=model.device)
        self.generator = torch.Generator(device=model.device).manual_seed(seed)

    @torch.inference_mode()
    def write(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Yield answers as they finish, in no particular order.

        Jobs that do not fit the capacity are skipped.
        """
        refill_at = min(REFILL_AT, len(self.slots))
        fitting = (j for j in jobs if len(j.prompt_ids) + j.max_tokens <= self.capacity)
        exhausted = False
        while True:
            free = [i for i, slot in enumerate(self.slots) if slot is None]
            if not exhausted and len(free) >= refill_at:
                new = list(islice(fitting, len(free)))
                exhausted = len(new) < len(free)
                if new:
                    yield from self._prefill(free[: len(new)], new)
            if any(slot is not None for slot in self.slots):
                yield from self._step()
            elif exhausted:
                return

    def _prefill(self, rows: list[int], jobs: list[Job]) -> Iterator[Answer]:
        lengths = [len(job.prompt_ids) for job in jobs]
        ids = torch.zeros(len(jobs), max(2, *lengths), dtype=torch.long, device=self.model.device)
        for i, job in enumerate(jobs):
            ids[i, : lengths[i]] = torch.tensor(job.prompt_ids)
            self.slots[rows[i]] = _Slot(job)
        self.cache.rows = torch.tensor(rows, device=self.model.device)
        # Right padding needs no mask: causal rows never look at it, and decoding overwrites it.
        hidden = self.model.model(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
            past_key_values=self.cache,
        ).last_hidden_state
        last = torch.tensor(lengths, device=ids.device) - 1
        self.lengths[self.cache.rows] = last + 1
        logits = self.model.lm_head(hidden[torch.arange(len(jobs), device=ids.device), last])
        yield from self._advance(rows, self._choose(logits, [job.temperature for job in jobs]))

    def _step(self) -> Iterator[Answer]:
        """One token for every slot; free slots compute along and are ignored."""
        cache = self.cache
        cache.rows = torch.arange(len(self.slots), device=self.lengths.device)
        cache.positions = self.lengths
        active = [i for i, slot in enumerate(self.slots) if slot is not None]
        unseen = torch.arange(self.capacity, device=self.lengths.device) > self.lengths[:, None]
        key_bias = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, -torch.inf)
        hidden = self.model.model(
            input_ids=self.next_ids[:, None],
            position_ids=self.lengths[:, None],
            past_key_values=cache,
            key_bias=key_bias[:, None, None],
        ).last_hidden_state
        temperatures = [0.0 if slot is None else slot.job.temperature for slot in self.slots]
        chosen = self._choose(self.model.lm_head(hidden[:, 0]), temperatures)
        self.lengths[active] += 1
        yield from self._advance(active, [chosen[i] for i in active])

    def _choose(self, logits: Tensor, temperatures: list[float]) -> list[int]:
        """Greedy, or inverse CDF of softmax(logits / T). logits: [rows, vocabulary]."""
        chosen = logits.float().argmax(dim=-1)  # argmax of bfloat16 takes four times as long
        sampled = [i for i, t in enumerate(temperatures) if t > 0]
        if sampled:
            scale = torch.tensor([temperatures[i] for i in sampled], device=logits.device)
            cdf = (logits[sampled].float() / scale[:, None]).softmax(dim=-1).cumsum(dim=-1)
            u = torch.rand(len(sampled), 1, generator=self.generator, device=logits.device)
            picks = torch.searchsorted(cdf, u * cdf[:, -1:]).squeeze(1)
            chosen[sampled] = picks.clamp_(max=logits.shape[1] - 1)
        return [int(token) for token in chosen.tolist()]

    def _advance(self, rows: list[int], chosen: list[int]) -> Iterator[Answer]:
        for row, token in zip(rows, chosen, strict=True):
            slot = self.slots[row]
            assert slot is not None
            slot.tokens.append(token)
            self.next_ids[row] = token
            finish = self._finish(slot)
            if finish:
                self.slots[row] = None
                self.lengths[row] = 0
                yield Answer(job=slot.job, response_ids=tuple(slot.tokens), finish=finish)

    def _finish(self, slot: _Slot) -> str | None:
        if slot.tokens[-1] in self.stop_ids:
            return "loop" if loops(slot.tokens) else "stop"
        if len(slot.tokens) >= slot.job.max_tokens:
            return "loop" if loops(slot.tokens) else "length"
        return "loop" if has_begun_to_loop(slot.tokens) else None

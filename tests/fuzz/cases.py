"""Random cases: a model, an engine and requests, all drawn from one number.

A case is a plain value, and its seed alone gives it again.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams
from tests.parity.targets import Way
from tests.tiny import MOE_KINDS, TEXT_VOCAB_SIZE, tiny_target

MAX_CONTEXT = 2048
MAX_DRAFT_TOKENS = 63
"""One row of a verify is the anchor's, so this makes 64 of them."""
LARGE_TREE = 130
"""Candidates that need pages of their own, which others may need for tokens later."""
SMALL_TREE = 7
"""For long outputs where each path of a tree is a pass of its own: larger ones take minutes."""
LONG_OUTPUT = 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_KINDS = ("llama", "llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma3", "qwen3_moe", "gpt_oss")
_WINDOWS = (8, 24, 31, 64, 65, 100)
_PROMPT_LENGTHS = (1, 3, 17, 33, 63, 64, 65, 128, 130, 200, 300, 700)
_BLOCKS: tuple[Literal["oracle", "dflash"], ...] = ("oracle", "oracle", "oracle", "dflash")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A random target: its config, and how it runs."""

    kind: str
    dtype: str
    way: Way
    has_kernels: bool
    num_threads: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    is_tied: bool
    bad_embedding: float | None
    """Of the last token, which no prompt has: drafted and rejected, it must leave no trace."""
    seed: int

    @property
    def is_moe(self) -> bool:
        return self.kind in MOE_KINDS

    def build(self) -> PreTrainedModel:
        """The same weights every time."""
        changes: dict[str, object] = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": MAX_CONTEXT,
            "tie_word_embeddings": self.is_tied,
        }
        if self.kind in ("mistral", "gemma3", "gpt_oss"):
            changes["sliding_window"] = self.window
        if self.kind == "gemma3":
            sliding = ["sliding_attention"] * (self.num_layers - 1)
            changes["layer_types"] = [*sliding, "full_attention"]
        if self.kind == "qwen3_moe":
            changes["moe_intermediate_size"] = self.intermediate_size
        model = tiny_target(
            self.kind,
            DTYPES[self.dtype],
            vocab_size=self.vocab_size,
            seed=self.seed % 2**32,
            **changes,
        )
        if self.bad_embedding is not None:
            with torch.no_grad():
                model.get_input_embeddings().weight[-1] = self.bad_embedding
        return model


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """How the requests are run together.

    `accuracies`: a block of the oracle is right with one of these chances a slot. `depths`: the
    most that is drafted, the next of them every few steps. `looks_up`: what is looked up and
    predicted is drafted beside it, some predictions right and some not.
    """

    drafter: Literal["oracle", "dflash", "dflash2", "dspark", "domino", "dfly", "dflare"]
    accuracies: tuple[float, ...]
    depths: tuple[int, ...]
    num_pages: int
    max_running: int
    prefill_chunk: int
    looks_up: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, after how many steps it comes, and after how many more it is taken back."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    aborted_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that is needed to run it again."""

    fuzz: str
    seed: int
    model: ModelShape
    engine: EngineShape
    requests: tuple[Asked, ...]


def draw_shape_case(seed: int) -> Case:
    """Any model, a few simple requests."""
    draw = random.Random(f"shapes {seed}")
    model = _draw_model(draw, draw.choice((97, 101, 272, 333, 1031, 5003)))
    prompts = _draw_prompts(draw, model.vocab_size, draw.choice((2, 3, 5)))
    lengths = [draw.choice((1, 2, 7, 12, 24, 40, 66, 80)) for _ in prompts]
    kind = draw.random()
    if kind < 0.06:
        lengths[0] = LONG_OUTPUT
        prompts = [prompt[:200] for prompt in prompts[:2]]
    elif kind < 0.1:
        # torch shares an operation out among threads if it has more than 32,768 elements. Few
        # tokens: threads that wait for each other are slow beside other processes.
        model = replace(model, num_threads=2, intermediate_size=draw.randint(513, 1100))
        lengths = [min(length, 12) for length in lengths[:2]]
    requests = [
        Asked(
            prompt=prompt,
            params=SamplingParams(
                max_tokens=length,
                temperature=draw.choice((0.0, 0.0, 0.7, 1.0)),
                seed=draw.getrandbits(32),
                ignore_eos=True,
            ),
            arrival=draw.choice((0, 0, 1, 3, 8)),
        )
        for prompt, length in zip(prompts, lengths, strict=False)
    ]
    return Case(
        fuzz="shapes",
        seed=seed,
        model=model,
        engine=_draw_engine(draw, model, requests, chance_of_few_pages=0.2),
        requests=tuple(requests),
    )


def draw_request_case(seed: int) -> Case:
    """Models with text, many requests of every kind, often in too little memory."""
    draw = random.Random(f"requests {seed}")
    # Some models have more ids than their tokenizer has tokens.
    vocab_size = draw.choice((TEXT_VOCAB_SIZE, TEXT_VOCAB_SIZE, TEXT_VOCAB_SIZE + 32))
    model = _draw_model(draw, vocab_size)
    requests = [
        Asked(
            prompt=prompt,
            params=_draw_params(draw, vocab_size),
            arrival=draw.choice((0, 0, 1, 2, 5, 9, 15)),
            aborted_after=draw.choice((1, 2, 3, 6, 12)) if draw.random() < 0.2 else None,
        )
        for prompt in _draw_prompts(draw, vocab_size, draw.choice((3, 5, 7)))
    ]
    if draw.random() < 0.03:
        params = SamplingParams(max_tokens=LONG_OUTPUT, temperature=1.0, seed=1, ignore_eos=True)
        requests[0] = Asked(prompt=requests[0].prompt[:200], params=params, arrival=0)
    return Case(
        fuzz="requests",
        seed=seed,
        model=model,
        engine=_draw_engine(draw, model, requests, chance_of_few_pages=0.6),
        requests=tuple(requests),
    )


GENERATORS: Mapping[str, Callable[[int], Case]] = {
    "shapes": draw_shape_case,
    "requests": draw_request_case,
}


def _draw_model(draw: random.Random, vocab_size: int) -> ModelShape:
    num_kv_heads = draw.choice((1, 2, 3))
    num_heads = num_kv_heads * draw.choice((1, 2, 3, 4, 5, 7))
    hidden_size = draw.choice((60, 64, 72, 100, 130, 192, 256))
    head_dim = draw.choice(range(16, 208, 16) if draw.random() < 0.4 else range(4, 202, 2))
    is_tied = draw.random() < 0.3
    return ModelShape(
        kind=draw.choice(_KINDS),
        dtype=draw.choice(("float32", "float32", "bfloat16", "bfloat16", "float64")),
        way=draw.choice(("paged", "paged", "sequential")),
        has_kernels=draw.random() < 0.7,
        num_threads=1,
        vocab_size=vocab_size,
        # transformers wants a multiple of the heads.
        hidden_size=-(-hidden_size // num_heads) * num_heads,
        intermediate_size=draw.choice((96, 100, 130, 257, 512, draw.randint(16, 400))),
        num_layers=draw.choice((2, 2, 3)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=draw.choice(_WINDOWS),
        is_tied=is_tied,
        # Tied, it would be in every logit.
        bad_embedding=draw.choice((float("nan"), float("inf")))
        if not is_tied and draw.random() < 0.08
        else None,
        seed=draw.getrandbits(32),
    )


def _draw_engine(
    draw: random.Random, model: ModelShape, requests: list[Asked], *, chance_of_few_pages: float
) -> EngineShape:
    needed = [_num_pages(len(one.prompt) + one.params.max_tokens) for one in requests]
    few = max(needed) + 1 + draw.choice((0, 1, 3))
    ample = sum(n * one.params.n for n, one in zip(needed, requests, strict=True)) + 1
    drafter = draw.choice(_BLOCKS)
    if drafter == "dflash":
        drafter = draw.choice(("dflash", "dflash2", "dspark", "domino", "dfly", "dflare"))
    accuracies = draw.choice(((1.0,), (0.0,), (0.5, 0.9, 0.98), (0.95, 1.0), (0.9,)))
    depths = draw.choice(
        (
            *((MAX_DRAFT_TOKENS,), (MAX_DRAFT_TOKENS,), (MAX_DRAFT_TOKENS, 0, 5)),
            *((1, 15, 30, 7), (LARGE_TREE, 15)),
        )
    )
    is_long = any(one.params.max_tokens == LONG_OUTPUT for one in requests)
    most = SMALL_TREE if is_long and model.way == "sequential" else LARGE_TREE
    return EngineShape(
        drafter=drafter,
        accuracies=accuracies,
        depths=tuple(min(depth, most) for depth in depths),
        # The self-test at load needs a few.
        num_pages=max(9, few if draw.random() < chance_of_few_pages else ample),
        max_running=draw.choice((1, 2, 5, 16, 16)),
        prefill_chunk=draw.choice((33, 77, 96, 100, 512, 10_000)),
        looks_up=draw.random() < 0.4,
    )


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // 64)


def _draw_prompts(draw: random.Random, vocab_size: int, num: int) -> list[tuple[int, ...]]:
    """Most begin as others do; the last id is in none."""

    def some(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size - 1) for _ in range(length))

    shared = some(256)
    prompts = []
    for _ in range(num):
        length = draw.choice(_PROMPT_LENGTHS)
        if draw.random() < 0.6:
            common = min(length, draw.choice((64, 100, 128, 192, 256)))
            prompts.append((shared[:common] + some(length - common))[:length])
        else:
            prompts.append(some(length))
    return prompts


_STOPS = ("a", "ab", "�", "é", "\n", " the", "e", "xyz", "!!")
_GRAMMARS = (
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é€"]}},
            "required": ["a"],
        }
    ),
    Grammar.regex("(ab|c€|[a-f ]){3,20}"),
    Grammar.choice(["the abc", "the é", "🙂"]),
    Grammar.lark('start: (A | " ")+ "."\nA: /[a-zé]{1,3}/'),
)


def _draw_params(draw: random.Random, vocab_size: int) -> SamplingParams:
    def maybe(chance: float, name: str, *values: Any) -> None:
        if draw.random() < chance:
            options[name] = draw.choice(values)

    options: dict[str, Any] = {
        "max_tokens": draw.choice((1, 2, 7, 24, 40, 70)),
        "temperature": draw.choice((0, 0, 1, 1, 0.3, 1e-6, 5)),
        "seed": draw.choice((0, 1, 2**63 - 1, 2**63, 2**64 - 1)),
    }
    maybe(0.3, "top_k", 1, 2, 5, 1000, 2**70)
    maybe(0.3, "top_p", 1e-9, 0.3, 0.9, 0.999999)
    maybe(0.2, "min_p", 1.0, 0.05, 1e-9)
    maybe(0.3, "repetition_penalty", 1.3, 0.5, 100, 0.01)
    maybe(0.3, "frequency_penalty", 2.0, -2.0, 0.7)
    maybe(0.3, "presence_penalty", 2.0, -2.0)
    few = dict.fromkeys(range(100), -100.0)
    every = dict.fromkeys(range(vocab_size), -100.0)
    maybe(0.2, "logit_bias", few, every, {5: 100.0}, {vocab_size - 2: 100.0, 29: 50.0})
    maybe(0.3, "logprobs", 0, 3, 20)
    if "logprobs" in options:
        maybe(0.4, "prompt_logprobs", True)
    maybe(0.3, "stop", *(tuple(draw.choices(_STOPS, k=k)) for k in (1, 3)))
    maybe(0.3, "min_tokens", draw.randint(0, options["max_tokens"]))
    maybe(0.2, "stop_token_ids", tuple(draw.randrange(vocab_size) for _ in range(20)))
    if draw.random() < 0.2:
        options["grammar"] = draw.choice(_GRAMMARS)
    else:
        maybe(0.5, "ignore_eos", True)
    maybe(0.3, "n", 2, 3)
    maybe(0.25, "num_draft_tokens", 1, 2, 5, 50, 0)
    return SamplingParams(**options)

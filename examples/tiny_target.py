"""Make a tiny chat model from nothing, in a few minutes on a CPU.

It knows one small world: questions about numbers, days and letters, and answers with reasons. They
are generated here, and so is the tokenizer. `examples/tiny.toml` trains a drafter for it.

    python examples/tiny_target.py [FOLDER] [--family llama|qwen3_5|qwen3_moe]

The target goes into FOLDER, runs/tiny/target by default, and the prompts beside it. qwen3_5 has
recurrent layers among those with attention, qwen3_moe has experts.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

START, END, MASK = "<|start|>", "<|end|>", "<|mask|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 768
NUM_DIALOGUES, NUM_PROMPTS = 6000, 1200
STEPS, BATCH, LR = 300, 16, 3e-3

SIZES: Mapping[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Eight layers, so that a drafter of one layer has something to save."""
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
}
"""Of each its model type in transformers, and what its config has beside the sizes."""

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jon", "Kim", "Leo"]
THINGS = ["apples", "books", "coins", "eggs", "pens", "shells", "stamps", "stones"]

Dialogue = tuple[str, str]


def shopping(rng: random.Random) -> Dialogue:
    """A sum of two small numbers, told as a story."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randrange(2, 40), rng.randrange(2, 40)
    return (
        f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
        f"At first {name} has {a} {thing}. Then {name} buys {b} more {thing}. Together these are "
        f"{a} + {b} = {a + b}. So {name} has {a + b} {thing}.",
    )


def counting(rng: random.Random) -> Dialogue:
    """Numbers in steps."""
    start, step, count = rng.randrange(1, 20), rng.randrange(1, 6), rng.randrange(5, 12)
    numbers = ", ".join(str(start + step * i) for i in range(count))
    return (
        f"Count {count} numbers from {start} in steps of {step}.",
        f"I begin with {start} and add {step} each time. The numbers are: {numbers}. That was it.",
    )


def weekdays(rng: random.Random) -> Dialogue:
    """The day after some days."""
    day, ahead = rng.randrange(7), rng.randrange(1, 7)
    way = [DAYS[(day + i) % 7] for i in range(1, ahead + 1)]
    return (
        f"Today is {DAYS[day]}. Which day is it in {ahead} days?",
        f"Today is {DAYS[day]}. The next days are {', '.join(way)}. So in {ahead} days it is "
        f"{way[-1]}.",
    )


def spelling(rng: random.Random) -> Dialogue:
    """A word letter by letter."""
    word = rng.choice(NAMES + DAYS + THINGS)
    letters = ", ".join(word.upper())
    return (
        f"Spell the word {word}.",
        f"The word {word} has {len(word)} letters. They are {letters}. The first letter is "
        f"{word[0].upper()} and the last letter is {word[-1].upper()}.",
    )


KINDS: dict[str, Callable[[random.Random], Dialogue]] = {
    "shopping": shopping,
    "counting": counting,
    "weekdays": weekdays,
    "spelling": spelling,
}


def make_tokenizer(dialogues: list[Dialogue]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the dialogues; digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for pair in dialogues for part in pair), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=[START, MASK],
        chat_template=TEMPLATE,
    )


def make_model(family: str, vocab_size: int) -> PreTrainedModel:
    """An untrained target of a family, in float32."""
    torch.manual_seed(0)
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **SIZES, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(model: PreTrainedModel, texts: list[list[int]], pad: int) -> None:
    """Next-token training on whole dialogues."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.05)
    rng, began = random.Random(1), time.monotonic()
    for step in range(STEPS):
        batch = rng.sample(texts, BATCH)
        width = max(map(len, batch))
        ids = torch.tensor([text + [pad] * (width - len(text)) for text in batch])
        logits = model(ids, use_cache=False).logits[:, :-1]
        labels = ids[:, 1:].masked_fill(ids[:, 1:] == pad, -100)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1} of {STEPS}: loss {loss:.3f}, {time.monotonic() - began:.0f} s")


def main(folder: Path, family: str) -> None:
    """Write the target and, beside it, prompts: new ones of the kinds that have any left."""
    rng = random.Random(0)
    made = [KINDS[kind](rng) for _ in range(NUM_DIALOGUES // 4) for kind in KINDS]
    tokenizer = make_tokenizer(made)
    texts = [
        tokenizer(
            f"{START}user\n{question}{END}\n{START}assistant\n{answer}{END}",
        )["input_ids"]
        for question, answer in made
    ]
    model = make_model(family, len(tokenizer))
    print(f"a target of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    train(model, texts, tokenizer.convert_tokens_to_ids(MASK))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    known = {question for question, _ in made}
    for kind, make in KINDS.items():
        new = {make(rng)[0]: None for _ in range(NUM_PROMPTS // 4)}
        questions = [question for question in new if question not in known] or list(new)
        lines = "".join(json.dumps({"prompt": question}) + "\n" for question in questions)
        (folder.parent / f"{kind}.jsonl").write_text(lines, encoding="utf-8")
    print(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/tiny/target"))
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    args = parser.parse_args()
    main(args.folder, args.family)

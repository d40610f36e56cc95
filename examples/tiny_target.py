"""Make a tiny chat model from nothing, in a few minutes on a CPU.

It knows one small world: questions about numbers, days and letters, and answers with reasons. They
are generated here, and so is the tokenizer. `examples/tiny.toml` trains a drafter for it.

    python examples/tiny_target.py [FOLDER]     runs/tiny/target and prompts beside it by default
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END, MASK = "<|start|>", "<|end|>", "<|mask|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 768
NUM_DIALOGUES, NUM_PROMPTS = 6000, 1200
STEPS, BATCH, LR = 300, 16, 3e-3

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jon", "Kim", "Leo"]
THINGS = ["apples", "books", "coins", "eggs", "pens", "shells", "stamps", "stones"]

Dialogue = tuple[str, str]


def shopping(rng: random.Random) -> Dialogue:
    """A sum of two small numbers, in words of a story."""
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


def make_model(vocab_size: int) -> LlamaForCausalLM:
    """Eight layers, so that a drafter of one layer has something to save."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, texts: list[list[int]], pad: int) -> None:
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


def main(folder: Path) -> None:
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
    model = make_model(len(tokenizer))
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
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tiny/target"))

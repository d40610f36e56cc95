"""200 untidy prompts of ten kinds. `python -m tests.exact.prompts` writes prompts.jsonl anew."""

import json
import random
from pathlib import Path

PATH = Path(__file__).with_name("prompts.jsonl")
PER_KIND = 20

NAMES = ("Ana", "Bo", "Chidi", "Dunya", "Emil", "Farah", "Goran", "Hana")
THINGS = ("apples", "stamps", "old radios", "bolts", "tickets", "eggs", "tulips", "crayons")
TOPICS = (
    "tides", "the printing press", "how bread rises", "black holes", "chess openings",
    "why leaves turn red", "the history of zero", "noise in photographs", "bicycles", "honey bees",
)  # fmt: skip
TASKS = (
    "reverses a linked list", "counts vowels", "merges two sorted lists", "parses a date",
    "finds the longest word", "checks a palindrome", "flattens nested lists", "rotates a matrix",
    "validates an email address", "computes a moving average",
)  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "C", "SQL", "a shell script", "Rust")
SENTENCES = (
    "The meeting was moved to thursday because of the weather,, sorry!!",
    "their going too the store for to buy some milk and egg's",
    "Despite the rain; the match went on and on and on.",
    "I am writting to inform you that you're order has been delayed.",
    "We reccomend to restart the the machine before calling support.",
)
FOREIGN = (
    "¿Puedes explicar qué es la fotosíntesis en tres frases?",
    "Écris un court poème sur la mer et le vent.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "请用简单的话解释什么是人工智能。",
    "日本の首都はどこですか？理由も教えてください。",
    "Расскажи короткую сказку про медведя и лису.",
    "اكتب جملة عن السلام.",
    "एक छोटी कहानी लिखो।",
    "Quais são os melhores meses para visitar Lisboa? 🌞🏖️",
    "Γράψε τρεις λέξεις για τη θάλασσα.",
)
TOKENS = ("a", "the", " ", "\n", "?", "0", "Hello", "}", "é", "🙂")


def _math(draw: random.Random, index: int) -> str:
    name, other = draw.sample(NAMES, 2)
    thing, a, b, c = draw.choice(THINGS), *(draw.randint(2, 90) for _ in range(3))
    return (
        f"{name} has {a} {thing}. {other} gives {name} {b} more and takes {c % a} back. Each is "
        f"worth ${c}.{draw.randint(10, 99)}. How much are {name}'s {thing} worth? Think aloud."
    )


def _code(draw: random.Random, index: int) -> str:
    task, language = draw.choice(TASKS), draw.choice(LANGUAGES)
    stub = "\n```\ndef f(x):\n\treturn x[::-1]  # ???\n```" if index % 3 == 0 else ""
    return f"Write a function in {language} that {task}.{stub}"


def _chat(draw: random.Random, index: int) -> str:
    return draw.choice(
        ("hey so um tell me about {}", "Explain {} like I'm five!!", "{}: pros & cons?", "WHY {}")
    ).format(draw.choice(TOPICS))


def _rewrite(draw: random.Random, index: int) -> str:
    order = draw.choice(("Rewrite politely:", "Fix the spelling:", "Summarize in one line:"))
    return f"{order}\n\n{' '.join(draw.sample(SENTENCES, 3))}"


def _foreign(draw: random.Random, index: int) -> str:
    return FOREIGN[index % len(FOREIGN)] + (" Answer in English." if index >= len(FOREIGN) else "")


def _tables(draw: random.Random, index: int) -> str:
    rows = [{"id": i, "name": draw.choice(NAMES), "x": draw.random()} for i in range(3 + index % 5)]
    if index % 2:
        lines = [f"| {row['id']} | {row['name']} | {row['x']:.3f} |" for row in rows]
        return "Turn this table into JSON:\n| id | name | x |\n|---|---|---|\n" + "\n".join(lines)
    return "Sort these by name and answer with JSON only:\n" + json.dumps(rows)


def _repeated(draw: random.Random, index: int) -> str:
    piece = draw.choice(("ha", "1 2 3 ", "na na ", "abc", "=-", "Yes. No. "))
    return "Continue: " + piece * draw.randint(10, 60)


def _lists(draw: random.Random, index: int) -> str:
    return f"List {draw.randint(3, 12)} facts about {draw.choice(TOPICS)}, numbered, one per line"


def _one_token(draw: random.Random, index: int) -> str:
    return TOKENS[index % len(TOKENS)]


def _long(draw: random.Random, index: int) -> str:
    lines = [
        f"{i}. {draw.choice(NAMES)} bought {draw.randint(1, 99)} {draw.choice(THINGS)}. "
        + draw.choice(SENTENCES)
        for i in range(15 + index)
    ]
    return "Who bought the most?\n" + "\n".join(lines)


KINDS = {
    "math": _math,
    "code": _code,
    "chat": _chat,
    "rewrite": _rewrite,
    "multilingual": _foreign,
    "tables": _tables,
    "repeated": _repeated,
    "lists": _lists,
    "one_token": _one_token,
    "long": _long,
}


def build_prompts() -> list[dict[str, str]]:
    """Kinds alternate, so that every slice has most of them."""
    draw = random.Random(7)
    return [
        {"kind": kind, "text": write(draw, index)}
        for index in range(PER_KIND)
        for kind, write in KINDS.items()
    ]


def read_prompts() -> list[dict[str, str]]:
    """The rows of prompts.jsonl."""
    return [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Write prompts.jsonl."""
    rows = (json.dumps(row, ensure_ascii=False) for row in build_prompts())
    PATH.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

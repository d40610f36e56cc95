"""Numbers in the sentences that people read."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, whose plural ends in s: "1 thread", "2 threads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def choice_of(temperature: float) -> str:
    """How tokens are chosen: "greedy", or "temperature 0.7"."""
    return f"temperature {temperature:g}" if temperature else "greedy"

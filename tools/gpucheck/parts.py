"""The parts in the order of their value, and how long each may take."""

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class Part:
    """A part; `module` has a function `run(settings, notes)`.

    seconds: its limit; None: all that is left of the call. With less than least_seconds it is not
    begun. grace_seconds: between the request to end and the end. has_cpu_kernels: as a deployment
    has them, for what a step computes beside the card.
    """

    name: str
    about: str
    module: str
    seconds: float | None
    least_seconds: float = 5.0
    grace_seconds: float = 3.0
    has_cpu_kernels: bool = False


_with_kernels = partial(Part, has_cpu_kernels=True)
PARTS = (
    Part(
        "environment",
        "Machine, versions, and what the device can do at best",
        "gpucheck.environment",
        60,
    ),
    # It compiles the kernels for the CPU, so that this is nobody's time.
    _with_kernels("models", "The pair that the rest is measured with", "gpucheck.models", 150),
    _with_kernels("proof", "The load check, and the proof of the pair", "gpucheck.exactness", 300),
    _with_kernels("ledger", "Where the time of a step goes", "gpucheck.step_ledger", 90),
    _with_kernels("speed", "Plain, drafted, transformers", "gpucheck.speed", 240),
    Part("tests", "The tests that need a GPU", "gpucheck.gpu_tests", 240),
    Part("triton", "The Triton kernels against torch's operations", "gpucheck.triton_kernels", 150),
    Part("forwards", "Which rules keep a row's bits in whole forwards", "gpucheck.forwards", 120),
    Part("rows", "Which operations keep a row's bits", "gpucheck.rows", 180),
    Part("steps", "How long a training step takes", "gpucheck.train_speed", 180),
    _with_kernels(
        "training", "Training from the committed answers", "gpucheck.training", None, 120, 30
    ),
)


def part_named(name: str) -> Part:
    """Raises SystemExit for an unknown name."""
    for part in PARTS:
        if part.name == name:
            return part
    known = ", ".join(part.name for part in PARTS)
    raise SystemExit(f"part {name!r} is unknown; use {known}")

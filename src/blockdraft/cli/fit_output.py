"""What `models check` found, for people. Loads no model library."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockdraft.diagnose.fit import DrafterFacts, Fit, TargetFacts

_PATHS = {
    "paged": "all sequences in one forward pass",
    "one after another": "one sequence after another",
    "recurrent": "all sequences in one forward pass, recurrent layers token by token",
    "recurrent, one after another": ("one sequence after another, recurrent layers token by token"),
}


def fit_lines(fit: "Fit", target: str, drafter: str) -> Iterator[str]:
    """The verdict first, then what is known, then what is not."""
    if not fit.fits:
        reason = (fit.reason or "").rpartition("does not fit the target: ")[2]
        yield f"{drafter} does not fit {target}: {reason}"
    elif fit.target.missing is not None:
        yield f"{drafter} fits {target}, which cannot be loaded here: {fit.target.missing}"
    else:
        yield f"{drafter} fits {target}: {_proposed(fit.drafter)}"
    yield from _target_lines(fit.target)
    yield from _drafter_lines(fit.drafter)
    yield f"  sizes are those of {fit.dtype}"
    if fit.fits:
        yield f"  only loading shows: {'; '.join(fit.later)}"


def _target_lines(facts: "TargetFacts") -> Iterator[str]:
    quantized = f", quantized ({facts.quantization})" if facts.quantization else ""
    yield f"  target: {facts.architecture}, {facts.num_layers} layers{quantized}"
    because = f" ({facts.path_reason})" if facts.path_reason else ""
    yield f"  runs: {_PATHS[facts.path]}{because}; {'trees' if facts.trees else 'chains only'}"
    yield (
        f"  memory: weights {_size(facts.weight_bytes)}, KV cache "
        f"{_size(facts.kv_bytes_per_token)} per token"
    )
    if not facts.trees:
        yield (
            f"  memory: states {_size(facts.state_bytes)} per sequence, and at most as much again "
            "for each candidate of a step"
        )


def _drafter_lines(facts: "DrafterFacts") -> Iterator[str]:
    layers = ", ".join(map(str, facts.target_layer_ids))
    reads = f"reads layers {layers}" if layers else "reads no features"
    yield (
        f"  drafter: {facts.kind}, {facts.layout} layout, {_steps(facts)}, {reads}, proposes from "
        f"{facts.guessed_tokens} tokens"
    )
    yield (
        f"  memory: weights {_size(facts.weight_bytes)}, KV cache "
        f"{_size(facts.kv_bytes_per_token)} per token"
    )


def _proposed(facts: "DrafterFacts") -> str:
    if facts.block_size is not None:
        return f"blocks of {facts.block_size} slots"
    return f"paths of up to {facts.longest_path} tokens"


def _steps(facts: "DrafterFacts") -> str:
    if facts.block_size is not None:
        return f"blocks of {facts.block_size}, mask token {facts.mask_token_id}"
    return "a forward pass for each depth"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "known when loaded"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"

"""What choosing costs: each way of sampling beside greedy, and beside the reference form.

Rows are new positions, the worst case. A step is 5 guesses of a drafter and the 6 choices of its
verification, of which 3 become tokens; the next step meets the rest again. Measured is the
processor time of one thread, so that other work on the machine disturbs little.

    python tools/experiments/sampler_speed.py
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.speculate.sampler.choose import Walk, choose
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.reference import choose_row

SETTINGS = {
    "greedy": SamplingParams(),
    "T=0.7": SamplingParams(temperature=0.7),
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7 top_k=50": SamplingParams(temperature=0.7, top_k=50),
    "T=0.7 top_p=0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "T=0.7 min_p=0.05": SamplingParams(temperature=0.7, min_p=0.05),
}
VOCAB_SIZES = 49_152, 151_936
NUM_ROWS = 1, 8, 64
REPEATS = 15

_SEEDS = itertools.count()


def logits_like_text(num_rows: int, vocab_size: int) -> Tensor:
    """Logits [num_rows, vocab_size] of which a few dozen hold most of the probability."""
    draw = np.random.default_rng(0)
    logits = draw.normal(0.0, 2.5, (num_rows, vocab_size))
    for row in logits:
        likely = draw.choice(vocab_size, 40, replace=False)
        row[likely] = 18.0 - draw.exponential(5.0, 40)
    return torch.from_numpy(logits.astype(np.float32))


def sequence_of(params: SamplingParams, position: int = 8) -> Sequence:
    """A sequence with noise that nobody has seen."""
    return Sequence(
        key=0,
        params=params,
        seed=next(_SEEDS),
        sample_index=0,
        stop_ids=frozenset(),
        token_ids=[1] * position,
        num_prompt=position,
    )


def take_rows(logits: Tensor, params: SamplingParams) -> None:
    """One row of each of several sequences."""
    walks = [Walk.chain(row[None], sequence_of(params), []) for row in logits]
    for choice_at in choose(walks):
        choice_at(0)


def take_reference(logits: Tensor, params: SamplingParams) -> None:
    """The same by the reference form."""
    for row in logits:
        choose_row(row.numpy(), Place(sequence_of(params), 0, []))


def step(logits: Tensor, params: SamplingParams, state: list[Sequence]) -> None:
    """Guess and verify, then go on by three tokens."""
    (sequence,) = state
    for num_rows in (5, 6):
        (choice_at,) = choose([Walk.chain(logits[:num_rows], sequence, [0] * 5)])
        for index in range(num_rows):
            choice_at(index)
    sequence.token_ids += [1] * 3


def milliseconds(run: Callable[[], None], repeats: int = REPEATS) -> float:
    """The median of several runs."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        run()
        seconds.append(time.thread_time() - began)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Print milliseconds a row, and a step."""
    torch.set_num_threads(1)
    for vocab_size in VOCAB_SIZES:
        logits = logits_like_text(max(NUM_ROWS), vocab_size)
        print(f"vocabulary {vocab_size}, milliseconds a row: of 1, 8, 64 rows; reference; a step")
        for name, params in SETTINGS.items():
            rows = [milliseconds(partial(take_rows, logits[:n], params)) / n for n in NUM_ROWS]
            slow = milliseconds(partial(take_reference, logits[:8], params)) / 8
            steps = milliseconds(partial(step, logits, params, [sequence_of(params)]), 2 * REPEATS)
            shown = " ".join(f"{value:7.3f}" for value in rows)
            print(f"  {name:18s} {shown} {slow:8.3f} {steps:8.3f}")


if __name__ == "__main__":
    main()

"""How often a draft equals the choice, under each form of the choice.

Plain sampled decoding records the target's logits and, at every position, the drafter's logits of a
block that starts there. Each form of choice and each way to draft is then replayed on the same
records: the first slots that match are counted as the engine would.

    python tools/experiments/choice_forms.py PROMPTS.jsonl[.gz] TARGET DRAFTER [NUM_PROMPTS]
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Batch, DraftBlock, Row, Sequence
from blockdraft.engine.engine import Engine
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.draft import load_draft_model
from blockdraft.models.loading import load_target_model
from blockdraft.models.sequential import SequentialTarget
from blockdraft.models.target import TargetOutput
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.sampler.noise import gumbel_noise
from blockdraft.speculate.sampler.philox import Stream
from blockdraft.train.prompts import prompt_ids, read_prompts

TEMPERATURE, MAX_TOKENS, SEED = 0.7, 96, 7

RNG = np.random.default_rng(0)
RUNS: dict[str, list[int]] = {}
SECONDS: dict[str, float] = {}

Scores = NDArray[np.float32]
Pick = Callable[[Scores, int, float], int]
Record = tuple[list[int], dict[int, Scores], dict[int, Scores]]


class Recorder(DFlashDrafter):
    """Drafts nothing, but keeps the logits of the block it would have drafted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.records: dict[int, Scores] = {}

    def _guess(self, hidden: Tensor, rows: list[Row]) -> list[list[int]]:
        (row,) = rows
        logits = self._over_whole_vocabulary(self._logits(hidden))
        self.records[len(row.sequence.token_ids)] = logits[0].float().numpy().copy()
        return [[]]


def record(target: SequentialTarget, drafter: Recorder, prompt_ids: tuple[int, ...]) -> Record:
    """(tokens, {position: draft logits [slots, V]}, {position: target logits [V]})."""
    drafter.records = {}
    engine = Engine(target, drafter)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=SEED)
    key = engine.add(prompt_ids, params, eos_ids=frozenset([2]))
    sequence: Sequence = engine.progress[key].sequence
    seen: dict[int, Scores] = {}
    forward = target.forward

    def recording(batch: Batch, block: DraftBlock) -> TargetOutput:
        output = forward(batch, block)
        seen[len(sequence.token_ids)] = output.logits[-1].float().numpy().copy()
        return output

    target.forward = recording  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    target.forward = forward  # type: ignore[method-assign]
    engine.take(key)
    return sequence.token_ids, drafter.records, seen


def softmax(x: Scores) -> Scores:
    """Probabilities."""
    e = np.exp(x - x.max())
    probabilities: Scores = e / e.sum()
    return probabilities


def replay(tokens: list[int], drafts: dict[int, Scores], targets: dict[int, Scores]) -> None:
    """Count, for every way to draft, how many slots of each recorded block match."""
    uniforms = {}
    for position, logits in targets.items():
        # The uniform that would have given this token: anywhere in its step of the CDF.
        p = softmax(logits / TEMPERATURE)
        low = p[: tokens[position]].sum()
        uniforms[position] = float(low + RNG.random() * p[tokens[position]])
    for start, logits in drafts.items():
        for name, pick in PICKS.items():
            began, run = time.perf_counter(), 0
            for slot in range(min(logits.shape[0], len(tokens) - start)):
                position = start + slot
                if pick(logits[slot], position, uniforms[position]) != tokens[position]:
                    break
                run += 1
            SECONDS[name] = SECONDS.get(name, 0.0) + time.perf_counter() - began
            RUNS.setdefault(name, []).append(run)


def main() -> None:
    """Print tau and the rate of the first slot for each way to draft."""
    folder = resolve_model(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_target_model(folder, torch.bfloat16)
    draft = load_draft_model(Path(sys.argv[3]))
    head = model.get_output_embeddings().weight
    drafter = Recorder(draft, model.get_input_embeddings().weight, head)
    target = SequentialTarget(model, layer_ids=draft.config.target_layer_ids)
    prompts = read_prompts(Path(sys.argv[1]))[: int(sys.argv[4]) if len(sys.argv) > 4 else 8]
    for prompt in prompts:
        replay(*record(target, drafter, prompt_ids(tokenizer, prompt)))
    for name, runs in RUNS.items():
        tau, first = 1 + np.mean(runs), np.mean(np.array(runs) > 0)
        cost = 1e3 * SECONDS[name] / len(runs)
        print(f"{name:28s} tau {tau:.3f}  slot 1 {first:.3f}  n {len(runs)}  {cost:.2f} ms")


def gumbel(scale: float) -> Pick:
    """Draft with the noise that chose the target's token; drafter's logits scaled."""

    def pick(logits: Scores, position: int, uniform: float) -> int:
        noise = gumbel_noise(Stream(SEED, 0, position), logits.shape[0])
        return int((scale * logits / TEMPERATURE + noise).argmax())

    return pick


def inverse_cdf(logits: Scores, position: int, uniform: float) -> int:
    """Draft with the uniform that chose the target's token."""
    cdf = softmax(logits / TEMPERATURE).cumsum()
    return int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))


PICKS: dict[str, Pick] = {
    "argmax (either form)": lambda logits, position, uniform: int(logits.argmax()),
    "inverse CDF, shared uniform": inverse_cdf,
    "Gumbel, shared noise": gumbel(1.0),
    "Gumbel, logits x 0.8": gumbel(0.8),
    "Gumbel, logits x 1.25": gumbel(1.25),
    "Gumbel, logits x 1.5": gumbel(1.5),
    "Gumbel, logits x 2": gumbel(2.0),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""How often does a draft equal the choice, under each form of the choice?

Plain sampled decoding records the target's logits and, at every position, the drafter's logits of a
block that starts there. Each form of choice and each way to draft is then replayed on the same
records: the first slots that match are counted as the engine would.

    python tools/experiments/choice_forms.py PROMPTS.jsonl[.gz] TARGET DRAFTER [NUM_PROMPTS]
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.engine.engine import Engine
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.draft import load_draft_model
from blockdraft.models.loading import load_target_model
from blockdraft.models.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.noise import gumbel_noise
from blockdraft.train.prompts import chat_ids, read_prompts

TEMPERATURE, MAX_TOKENS, SEED = 0.7, 96, 7


class Recorder(DFlashDrafter):
    """Drafts nothing, but keeps the logits of the block it would have drafted."""

    def __init__(self, *args):
        super().__init__(*args)
        self.records = {}

    def _guess(self, logits, row):
        self.records[len(row.sequence.token_ids)] = logits.float().numpy().copy()
        return []


def record(target, drafter, prompt_ids):
    """(tokens, {position: draft logits [slots, V]}, {position: target logits [V]})."""
    drafter.records = {}
    engine = Engine(target, drafter)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=SEED)
    key = engine.add(prompt_ids, params, eos_ids=frozenset([2]))
    sequence: Sequence = engine.progress[key].sequence
    seen = {}
    forward = target.forward

    def recording(batch, block):
        output = forward(batch, block)
        seen[len(sequence.token_ids)] = output.logits[0][-1].float().numpy().copy()
        return output

    target.forward = recording
    while engine.has_work:
        engine.step()
    target.forward = forward
    engine.take(key)
    return sequence.token_ids, drafter.records, seen


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def main() -> None:
    """Print tau and the rate of the first slot for each way to draft."""
    from transformers import AutoTokenizer

    folder = resolve_model(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_target_model(folder, torch.bfloat16)
    draft = load_draft_model(Path(sys.argv[3]))
    head = model.get_output_embeddings().weight
    drafter = Recorder(draft, model.get_input_embeddings().weight, head)
    target = SequentialTarget(model, layer_ids=draft.config.target_layer_ids)
    prompts = read_prompts(Path(sys.argv[1]))[: int(sys.argv[4]) if len(sys.argv) > 4 else 8]
    rng = np.random.default_rng(0)
    hits: dict[str, list[int]] = {}
    first: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for prompt in prompts:
        tokens, drafts, targets = record(target, drafter, chat_ids(tokenizer, prompt.text))
        uniforms = {}
        for position, logits in targets.items():
            # The uniform that would have given this token: anywhere in its step of the CDF.
            p = softmax(logits / TEMPERATURE)
            low = p[: tokens[position]].sum()
            uniforms[position] = low + rng.random() * p[tokens[position]]
        for start, logits in drafts.items():
            for name, pick in PICKS.items():
                began, run = time.perf_counter(), 0
                for slot in range(logits.shape[0]):
                    position = start + slot
                    if position >= len(tokens):
                        break
                    if pick(logits[slot], position, uniforms[position]) != tokens[position]:
                        break
                    run += 1
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
                hits.setdefault(name, []).append(1 + run)
                first.setdefault(name, []).append(int(run > 0))
    for name in PICKS:
        print(
            f"{name:28s} tau {np.mean(hits[name]):.3f}  slot 1 {np.mean(first[name]):.3f}  "
            f"n {len(hits[name])}  {1e3 * seconds[name] / len(hits[name]):.2f} ms"
        )


def gumbel(scale):
    """Draft with the noise that chose the target's token; drafter's logits scaled."""

    def pick(logits, position, uniform):
        noise = gumbel_noise(SEED, 0, position, logits.shape[0])
        return int((scale * logits / TEMPERATURE + noise).argmax())

    return pick


def inverse_cdf(logits, position, uniform):
    """Draft with the uniform that chose the target's token."""
    cdf = softmax(logits / TEMPERATURE).cumsum()
    return int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))


PICKS = {
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

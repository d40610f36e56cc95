"""tau of the drafters that run no model, replayed on recorded answers: no target is needed.

    python tools/experiments/free_tau.py ANSWERS --limit 100 --nodes 3 5 8 [--table DRAFTER]

A pass verifies the most probable candidates, always as many as it may. A sampled answer is replayed
with the noise that chose its tokens, if `--seed` is that of `blockdraft data`. Answers that loop
are left out. Give answers in which no table was counted.
"""

import argparse
import hashlib
import random
from collections import Counter
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from blockdraft.core.jsonl import read_jsonl
from blockdraft.core.plan import ROOT, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.hub.resolve import resolve_model
from blockdraft.speculate.drafters.base import FreeDrafter
from blockdraft.speculate.drafters.lookup import LookupDrafter
from blockdraft.speculate.drafters.ngram import NGramDrafter
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.merge import merge

WAYS = (
    "lookup",
    "own n-grams",
    "table and own n-grams",
    "lookup, own n-grams",
    "lookup, table and own n-grams",
)


def sequence_of(answer: dict[str, Any], seed: int) -> Sequence:
    """The sequence of an answer before its first token."""
    params = SamplingParams(max_tokens=4096, temperature=answer["temperature"])
    name = f"{seed}/{answer['id']}/{answer['temperature']}"
    own_seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    prompt = list(answer["prompt_ids"])
    sample = answer.get("sample", 0)
    return Sequence(0, params, own_seed, sample, frozenset(), prompt, len(prompt))


def num_kept(tree: Tree, chosen: Items[int]) -> int:
    """How many candidates the target keeps that goes on to choose these tokens."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    node, kept = ROOT, 0
    for token_id in chosen:
        node = children.get((node, token_id), -2)
        if node < 0:
            break
        kept += 1
    return kept


def num_passes(drafters: Items[FreeDrafter], answer: dict[str, Any], nodes: int, seed: int) -> int:
    """Passes of the target until an answer is written."""
    sequence, rest = sequence_of(answer, seed), list(answer["response_ids"])
    for drafter in drafters:
        drafter.open(Row(sequence, [], 0), 0)
    passes = 0
    while rest:
        row = Row(sequence, sequence.token_ids[-1:], 16)
        found = [drafter.propose([row.within(drafter.max_nodes)])[0] for drafter in drafters]
        taken = num_kept(merge(found, nodes).tree, rest) + 1
        sequence.token_ids += rest[:taken]
        del rest[:taken]
        passes += 1
    for drafter in drafters:
        drafter.close(sequence.key)
    return passes


def tau(
    way: str,
    table: NGramTable,
    answers: Items[dict[str, Any]],
    nodes: int,
    seed: int,
    vocab_size: int,
) -> dict[str, float]:
    """Tokens a pass, of greedy, of sampled and of all answers."""
    drafters: list[FreeDrafter] = []
    if "lookup" in way:
        drafters.append(LookupDrafter())
    if "n-grams" in way:
        drafters.append(NGramDrafter(table if "table" in way else NGramTable([]), vocab_size))
    tokens: Counter[str] = Counter()
    passes: Counter[str] = Counter()
    for answer in answers:
        num = num_passes(drafters, answer, nodes, seed)
        for kind in ("sampled" if answer["temperature"] else "greedy", "all"):
            tokens[kind] += len(answer["response_ids"])
            passes[kind] += num
    return {kind: tokens[kind] / passes[kind] for kind in sorted(tokens)}


def main() -> None:
    """Print a line for each way and number of candidates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, help="JSONL of `blockdraft data`, or .gz of it")
    parser.add_argument("--table", default="smollm2-135m-dflash", help="drafter; its table counts")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=49_152, help="of the target")
    options = parser.parse_args()
    answers = [
        row
        for _, row in read_jsonl(options.answers)
        if row.get("response_ids") and row.get("finish") != "loop"
    ]
    random.Random(0).shuffle(answers)
    answers = answers[: options.limit]
    table = NGramTable.load(resolve_model(options.table)) or NGramTable([])
    print(f"{len(answers)} answers, {table.num_contexts} contexts in the table")
    for name in WAYS:
        for nodes in options.nodes:
            found = tau(name, table, answers, nodes, options.seed, options.vocab_size)
            told = "  ".join(f"{kind} {value:.3f}" for kind, value in found.items())
            print(f"{name:28} {nodes} candidates  {told}", flush=True)


if __name__ == "__main__":
    main()

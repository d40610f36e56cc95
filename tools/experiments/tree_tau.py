"""tau of chains against trees of several sizes, over the same prompts and the same tokens.

    python tools/experiments/tree_tau.py --prompts gsm8k_test.jsonl:97 --limit 4 --tokens 64

A number behind a file takes every so manieth row. All prompts run at once.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from blockdraft import LLM, SamplingParams
from blockdraft.bench.workload import read_workload
from blockdraft.measure.acceptance import AcceptanceStats


def main() -> None:
    """Print a line for each temperature and number of nodes; ends if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE[:STEP]")
    parser.add_argument("--limit", type=int, default=4, help="prompts of a file")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--nodes", nargs="+", type=int, default=[7, 11, 15, 31])
    options = parser.parse_args()
    prompts = []
    for given in options.prompts:
        file, _, step = given.partition(":")
        rows = read_workload(Path(file))[:: int(step or 1)][: options.limit]
        prompts += [(Path(file).name.split(".")[0], row.text) for row in rows]
    llm = LLM(adaptive=False, max_concurrency=len(prompts))
    print(f"{len(prompts)} prompts, {llm.dtype}")
    for temperature in options.temperature:
        expected = None
        for num_nodes in [0, *options.nodes]:
            llm.use_fixed_drafting(num_nodes or None)
            params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=5)
            chats = [[{"role": "user", "content": text}] for _, text in prompts]
            found = [generation.completions[0] for generation in llm.chat(chats, params)]
            tokens = [completion.token_ids for completion in found]
            expected = expected or tokens
            assert tokens == expected, "other tokens than those of a chain"
            stats: defaultdict[str, AcceptanceStats] = defaultdict(AcceptanceStats)
            for (name, _), completion in zip(prompts, found, strict=True):
                stats[name].add(completion.acceptance)
                stats["all"].add(completion.acceptance)
            told = "  ".join(f"{name} {own.acceptance_length:.3f}" for name, own in stats.items())
            way = f"{num_nodes} nodes" if num_nodes else "chain"
            print(f"T {temperature:g}  {way:>8}  {told}", flush=True)


if __name__ == "__main__":
    main()

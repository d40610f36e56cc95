"""vLLM on a CPU, one prompt at a time: greedy, bfloat16, plainly or with a DFlash drafter.

It runs in an environment of its own, which holds vllm and no blockdraft; one process is one
configuration:

    python tools/experiments/against_vllm.py TARGET --prompts PROMPTS.jsonl[.gz]
        [--drafter FOLDER --block 6] [--compiled] [--limit 8] [--max-tokens 128] [--rounds 3]

prints one JSON object. Without --prompts it answers whoever started it, as compare_engines.py does:
each line of standard input is a JSON list of token ids, and each line that it prints is a sample.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import vllm  # type: ignore[import-not-found]  # of another environment

WARM_UP_TOKENS = 16
KV_BYTES = 2**30
"""Room for many times the longest context; by default vLLM takes most of the memory."""
COUNTERS = {"vllm:spec_decode_num_drafts": "passes", "vllm:spec_decode_num_accepted_tokens": "kept"}


class Vllm:
    """A loaded target, with its drafter if `block` (anchor included) is given."""

    def __init__(self, args: argparse.Namespace) -> None:
        speculative = None
        if args.block is not None:
            speculative = {
                "method": "dflash",
                "model": str(args.drafter),
                "num_speculative_tokens": args.block - 1,
            }
        self.llm = vllm.LLM(
            str(args.target),
            dtype="bfloat16",
            enforce_eager=not args.compiled,
            speculative_config=speculative,
            max_model_len=args.max_context,
            max_num_seqs=1,
            kv_cache_memory_bytes=KV_BYTES,
            enable_prefix_caching=False,  # a prompt is timed several times
            disable_log_stats=False,  # which holds tau and the time of the first token
        )
        self.max_tokens = args.max_tokens
        self.is_warm = False

    def encode(self, text: str) -> list[int]:
        """Token ids of a chat with one turn."""
        messages = [{"role": "user", "content": text}]
        ids: list[int] = self.llm.get_tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def sample(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Decode one prompt and time it; the first is decoded before, for a moment, to warm up."""
        if not self.is_warm:
            self._generate(prompt_ids, WARM_UP_TOKENS)
            self.is_warm = True
        before = self._counts()
        start = time.perf_counter()
        output = self._generate(prompt_ids, self.max_tokens)
        total = time.perf_counter() - start
        token_ids = list(output.outputs[0].token_ids)
        passes, kept = (now - then for now, then in zip(self._counts(), before, strict=True))
        return {
            "token_ids": token_ids,
            "total_seconds": total,
            "decode_seconds": output.metrics.last_token_ts - output.metrics.first_token_ts,
            "tokens_per_second": len(token_ids) / total,
            "passes": passes,
            "kept": kept,
        }

    def _generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Any:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        prompt = {"prompt_token_ids": list(prompt_ids)}
        return self.llm.generate(prompt, params, use_tqdm=False)[0]

    def _counts(self) -> tuple[int, int]:
        """Drafted target passes and kept drafts, since the start."""
        counts = dict.fromkeys(COUNTERS.values(), 0)
        for metric in self.llm.get_metrics():
            if metric.name in COUNTERS:
                counts[COUNTERS[metric.name]] += int(metric.value)
        return counts["passes"], counts["kept"]


def acceptance_length(samples: Sequence[dict[str, Any]]) -> float | None:
    """Tau, tokens per drafted pass, bonus included; None if nothing was drafted."""
    passes = sum(sample["passes"] for sample in samples)
    return 1 + sum(sample["kept"] for sample in samples) / passes if passes else None


def read_texts(path: Path, limit: int | None) -> list[str]:
    """The first turns of a (gzipped) JSONL file of prompts."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, limit)]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def measure(engine: Vllm, texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Every prompt in every round; the medians are over rounds, then over prompts."""
    encoded = [engine.encode(text) for text in texts]
    turns = [[engine.sample(prompt_ids) for prompt_ids in encoded] for _ in range(rounds)]
    by_prompt = list(zip(*turns, strict=True))
    speeds = [statistics.median(s["tokens_per_second"] for s in samples) for samples in by_prompt]
    return {
        "tokens_per_second": speeds,
        "median_tokens_per_second": statistics.median(speeds),
        "acceptance_length": acceptance_length([s for samples in by_prompt for s in samples]),
        "token_ids": [samples[0]["token_ids"] for samples in by_prompt],
    }


def serve(engine: Vllm, requests: TextIO, answers: TextIO) -> None:
    """A sample for every line of token ids, after a line that says that the engine is ready."""
    print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
    for line in requests:
        print(json.dumps(engine.sample(json.loads(line))), file=answers, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--block", type=int, help="slots of a block, the anchor included")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    parser.add_argument("--cores", default="0-1", help="that vLLM binds its threads to")
    args = parser.parse_args()
    if (args.drafter is None) != (args.block is None):
        parser.error("--drafter and --block go together")
    return args


def main() -> None:
    """Load, then measure or serve."""
    args = parse_arguments()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = args.cores
    # vLLM and its children log to standard output, which is kept for the figures.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Vllm(args)
    if args.prompts is None:
        serve(engine, sys.stdin, answers)
    else:
        report = measure(engine, read_texts(args.prompts, args.limit), args.rounds)
        print(json.dumps({"vllm": vllm.__version__} | report), file=answers, flush=True)


if __name__ == "__main__":
    main()

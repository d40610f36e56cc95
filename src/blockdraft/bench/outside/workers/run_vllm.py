"""vLLM: plain, or with its own drafting by n-grams, suffixes or a DFlash drafter."""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import vllm  # type: ignore[import-not-found]  # of another environment
from talk import Decode, Settings, serve  # type: ignore[import-not-found]  # beside this script

KV_BYTES = 2**30
"""Room for many contexts; by default vLLM takes most of the memory."""
LEAST_SHARE = 0.05
"""Of a GPU's memory that must be free, as our models lie there too; KV_BYTES is what it takes."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""As in vLLM's documentation."""
SUFFIX = {"method": "suffix", "num_speculative_tokens": 32}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def load(settings: Settings) -> Decode:
    """Load the target, and what drafts for it."""
    drafting: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "ngram": NGRAM,
        "suffix": SUFFIX,
        "dflash": {
            "method": "dflash",
            "model": settings["drafter"],
            "num_speculative_tokens": settings["num_draft_tokens"],
        },
    }
    # By default vLLM keeps a core for itself, and would have one thread fewer than we.
    on_cpu = settings["device"] == "cpu"
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    llm = vllm.LLM(
        settings["target"],
        dtype=settings["dtype"],
        trust_remote_code=settings["trust_remote_code"],
        speculative_config=drafting[settings["method"]],
        max_model_len=settings["max_context"],
        max_num_seqs=1,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,  # the warm-up has the prompt of the first request
        disable_log_stats=False,  # which holds the time of the first token
        **({} if on_cpu else {"gpu_memory_utilization": LEAST_SHARE}),
    )

    def num_accepted() -> int:
        return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == ACCEPTED)

    def decode(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, stop_token_ids=settings["eos_ids"]
        )
        before = num_accepted()
        start = time.perf_counter()
        output = llm.generate({"prompt_token_ids": prompt_ids}, params, use_tqdm=False)[0]
        total = time.perf_counter() - start
        token_ids = list(output.outputs[0].token_ids)
        return {
            "token_ids": token_ids,
            "total_seconds": total,
            "decode_seconds": output.metrics.last_token_ts - output.metrics.first_token_ts,
            # Each pass gives the accepted drafts and one token more.
            "num_passes": len(token_ids) - (num_accepted() - before),
        }

    return decode


def own_package() -> str:
    """The name of the build that is installed: the one for CPUs has another."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


if __name__ == "__main__":  # vLLM starts processes that import this file
    serve(load, (own_package(), "torch"))

"""llama.cpp, as xllamacpp brings it, on the target's own GGUF file; plain."""

import json
import time
import urllib.request
from typing import Any

import xllamacpp  # type: ignore[import-not-found]  # of another environment
from talk import Decode, Settings, serve  # type: ignore[import-not-found]  # beside this script


def load(settings: Settings) -> Decode:
    """Load the target. Its server is asked, as only that takes and returns token ids."""
    params = xllamacpp.CommonParams()
    params.model.path = settings["gguf"]
    params.n_ctx = settings["max_context"]
    params.n_parallel = 1
    params.port = 0  # any that is free
    if settings["device"] == "cpu":
        params.n_gpu_layers = 0
    for cores in (params.cpuparams, params.cpuparams_batch):
        cores.n_threads = settings["threads"]
    server = xllamacpp.Server(params)
    # A proxy for the internet knows nothing of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def decode(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        body = {
            "prompt": prompt_ids,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "return_tokens": True,
            "cache_prompt": False,  # the warm-up has the prompt of the first request
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with opener.open(request) as response:
            answer = json.load(response)
        total = time.perf_counter() - start
        return {
            "token_ids": answer["tokens"],
            "total_seconds": total,
            "decode_seconds": answer["timings"]["predicted_ms"] / 1000,
            "num_passes": len(answer["tokens"]),
        }

    return decode


if __name__ == "__main__":
    serve(load, ("xllamacpp",))

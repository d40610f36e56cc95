"""SGLang's command line. Its parser (0.5.23) reads it so; it was not run, for it needs a GPU."""

from blockdraft.core.errors import ConfigError
from blockdraft.server.engines.engine import Engine, common_arguments
from blockdraft.server.engines.settings import EngineSettings, PairFolders


def _arguments(settings: EngineSettings, pair: PairFolders) -> list[str]:
    arguments = [
        *("--model-path", str(pair.target)),
        *common_arguments(settings),
        "--enable-metrics",
    ]
    if pair.drafter is not None:
        if settings.engine.pipeline_parallel > 1:
            raise ConfigError(
                f"pipeline_parallel is {settings.engine.pipeline_parallel}; sglang drafts on one "
                "stage only; leave it out, or give --drafter none"
            )
        # Here the anchor counts: its draft tokens are the slots of a block.
        arguments += [
            *("--speculative-algorithm", "DFLASH"),
            *("--speculative-draft-model-path", str(pair.drafter)),
            *("--speculative-num-draft-tokens", str(pair.num_draft_tokens + 1)),
        ]
    if "max_concurrency" in settings.given:
        arguments += ["--max-running-requests", str(settings.llm.max_concurrency)]
    if settings.llm.trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments


def _environment(settings: EngineSettings) -> dict[str, str]:
    if settings.serve.api_keys:
        raise ConfigError(
            "an API key is given; sglang takes it from its command line, where everybody can see "
            "it, or from a file: write `api-key: KEY` to a YAML file and add `-- --config FILE`"
        )
    return {}


SGLANG = Engine(
    name="sglang",
    module="sglang",
    entry=("-m", "sglang.launch_server"),
    arguments=_arguments,
    environment=_environment,
    refused={
        "device": "add `-- --device NAME`",
        "device_map": "give --tensor-parallel or --pipeline-parallel",
        "kv_cache_dtype": "it has other types; add `-- --kv-cache-dtype NAME`",
        "num_threads": "set OMP_NUM_THREADS",
        "memory": "it counts a share of the device's memory; add `-- --mem-fraction-static SHARE`",
        "draft_dtype": "it drafts with the weights as they are; leave it out",
        "quantize": "add `-- --quantization METHOD`, or name a quantized checkpoint as --target",
        "draft_depth": "it drafts chains with this drafter; give --num-draft-tokens",
        "lookup": "it drafts with one method at a time; leave it out",
        "ngrams": "it does not read the drafter's table; leave it out",
        "shared_lookup": "it drafts with one method at a time; leave it out",
        "max_waiting": "add `-- --max-queued-requests NUMBER`",
        "request_seconds": "its requests have no such limit; leave it out",
        "drain_seconds": "it drains running requests in its own way; leave it out",
        "max_body": "its requests have no size limit; leave it out",
        "cors_origins": "it allows requests from every origin; leave it out",
        "strict": "it ignores unknown fields; leave it out",
        "allowed_hosts": "it answers to every host name; leave it out",
        "trusted_proxies": "set FORWARDED_ALLOW_IPS, which its web server reads",
        "prepare_seconds": "its requests have no such limit; leave it out",
        "root_path": "add `-- --fastapi-root-path PATH`",
        "log_format": "it writes a log of its own; leave it out",
        "recheck": "it has no such tests; leave it out",
        "log_prompts": "add `-- --log-requests --log-requests-level 2`",
    },
)

"""`blockdraft serve`: an OpenAI-compatible server."""

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blockdraft.cli import options
from blockdraft.cli.logs import log_as_server
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import NO, ConfigError
from blockdraft.server.address import bind
from blockdraft.server.config import LogFormat, ServeConfig
from blockdraft.server.engines.config import EngineConfig

_SERVE = ServeConfig()
_MIB = 2**20
KEY_VARIABLE = "BLOCKDRAFT_API_KEY"
PYTHON_VARIABLE = "BLOCKDRAFT_ENGINE_PYTHON"
OWN_ENGINE: Literal["blockdraft"] = "blockdraft"
_SERVER_PACKAGES = frozenset({"fastapi", "prometheus_client", "uvicorn"})


Host = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other machines.")
]
Port = Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")]
ModelName = Annotated[
    str | None, typer.Option(help="Name of the model in requests.", show_default="the target's")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help=f"File with one API key per line; or set {KEY_VARIABLE} to one key."),
]
Key = Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, hidden=True, show_envvar=False)]
MaxWaiting = Annotated[
    int, typer.Option(help="Maximum number of queued answers; further requests get status 429.")
]
RequestSeconds = Annotated[
    float,
    typer.Option(
        "--request-timeout",
        help="Maximum seconds for a request, queueing included; then it gets 408.",
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        "--drain-timeout", help="Seconds that running requests get to finish after SIGTERM."
    ),
]
MaxBody = Annotated[float, typer.Option(help="Largest request body, in MiB.")]
Origins = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", help="Origin whose web pages may send requests. Repeatable."),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse requests with unknown fields, instead of ignoring the fields."
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host", help="Host name that requests may use for this server. Repeatable."
    ),
]
TrustedProxies = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-proxy",
        help="Address or network of a proxy whose X-Forwarded-For is trusted. Repeatable.",
    ),
]
PrepareSeconds = Annotated[
    float,
    typer.Option(
        "--prepare-timeout",
        help="Maximum seconds to tokenize a prompt, or to compile a grammar; then 408.",
    ),
]
RootPath = Annotated[
    str,
    typer.Option(
        help="Path under which a proxy exposes the server, such as /models.", show_default="none"
    ),
]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", help="Log as text, or as one JSON object per line.")
]
LogPrompts = Annotated[
    bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")
]
EngineChoice = Annotated[
    Literal["blockdraft", "vllm", "sglang"],
    typer.Option(
        help="Engine that runs the models: blockdraft, or another one, started with the same two "
        "models."
    ),
]
_OTHER = "Another engine"
Python = Annotated[
    str | None,
    typer.Option(
        "--engine-python",
        envvar=PYTHON_VARIABLE,
        help="Python interpreter of the environment in which that engine is installed.",
        show_default="our own",
        rich_help_panel=_OTHER,
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel",
        "--tensor-parallel-size",
        help="Tensor parallelism: devices that share each layer.",
        rich_help_panel=_OTHER,
    ),
]
PipelineParallel = Annotated[
    int | None,
    typer.Option(
        "--pipeline-parallel",
        "--pipeline-parallel-size",
        help="Pipeline parallelism: groups of layers, each on its own device.",
        rich_help_panel=_OTHER,
    ),
]
DataParallel = Annotated[
    int | None,
    typer.Option(
        "--data-parallel",
        "--data-parallel-size",
        help="Data parallelism: copies of the model.",
        rich_help_panel=_OTHER,
    ),
]
Extra = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- OPTIONS]", help="Options of vLLM or SGLang, with --engine.", show_default=False
    ),
]


@options.models()
def serve(
    ctx: typer.Context,
    host: Host = _SERVE.host,
    port: Port = _SERVE.port,
    model_name: ModelName = _SERVE.model_name,
    api_key_file: KeyFile = None,
    api_key: Key = None,
    max_waiting: MaxWaiting = _SERVE.max_waiting,
    request_seconds: RequestSeconds = _SERVE.request_seconds,
    drain_seconds: DrainSeconds = _SERVE.drain_seconds,
    max_body: MaxBody = _SERVE.max_body / _MIB,
    cors_origins: Origins = None,
    strict: Strict = _SERVE.strict,
    allowed_hosts: AllowedHosts = None,
    trusted_proxies: TrustedProxies = None,
    prepare_seconds: PrepareSeconds = _SERVE.prepare_seconds,
    root_path: RootPath = _SERVE.root_path,
    log_prompts: LogPrompts = _SERVE.log_prompts,
    log_format: LogFormatOption = _SERVE.log_format,
    engine: EngineChoice = OWN_ENGINE,
    python: Python = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    data_parallel: DataParallel = None,
    extra: Extra = None,
) -> None:
    """Serve a target with its drafter over HTTP, with OpenAI's and Anthropic's APIs."""
    log_as_server(log_format)
    # The signature declares the options; those of the configs are read by their names.
    config = _serve_config(ctx.params, _read_keys(ctx, api_key_file, api_key))
    llm_config = options.llm_config(ctx.params)
    given = _given(ctx)
    # Other servers take the model so: `vllm serve MODEL`.
    if extra and not extra[0].startswith("-"):
        raise ConfigError(
            f"{extra[0]} belongs to no option; if it is a model, give --target {extra[0]}"
        )
    if engine == OWN_ENGINE:
        _refuse_engine_options(ctx.params, given)
        _serve_ourselves(llm_config, config)
    else:
        _serve_with(llm_config, config, _engine_config(ctx.params), given)


def _serve_ourselves(llm_config: LLMConfig, config: ServeConfig) -> None:
    try:
        from blockdraft.server import run  # needs packages that only a server needs
    except ModuleNotFoundError as error:
        if error.name not in _SERVER_PACKAGES:
            raise
        raise ConfigError(
            f"the server needs the package {error.name}; run pip install '.[serve]' in a checkout "
            "of blockdraft"
        ) from error
    with bind(config) as sock:
        if not run.serve(options.load_llm(llm_config), config, sock):
            raise typer.Exit(NO)  # requests were cut off


def _serve_with(
    llm_config: LLMConfig, config: ServeConfig, engine: EngineConfig, given: Mapping[str, str]
) -> None:
    from blockdraft.server.engines.run import serve_with
    from blockdraft.server.engines.settings import EngineSettings

    if status := serve_with(EngineSettings(llm_config, config, engine, given)):
        raise typer.Exit(status)


def _given(ctx: typer.Context) -> dict[str, str]:
    """How the options that stand on the command line are spelled, by the names of their values."""
    names = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    return {
        name: spelling
        for name, spelling in names.items()
        if name is not None and options.is_given(ctx, name)
    }


def _refuse_engine_options(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    for field in fields(EngineConfig):
        if field.name != "engine" and field.name in given:
            what = values["extra"][0] if field.name == "extra" else given[field.name]
            raise ConfigError(f"{what} is for another engine; add --engine vllm or leave it out")


def _engine_config(values: Mapping[str, Any]) -> EngineConfig:
    chosen = {f.name: values[f.name] for f in fields(EngineConfig)}
    chosen["extra"] = tuple(chosen["extra"] or ())
    return EngineConfig(**{name: value for name, value in chosen.items() if value is not None})


def _serve_config(values: Mapping[str, Any], keys: tuple[str, ...]) -> ServeConfig:
    chosen = {f.name: values[f.name] for f in fields(ServeConfig) if f.name in values}
    if not 0 < values["max_body"] < math.inf:
        raise ConfigError(f"--max-body is {values['max_body']:g}; give a number of MiB above 0")
    chosen["max_body"] = max(1, int(values["max_body"] * _MIB))
    for name in ("cors_origins", "allowed_hosts", "trusted_proxies"):
        chosen[name] = tuple(values[name] or ())
    return ServeConfig(**chosen, api_keys=keys)


def _read_keys(ctx: typer.Context, path: Path | None, key: str | None) -> tuple[str, ...]:
    """The keys of a file, one a line, then the one of the environment: the log numbers them."""
    if options.is_given(ctx, "api_key"):
        raise ConfigError(
            f"everybody on this machine can see an API key on the command line; use {KEY_VARIABLE} "
            "or --api-key-file"
        )
    keys = []
    if path is not None:
        try:
            # Comments may be in any language; the keys themselves are checked by ServeConfig.
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(
                f"cannot read the API keys of {path}: {reason}; give a file with one per line"
            ) from error
        found = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"{path} holds no API key; write one per line")
        keys += found
    if key is not None:
        keys.append(key.strip())
    elif KEY_VARIABLE in os.environ:  # typer takes an empty one for none
        raise ConfigError(f"{KEY_VARIABLE} is empty; set it to a key, or unset it")
    return tuple(keys)

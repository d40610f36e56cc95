"""What is known of another engine: its command line, and what it cannot do."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockdraft.core.errors import ConfigError
from blockdraft.server.engines.config import EngineConfig, EngineName
from blockdraft.server.engines.settings import EngineSettings, PairFolders

_IS_INSTALLED = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
# Any folder of that name is found too, but has no origin.
sys.exit(spec is None or spec.origin is None)
"""
_ANSWER_SECONDS = 60
_KEYS = frozenset({"--api-key", "--admin-api-key"})


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run.

    environment: what is set for it beside our own environment; may hold secrets.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Engine:
    """How to speak to an engine.

    entry: arguments of its interpreter that start its server.
    arguments: what follows them.
    environment: variables that carry what must not stand in a command line.
    refused: options of ours that it cannot honor, by the configs' fields, and what to do instead.
    """

    name: EngineName
    module: str
    entry: tuple[str, ...]
    arguments: Callable[[EngineSettings, PairFolders], list[str]]
    environment: Callable[[EngineSettings], dict[str, str]]
    refused: Mapping[str, str]

    def check(self, settings: EngineSettings) -> None:
        """Refuse what the engine cannot honor, and an engine that is not there.

        Raises:
            ConfigError: the first such option, or where the engine was looked for.
        """
        for field, remedy in self.refused.items():
            if field in settings.given:
                raise ConfigError(
                    f"{settings.given[field]} cannot be honored by {self.name}: {remedy}"
                )
        if settings.llm.exact and "exact" in settings.given:
            raise ConfigError(
                f"{settings.given['exact']} on cannot be honored by {self.name}: it does not "
                "guarantee that drafted text equals plain text; leave it out"
            )
        if settings.llm.dtype == "float64":
            raise ConfigError(f"dtype is float64; {self.name} has auto, bfloat16 and float32")
        self._check_installed(settings.engine)

    def command(self, settings: EngineSettings, pair: PairFolders) -> Command:
        """The program that serves a pair.

        Raises:
            ConfigError: an option that was handed on stands in the command already.
        """
        arguments = self.arguments(settings, pair)
        _check_extra(arguments, settings.engine.extra)
        line = (settings.engine.python, *self.entry, *arguments, *settings.engine.extra)
        return Command(line, self.environment(settings))

    def _check_installed(self, config: EngineConfig) -> None:
        command = [config.python, "-c", _IS_INSTALLED, self.module]
        try:
            found = subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = getattr(error, "strerror", None) or "it does not answer"
            raise ConfigError(
                f"cannot run the interpreter {config.python}: {reason}; give that of the "
                f"environment that holds {self.name}"
            ) from error
        if found:
            raise ConfigError(
                f"{self.name} is not installed for {config.python}; install it in an environment "
                "of its own and give its interpreter with --engine-python or "
                "BLOCKDRAFT_ENGINE_PYTHON"
            )


def common_arguments(settings: EngineSettings) -> list[str]:
    """Options that all engines spell alike."""
    serve, engine = settings.serve, settings.engine
    return [
        *("--served-model-name", serve.model_name or settings.llm.target),
        *("--host", serve.host),
        *("--port", str(serve.port)),
        *("--dtype", settings.llm.dtype),
        *("--tensor-parallel-size", str(engine.tensor_parallel)),
        *("--pipeline-parallel-size", str(engine.pipeline_parallel)),
        *("--data-parallel-size", str(engine.data_parallel)),
    ]


def _check_extra(arguments: Sequence[str], extra: Sequence[str]) -> None:
    """Refuse an option twice: the engine would take the last, and we wait at the first's address.

    An API key, too: other users of the machine could read it.

    Engines read dashes and underscores alike.
    """
    ours = {argument for argument in arguments if argument.startswith("--")}
    for argument in extra:
        option = argument.split("=")[0].replace("_", "-")
        if option in _KEYS:
            raise ConfigError(
                f"{option} on the command line can be read by everybody, and would be in the log; "
                "set BLOCKDRAFT_API_KEY, or use a key file if the engine takes one"
            )
        if option in ours:
            raise ConfigError(f"{option} is already in the engine's command; leave it out")

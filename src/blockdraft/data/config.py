"""What to answer, and how, in one frozen dataclass."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.core.config import DEFAULT_TARGET, Thinking
from blockdraft.core.errors import ConfigError
from blockdraft.core.settings import check_kinds, require, to_dict
from blockdraft.data.endpoint_answers import check_url


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of `blockdraft data`.

    `blockdraft train --keys` prints what is said here:
        prompts: JSONL files of prompts or chats, gzipped or not.
        datasets: data sets of the Hugging Face hub, or local folders: "name", "name:split" or
            "name:config:split"; "name@revision" is a branch, tag or commit.
        num_self_written: number of prompts that the target writes itself (the Magpie method).
        limit: most prompts to answer, drawn at random. None answers all.
        temperatures: each prompt is answered at each of these temperatures.
        mix_temperatures: answer each prompt at one of the temperatures instead, drawn at random. A
            temperature that is listed twice is drawn twice as often.
        samples: answers to each prompt at each temperature. At temperature 0 they would all be
            equal, so there is one.
        max_tokens: most tokens of an answer.
        slots: answers generated concurrently.
        endpoint: URL of a server that writes the answers in place of blockdraft's own engine, such
            as http://localhost:8000/v1. It must serve the target with OpenAI's API and return token
            ids.
        endpoint_model: the target's name on that server. None is the only model there.
        max_prompt_tokens: longer prompts are left out. In a chat, earlier turns count too.
        max_turns: most user turns of a chat that are answered.
        thinking: on and off set `enable_thinking` in chat templates that know it; template leaves
            the template's default.
        exclude: files of prompts, such as benchmarks. Prompts that overlap one of these, or of the
            bundled benchmark, are left out.
        drop_truncated: leave out answers that `max_tokens` cut off.
        rows_per_shard: answers in each output file.
        seed: seed of the order of prompts and of sampling.

    Raises:
        ConfigError: a value is of the wrong kind or out of its range.
    """

    output: Path
    target: str = DEFAULT_TARGET
    prompts: tuple[Path, ...] = ()
    datasets: tuple[str, ...] = ()
    num_self_written: int = 0
    limit: int | None = None
    temperatures: tuple[float, ...] = (0.7,)
    mix_temperatures: bool = False
    samples: int = 1
    max_tokens: int = 256
    slots: int = 96
    endpoint: str | None = None
    endpoint_model: str | None = None
    max_prompt_tokens: int = 192
    max_turns: int = 4
    thinking: Thinking = "template"
    exclude: tuple[Path, ...] = ()
    drop_truncated: bool = False
    rows_per_shard: int = 4096
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_kinds(self)
        if not self.prompts and not self.datasets and not self.num_self_written:
            raise ConfigError(
                "there is nothing to answer; give prompts (--prompts), data sets (--dataset) or a "
                "number of prompts that the target writes itself (--self-written)"
            )
        for name in (
            *("samples", "max_tokens", "slots", "max_prompt_tokens", "max_turns"),
            *("rows_per_shard", "limit"),
        ):
            value = getattr(self, name)
            require(self, name, value is None or value >= 1, "at least 1")
        for name in ("num_self_written", "seed"):
            require(self, name, getattr(self, name) >= 0, "at least 0")
        for value in self.temperatures:
            if value < 0:
                raise ConfigError(f"temperature is {value}; give a finite number of at least 0")
        if self.endpoint is not None:
            check_url(self.endpoint)

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON values."""
        return to_dict(self)

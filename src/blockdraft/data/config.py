"""What to answer, and how, in one frozen dataclass."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.core.config import DEFAULT_TARGET, Thinking
from blockdraft.core.errors import ConfigError
from blockdraft.core.settings import check_kinds, require, to_dict


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of `blockdraft data`.

    Every prompt gets `samples` answers at each temperature; greedy ones would all be equal, so
    there is one. Attributes that need a word:
        prompts: (gzipped) JSONL files, see `data.prompts`.
        datasets: data sets of the Hugging Face hub or local folders: "name", "name:split" or
            "name:config:split".
        num_self_written: prompts that the target writes itself.
        mix_temperatures: answer each prompt at one of the temperatures, drawn for it, instead of at
            all of them; a temperature that is repeated is drawn more often.
        limit: most prompts to answer, drawn at random.
        max_prompt_tokens: longer prompts are skipped, conversation so far included.
        max_turns: user turns of a conversation that are answered.
        thinking: what the template is told, where it knows `enable_thinking`.
        exclude: files of prompts, such as benchmarks, that no prompt may overlap.
        drop_truncated: leave answers that reached `max_tokens` out of the shards.
        rows_per_shard: answers of one shard file.

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
                "there is nothing to answer; give prompts, datasets or self-written prompts"
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

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON values."""
        return to_dict(self)

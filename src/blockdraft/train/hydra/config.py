"""How a Hydra head is trained, in one frozen dataclass."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.core.config import DEFAULT_TARGET
from blockdraft.core.errors import ConfigError
from blockdraft.core.settings import check_kinds, require, to_dict


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Settings of `blockdraft train-head`.

    drafter: folder that the head is written into. answers: files or folders of the target's
    answers. states: folder in which the target's states are kept; None has the target read the
    answers in each step. limit: answers to take, drawn at random; None takes all. step_tokens: of
    the texts of a step, padding included; None is 1,024 on a CPU and 32,768 elsewhere. from_head:
    begin with the head that the drafter has.

    layers: of the target, whose outputs the head reads; empty chooses at most three of the
    drafter's. num_tokens: that it guesses, the most frequent ones. inner_size: of its gated layer;
    None is twice the target's hidden size. A head to begin with has these three already.

    Raises:
        ConfigError: a value is of the wrong kind or out of its range.
    """

    drafter: Path
    answers: tuple[Path, ...]
    target: str = DEFAULT_TARGET
    states: Path | None = None
    limit: int | None = None
    minutes: float = 60.0
    lr: float = 2e-3
    step_tokens: int | None = None
    from_head: bool = False
    layers: tuple[int, ...] = ()
    num_tokens: int | None = None
    inner_size: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("minutes", "lr"):
            require(self, name, getattr(self, name) > 0, "above 0")
        for name in ("limit", "step_tokens", "num_tokens", "inner_size"):
            value = getattr(self, name)
            require(self, name, value is None or value >= 1, "1 or more")
        require(self, "layers", all(layer >= 0 for layer in self.layers), "0 or more each")
        require(self, "layers", len(set(self.layers)) == len(self.layers), "without repetitions")
        if self.states is not None:
            others = {path.resolve() for path in (self.drafter, *self.answers)}
            good = self.states.resolve() not in others
            require(self, "states", good, "a folder of its own, not the drafter's or the answers'")
        for name, value in self.to_dict().items():
            if self.from_head and value and name in ("layers", "num_tokens", "inner_size"):
                raise ConfigError(
                    f"{name} is {value}, and with from_head the head keeps its own; leave one of "
                    "the two out"
                )

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON values."""
        return to_dict(self)

"""What a training of a Hydra head leaves behind when it is interrupted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdraft.core.errors import ConfigError
from blockdraft.train.run_state import read_state

HEAD_STATE = "hydra_training.pt"
"""In the drafter's folder, until the head is finished."""

BEGIN_ANEW = "delete it to start over"
"""For a state that is of no use."""

_STATE_KEYS = {"learner", "before", "seconds"}
_WORDS = {
    "target": "another target",
    "answers": "other answers",
    "shape": "a head of another shape",
    "tokens": "a head for other tokens",
    "lr": "another lr (now {now}, before {there})",
    "step_tokens": "other step_tokens (now {now}, before {there})",
}
"""What may not change between the parts of a training; the minutes may."""


def load_head_state(path: Path, trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that an earlier part left; None if there is none.

    trained: what is trained now, under the names of `_WORDS`.

    Raises:
        ConfigError: it is damaged, or of another training.
    """
    state = read_state(path, _STATE_KEYS | _WORDS.keys(), BEGIN_ANEW)
    if state is None:
        return None
    remedy = f"give the same settings and answers, or {BEGIN_ANEW}"
    for name, what in _WORDS.items():
        if state[name] != trained[name]:
            difference = what.format(now=trained[name], there=state[name])
            raise ConfigError(f"{path} is from a training with {difference}; {remedy}")
    return state


def how_to_go_on(drafter: Path, states: Path | None) -> str:
    """What to say of a training that was broken off, one line. states: the folder of them."""
    if (drafter / HEAD_STATE).exists():
        return "interrupted; the same command resumes from the last saved state"
    kept = "" if states is None else f"; what the target has read is kept in {states}"
    return f"interrupted before a state was saved; the same command starts over{kept}"

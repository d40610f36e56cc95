"""What a training of a Hydra head leaves behind when it is interrupted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from blockdraft.core.errors import ConfigError

HEAD_STATE = "hydra_training.pt"
"""In the drafter's folder, until the head is finished."""

_STATE_KEYS = {"learner", "before", "seconds"}
_WORDS = {
    "target": "another target",
    "answers": "other answers",
    "shape": "a head of another shape",
    "tokens": "a head that guesses other tokens",
    "lr": "another lr (now {now}, there {there})",
    "step_tokens": "other step_tokens (now {now}, there {there})",
}
"""What may not change between the parts of a training; the minutes may."""


def load_head_state(path: Path, trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that an earlier part left; None if there is none.

    trained: what is trained now, under the names of `_WORDS`.

    Raises:
        ConfigError: it is damaged, or of another training.
    """
    if not path.exists():
        return None
    remedy = "give the same settings and answers, or delete it to begin anew"
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        missing = (_STATE_KEYS | _WORDS.keys()) - state.keys()
    # torch raises any type for a damaged file, and advises to trust it.
    except Exception as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}); delete it to begin anew"
        ) from error
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}; delete it to begin anew")
    for name, what in _WORDS.items():
        if state[name] != trained[name]:
            said = what.format(now=trained[name], there=state[name])
            raise ConfigError(f"{path} is of a training with {said}; {remedy}")
    return state


def how_to_go_on(drafter: Path, states: Path | None) -> str:
    """What to say of a training that was broken off, one line. states: the folder of them."""
    if (drafter / HEAD_STATE).exists():
        return "interrupted; the same command goes on from the last saved state"
    kept = "" if states is None else f"; what the target has read is kept in {states}"
    return f"interrupted before a state was saved; the same command trains from the beginning{kept}"

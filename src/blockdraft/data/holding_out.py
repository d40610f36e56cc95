"""Which answers are not trained on: told from their ids and prompts alone."""

import hashlib
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VARIANT = re.compile(r"(.+?)(?:\+[a-z][a-z0-9]*)+", re.DOTALL)


def base_name(name: str) -> str:
    """Without what says which variant of a prompt it is: "id+boxed", "id+turn2".

    A variant is a word of small letters and digits at the end. Other ids may hold a "+" of their
    own, such as those that are telephone numbers: cut there, all of them would be one prompt.
    """
    found = _VARIANT.fullmatch(name)
    return found[1] if found else name


def draw_of(name: str) -> int:
    """A number from 0 to 2^64 that a name and its variants share."""
    return int.from_bytes(hashlib.sha256(base_name(name).encode()).digest()[:8], "big")


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether the answers to a prompt are not trained on; so it is for its variants."""
    return draw_of(prompt_id) < share * 2**64


def are_held_out(draws: NDArray[Any], share: float) -> NDArray[Any]:
    """The same of many, by what `draw_of` gives."""
    return np.asarray(draws < np.uint64(math.ceil(share * 2**64)))


class Together:
    """Which texts must not be parted: of one name but for its variant, or of one prompt.

    Directly or by others. The first name decides, so that texts that are added behind others do not
    move these. Texts without a prompt have none in common.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._owners: dict[bytes, int] = {}
        self._earlier: list[int] = []

    def add(self, name: str, prompt: bytes) -> int:
        """Add a text; returns the number of its name."""
        place = self._places.setdefault(base_name(name), len(self._places))
        if place == len(self._earlier):
            self._earlier.append(place)
        if prompt:
            key = hashlib.sha256(prompt).digest()[:16]
            one, two = self._first(place), self._first(self._owners.setdefault(key, place))
            self._earlier[max(one, two)] = min(one, two)
        return place

    def _first(self, place: int) -> int:
        while self._earlier[place] != place:
            place = self._earlier[place]
        return place

    def draws(self) -> NDArray[Any]:
        """Of each name the draw of the first name that it goes with."""
        of_names = np.array([draw_of(name) for name in self._places], dtype=np.uint64)
        firsts = [self._first(place) for place in range(len(self._earlier))]
        return np.asarray(of_names[np.array(firsts, dtype=np.int64)])

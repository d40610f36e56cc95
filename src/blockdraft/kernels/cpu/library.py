"""The compiled kernels as functions of C, loaded once a process."""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from blockdraft.kernels.cpu.build import build

SWITCH = "BLOCKDRAFT_KERNELS"
"""Environment variable: "off" leaves everything to torch."""

_ADDRESS, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double

ARGUMENTS: dict[str, list[type]] = {
    "norm": [_FLAG, *[_ADDRESS] * 5, *[_COUNT] * 2, _FLOAT, _FLAG, _FLAG],
    "rotate": [_FLAG, _ADDRESS, _COUNT, *[_ADDRESS] * 4, *[_COUNT] * 4, _FLOAT, _FLAG, _FLAG],
    "gate": [_FLAG, *[_ADDRESS] * 2, *[_COUNT] * 2, _FLAG],
    "attend": [_FLAG, *[_ADDRESS] * 3, *[_ADDRESS, _COUNT, _COUNT] * 3, _ADDRESS],
    "product_step": [_FLAG],
    "product_panel": [],
    "int8_step": [],
    "group_panel": [],
    "reads_narrow": [],
    "uses_matrices": [],
    "multiply": [_FLAG, *[_ADDRESS] * 3, _COUNT, _FLAG],
    "layer": [_FLAG, *[_ADDRESS] * 8],
    "layers": [
        *[_FLAG, _COUNT, *[_ADDRESS] * 4, _COUNT],
        *[*[_ADDRESS] * 3, _COUNT, *[_ADDRESS] * 4],
        *[_ADDRESS, _ADDRESS, _COUNT, _ADDRESS],
    ],
    "recurrence": [_FLAG, _ADDRESS, _FLAG],
    "recurrence_key_dim": [],
    "recurrence_taps": [],
    "recurrence_panel": [],
    "largest": [_FLAG, *[_ADDRESS] * 4, *[_COUNT] * 3],
    "first_largest": [_FLAG, *[_ADDRESS] * 2, *[_COUNT] * 2],
    "sampled": [_FLAG, _ADDRESS, _COUNT, _DOUBLE, *[_ADDRESS] * 3, _COUNT, *[_DOUBLE] * 2],
    "widen": [*[_ADDRESS] * 2, _COUNT],
    "store_context": [_FLAG, *[_ADDRESS] * 5, *[_COUNT] * 2, _ADDRESS, _FLOAT, *[_ADDRESS] * 2],
    "words_at": [*[_ADDRESS] * 3, _COUNT, _ADDRESS],
    "words_below": [*[_ADDRESS] * 3, _COUNT, _ADDRESS, _COUNT, ctypes.c_uint64, _COUNT],
    "text_new": [],
    "text_delete": [_ADDRESS],
    "ahead_new": [_ADDRESS],
    "ahead_delete": [_ADDRESS],
    "search_ahead": [*[_ADDRESS] * 2, _COUNT],
    "take_ahead": [_ADDRESS],
    "end_ahead": [],
    "ngrams": [*[_ADDRESS] * 2, _COUNT, _COUNT],
}
"""Of each function, without its prefix, as the sources declare it."""

REFUSING = ("attend", "layer", "layers", "store_context")
"""They return a `Refusal` of checks.h."""

RESULTS: dict[str, type] = {
    **dict.fromkeys(REFUSING, _FLAG),
    **dict.fromkeys(("reads_narrow", "uses_matrices", "take_ahead"), _FLAG),
    **dict.fromkeys(("product_step", "product_panel", "int8_step", "group_panel"), _COUNT),
    **dict.fromkeys(("recurrence_key_dim", "recurrence_taps", "recurrence_panel"), _COUNT),
    "sampled": _COUNT,
    **dict.fromkeys(("text_new", "ahead_new"), _ADDRESS),
}
"""Of the functions that return something."""

REFUSALS = {
    1: "the head size is not a multiple of 16, or is over 512",
    2: "spans do not follow each other from row 0 on, or go beyond the rows of the forward",
    3: "a slot lies outside of the buffer of keys and values, or none are given to a whole layer",
    4: "a row would see keys outside of its pages or of the buffer",
    5: "a page lies outside of the table or of the buffer of keys and values",
    6: "there are no heads or no threads",
    7: "a key of a path lies outside of the table or of the buffer of keys and values",
}
_MEMORY = 8
"""Of `Refusal` in checks.h."""

logger = logging.getLogger(__name__)


class Library:
    """The functions of the sources, without their prefix: `library.attend(...)`.

    Those that refuse their arguments raise RuntimeError, or MemoryError if they need more of it.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError if there is no library at `path`."""
        loaded = ctypes.CDLL(path)
        for name, arguments in ARGUMENTS.items():
            function = loaded[f"blockdraft_{name}"]
            function.argtypes = arguments
            function.restype = RESULTS.get(name)
            if name in REFUSING:
                function.errcheck = _raise_refusal  # type: ignore[assignment]  # typed for any result
            setattr(self, name, function)
        # Asked at once: the answer may be another one when there are more threads.
        self.has_matrices = bool(self.uses_matrices())
        """Whether products in bfloat16, those of attention too, run in matrix registers."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


@lru_cache
def library() -> Library | None:
    """The kernels, or None where they are off or cannot be had; the log says why, once."""
    if os.environ.get(SWITCH, "").lower() == "off":
        logger.info("%s=off: torch's operations instead of kernels", SWITCH)
        return None
    try:
        return _loaded()
    # Whatever keeps a machine from compiling, from a home folder that is missing to a compiler that
    # is another program: models run without kernels.
    except Exception as reason:
        logger.warning("no kernels for this CPU, steps take longer: %s", reason)
        return None


def _loaded() -> Library:
    path = build()
    try:
        return Library(str(path))
    except OSError as reason:  # no library, or half of one
        logger.warning("%s does not load and is compiled again: %s", path, reason)
        path.unlink(missing_ok=True)
        return Library(str(build()))


def _raise_refusal(refusal: int, *_: object) -> None:
    if refusal == _MEMORY:
        raise MemoryError("a kernel: out of memory")
    if refusal:
        raise RuntimeError(f"a kernel refused its arguments: {REFUSALS[refusal]}")

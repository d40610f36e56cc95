"""Whether cards compute with the Triton kernels.

They must be there, pass their own check on the card, and every model must pass the check of its
load with them. Decided once for each precision and card: a model that runs never changes its
kernels, and what holds on one card of a machine says nothing of another.
"""

import logging
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.kernels.interface import Backend

SWITCH = "BLOCKDRAFT_TRITON"
"""Environment variable: "off" leaves cards to torch's operations."""

_REMEDY = (
    "Triton needs a C compiler such as gcc, Python's headers (python3-dev) and a folder to write "
    "to (TRITON_CACHE_DIR), and there are kernels for bfloat16 and float32"
)
"""Whatever the fault is, as Triton's errors name none."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Choice:
    """backend: None if the kernels are not used, for the `reason`; `remedy` says what to do."""

    backend: Backend | None
    reason: str = ""
    remedy: str = ""
    is_relied_on: bool = False


_choices: dict[tuple[torch.dtype, int], _Choice] = {}
"""By precision and the number of the card."""


def triton_backend(dtype: torch.dtype, device: torch.device | str) -> Backend | None:
    """The backend of a card, if it passes its check there; else None, and the log says why."""
    return _choice(dtype, device).backend


def why_no_triton(dtype: torch.dtype, device: torch.device | str) -> str:
    """The reason why the kernels are not used; empty if they are."""
    return _choice(dtype, device).reason


def remedy(dtype: torch.dtype, device: torch.device | str) -> str:
    """What to do about kernels that are not used; empty if they are."""
    return _choice(dtype, device).remedy


def kernels_in_use(dtype: torch.dtype, device: torch.device | str) -> str | None:
    """Which kernels compute, in words: other tiles have other bits on some cards. None for none."""
    backend = _choice(dtype, device).backend
    if backend is None:
        return None
    tiles = "tiles by rows" if getattr(backend, "has_many_tiles", False) else "one tile"
    try:
        return f"{version('triton')}, {tiles}"
    except PackageNotFoundError:  # a build under another name
        return tiles


def rely_on(dtype: torch.dtype, device: torch.device | str | None) -> None:
    """A model has passed the check of its load: nothing may change under it any more.

    device: of the model; None stands for all cards.
    """
    for own in _chosen(dtype, device):
        _choices[own].is_relied_on = True


def leave_out(dtype: torch.dtype, device: torch.device | str | None, reason: str) -> bool:
    """Use the kernels no more, as a model failed with them; False if that would change nothing.

    Or if another model relies on them, whose values would change. device: as in `rely_on`.
    """
    changed = [
        own
        for own in _chosen(dtype, device)
        if _choices[own].backend is not None and not _choices[own].is_relied_on
    ]
    if _is_off():
        return False
    for own in changed:
        _choices[own] = _Choice(None, reason, "see the log; --dtype float32 may pass its check")
    return bool(changed)


def _chosen(dtype: torch.dtype, device: torch.device | str | None) -> list[tuple[torch.dtype, int]]:
    """What was decided for a precision on a card, or on all of them."""
    cards = {card for of, card in _choices if of == dtype}
    return [(dtype, card) for card in cards if device is None or card == _card(device)]


def _choice(dtype: torch.dtype, device: torch.device | str) -> _Choice:
    if _is_off():
        return _Choice(None, f"{SWITCH}=off", f"unset {SWITCH}")
    own = dtype, _card(device)
    if own not in _choices:
        _choices[own] = _tried(dtype, device)
    return _choices[own]


def _card(device: torch.device | str) -> int:
    """The number of a card; without one the current card of this thread is meant."""
    index: int | None = torch.device(device).index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return index


def _is_off() -> bool:
    return os.environ.get(SWITCH, "").lower() == "off"


def _tried(dtype: torch.dtype, device: torch.device | str) -> _Choice:
    backend: Backend | None = None
    fault, remedy = "triton is not installed", "install it; a torch for CUDA brings it along"
    if find_spec("triton") is not None:
        # Whatever keeps Triton from compiling or a card from running it: models run without.
        try:
            backend, fault = _checked(dtype, device)
        except Exception as error:
            if is_out_of_memory(error):  # no fault of the kernels; nothing is decided yet
                raise
            fault = _told(error)
        remedy = _REMEDY
    if not fault:
        return _Choice(backend)
    logger.warning("no Triton kernels on %s: %s; %s", device, fault, remedy)
    return _Choice(backend, fault, remedy)


def _checked(dtype: torch.dtype, device: torch.device | str) -> tuple[Backend | None, str]:
    """A backend that passes its check, or None and what the last one failed by."""
    # Not before: importing it takes a while, and machines without a card do without.
    from blockdraft.kernels.cuda.backend import TritonBackend
    from blockdraft.kernels.cuda.check import first_fault

    if dtype not in TritonBackend.known:
        return None, f"there are none for {dtype}"
    backend = TritonBackend(dtype, device)
    if backend.has_many_tiles:
        try:
            fault = first_fault(backend, dtype, device)
        except Exception as error:  # no room for a large tile, for instance
            if is_out_of_memory(error):
                raise
            fault = _told(error)
        if fault is None:
            return backend, ""
        logger.warning("one tile for any number of rows on %s: %s", device, fault)
        backend = TritonBackend(dtype, device, one_tile=True)
    fault = first_fault(backend, dtype, device)
    return (backend, "") if fault is None else (None, fault)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]

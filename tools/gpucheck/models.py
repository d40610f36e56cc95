"""Target and drafter: found, or made of the package file, before anybody's time is counted."""

from pathlib import Path

from blockdraft.core.config import LLMConfig
from blockdraft.hub.resolve import resolve_drafter, resolve_model
from blockdraft.kernels.backends import kernels_state
from blockdraft.models.fingerprint import weights_sha256
from gpucheck.notes import Notes
from gpucheck.settings import Settings


def run(settings: Settings, notes: Notes) -> None:
    """Note what they are; a missing one ends this part with its remedy."""
    # Where they are on, this compiles them.
    are_used, reason, _ = kernels_state()
    notes.note("kernels for the CPU", value="compiled" if are_used else reason)
    target = resolve_model(settings.target)
    notes.note("target", value=_described(target))
    config = LLMConfig(target=settings.target, drafter=settings.drafter)
    drafter = resolve_drafter(config, target)
    if drafter is not None:
        notes.note("drafter", value=_described(drafter))


def _described(folder: Path) -> dict[str, object]:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"megabytes": round(weights / 1e6, 1), "sha256": weights_sha256(folder)}

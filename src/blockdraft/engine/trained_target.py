"""Which target a published drafter was made for, and whether it drafts for another one."""

import logging
from pathlib import Path

from blockdraft.hub.catalog import CATALOG, display_name, entry_of
from blockdraft.hub.resolve import hub_id
from blockdraft.models.draft.checkpoint import read_config

logger = logging.getLogger(__name__)


def trained_targets(drafter: str | None, folder: Path) -> set[str]:
    """Names of the targets that a drafter was made for, by our list or its config; may be empty."""
    if (own := entry_of(drafter, folder)) is not None:
        return {entry.name for entry in CATALOG.values() if entry.drafter == own.name}
    told = read_config(folder).get("speculators_config")
    verifier = told.get("verifier") if isinstance(told, dict) else None
    path = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return {path} if isinstance(path, str) and hub_id(path) else set()


def warn_of_other_target(target_folder: Path, drafter: str | None, folder: Path) -> None:
    """Say so if a drafter was made for another target of a known name.

    Sizes are compared elsewhere; another training of the same sizes shows in acceptance only.
    """
    target = display_name(str(target_folder))
    wanted = trained_targets(drafter, folder)
    is_named = target != str(target_folder)
    if is_named and wanted and target.casefold() not in {name.casefold() for name in wanted}:
        logger.warning(
            "the drafter was made for %s, and the target is %s: fewer draft tokens may be accepted",
            " or ".join(sorted(wanted)),
            target,
        )

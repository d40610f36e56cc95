"""Which drafters other engines can draft with."""

from collections.abc import Collection
from pathlib import Path

from blockdraft.core.errors import ModelError
from blockdraft.hub.folder import INDEX_NAME
from blockdraft.models.draft.checkpoint import read_config, unlisted_files
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.config_reader import architecture_of, architectures_of
from blockdraft.models.draft.speculators_layout import MARK
from blockdraft.speculate.drafters.kinds import kind_of


def config_for_other_engine(
    folder: Path, kinds: Collection[str], *, needs_index: bool
) -> DraftConfig:
    """The config of a drafter that another engine is to draft with.

    Args:
        folder: of its checkpoint.
        kinds: those that the engine can draft with, by the names of `kind_of`.
        needs_index: it takes all files of tensors in the folder for weights, unless an index says
            which are.

    Raises:
        ModelError: the engine cannot draft with it; says why.
    """
    raw = read_config(folder)
    remedy = "name another drafter with --drafter"
    if (kind := kind_of(raw)) not in kinds:
        raise ModelError(
            f"{folder} is a drafter of the kind {kind}, and this engine runs only "
            f"{' or '.join(kinds)}; {remedy}"
        )
    config = DraftConfig.from_dict(raw)
    published = architecture_of(config.kind)
    if (named := architectures_of(raw)) and MARK not in raw and published not in named:
        raise ModelError(
            f"{folder}/config.json calls the drafter {named[0]}, and other engines know "
            f"{published}; write this into architectures there"
        )
    if config.drafts_from_anchor:
        raise ModelError(
            f"the anchor's slot of {folder} drafts too, which this engine may not know; {remedy}"
        )
    if needs_index and (others := unlisted_files(folder)):
        raise ModelError(
            f"{folder} holds {others[0]} beside the weights, and no {INDEX_NAME}, without which "
            "this engine may take it for a part of them; name a copy of the folder without such "
            "files with --drafter"
        )
    return config

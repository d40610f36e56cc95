"""What a user asks of another engine, before it is put into that engine's words."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.hub.resolve import resolve_drafter, resolve_model
from blockdraft.server.config import ServeConfig
from blockdraft.server.engines.config import EngineConfig

_KINDS = ("dflash", "dflash2")
"""Of drafters that other engines draft with by the options that they are given."""


@dataclass(frozen=True, slots=True)
class PairFolders:
    """Folders of a target and its drafter, and how many tokens to draft a step.

    num_draft_tokens: the anchor not counted, so one less than the slots of a block; 0 without a
    drafter.
    """

    target: Path
    drafter: Path | None
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All options of `blockdraft serve` that another engine has to honor.

    given: how the user spelled the options that were given on the command line, by the names of
    the configs' fields.
    """

    llm: LLMConfig
    serve: ServeConfig
    engine: EngineConfig
    given: Mapping[str, str]


def resolve_pair(settings: EngineSettings) -> PairFolders:
    """Find both models, and check that they belong together.

    Raises:
        ConfigError: there is nothing to draft with, a block is not as long, or the drafter is of a
            kind that other engines are not given.
        ModelError: a model cannot be found, or the drafter was made for another target.
    """
    target = resolve_model(settings.llm.target)
    drafter = resolve_drafter(settings.llm, target)
    wanted = settings.llm.num_draft_tokens
    if drafter is None:
        if wanted:
            raise ConfigError(f"num_draft_tokens is {wanted}, but there is no drafter; name one")
        return PairFolders(target, None, 0)
    trusts = settings.llm.trust_remote_code
    most = _block_size(target, drafter, trust_remote_code=trusts) - 1
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"num_draft_tokens is {wanted}; this drafter guesses at most {most} tokens a step, "
            "the slots of its block without the anchor"
        )
    return PairFolders(target, drafter, wanted or most)


def _block_size(target: Path, drafter: Path, *, trust_remote_code: bool) -> int:
    """Slots of a block, with the anchor, of a drafter that fits the target."""
    # They load torch, which the mistakes before this do not need.
    from blockdraft.models.draft.checkpoint import INDEX_NAME, read_config, unlisted_files
    from blockdraft.models.draft.config import DraftConfig
    from blockdraft.models.draft.config_reader import architecture_of, architectures_of
    from blockdraft.models.draft.own_ends import has_own_ends
    from blockdraft.models.draft.speculators_layout import MARK
    from blockdraft.models.target.loading import check_pair, target_without_weights
    from blockdraft.speculate.drafters.kinds import kind_of

    raw = read_config(drafter)
    remedy = "leave out engine, or give --drafter none"
    if (kind := kind_of(raw)) not in _KINDS:
        raise ConfigError(
            f"drafter is {drafter}, of the kind {kind}, and other engines get DFlash drafters only "
            f"from here; {remedy}"
        )
    config = DraftConfig.from_dict(raw)
    published = architecture_of(config.kind)
    if (named := architectures_of(raw)) and MARK not in raw and published not in named:
        raise ConfigError(
            f"drafter is {drafter}, whose config.json calls it {named[0]}, and other engines know "
            f"{published}; write this into architectures there"
        )
    if config.drafts_from_anchor:
        raise ConfigError(
            f"drafter is {drafter}, whose anchor's slot drafts too, and other engines may not "
            f"know that; {remedy}"
        )
    if others := unlisted_files(drafter):
        raise ConfigError(
            f"{drafter} holds {others[0]} beside the weights, and no {INDEX_NAME}, without which "
            "other engines take it for a part of them; copy the other files to a folder of their "
            "own, and give that as --drafter"
        )
    model = target_without_weights(target, trust_remote_code=trust_remote_code)
    check_pair(model, config, has_own_ends=bool(has_own_ends(drafter)))
    return config.block_size

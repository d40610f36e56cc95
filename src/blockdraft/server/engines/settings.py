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
        ConfigError: there is nothing to draft with, or a block is not as long.
        ModelError: a model cannot be found, the drafter was made for another target, or other
            engines cannot draft with it.
    """
    target = resolve_model(settings.llm.target)
    drafter = resolve_drafter(settings.llm, target)
    wanted = settings.llm.num_draft_tokens
    if drafter is None:
        if wanted:
            raise ConfigError(f"num_draft_tokens is {wanted}, but there is no drafter; name one")
        return PairFolders(target, None, 0)
    trusts = settings.llm.trust_remote_code
    most = _num_drafted(target, drafter, trust_remote_code=trusts)
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"num_draft_tokens is {wanted}; this drafter proposes at most {most} tokens per step, "
            "the slots of its block without the anchor"
        )
    return PairFolders(target, drafter, wanted or most)


def _num_drafted(target: Path, drafter: Path, *, trust_remote_code: bool) -> int:
    """Tokens that a drafter guesses at most in a step, after it was found to fit the target."""
    # They load torch, which the mistakes before this do not need.
    from blockdraft.models.draft.own_ends import has_own_ends
    from blockdraft.models.target.loading import check_pair, target_without_weights
    from blockdraft.speculate.drafters.other_engines import config_for_other_engine

    config = config_for_other_engine(drafter, _KINDS, needs_index=True)
    model = target_without_weights(target, trust_remote_code=trust_remote_code)
    check_pair(model, config, has_own_ends=bool(has_own_ends(drafter)))
    return config.num_drafted

"""Whether a drafter was trained with thinking, and whether it is asked as it was trained."""

import logging
from pathlib import Path

from blockdraft.core.config import Thinking
from blockdraft.core.errors import RequestError
from blockdraft.hub.catalog import entry_of
from blockdraft.models.draft.checkpoint import read_provenance
from blockdraft.text.tokenizer import Tokenizer, thinking_options

MIXED = "mixed"
"""Of a drafter that was trained with both."""

logger = logging.getLogger(__name__)


def trained_thinking(drafter: str | None, folder: Path) -> str | None:
    """What the template was told when the drafter was trained: its own word, or our list's."""
    target = read_provenance(folder).get("target")
    told = target.get("thinking") if isinstance(target, dict) else None
    if told is not None:
        return str(told)
    entry = entry_of(drafter, folder)
    return None if entry is None else entry.thinking


def default_thinking(tokenizer: Tokenizer) -> str:
    """What a template does that is told nothing: "on", "off", or "template" if that is neither."""

    def written(thinking: Thinking) -> list[int]:
        turn = [{"role": "user", "content": "Hi"}]
        return tokenizer.encode_chat(turn, thinking_options(thinking))

    plain = written("template")
    likes = [told for told in ("on", "off") if written(told) == plain]
    return likes[0] if len(likes) == 1 else "template"


def warn_of_other_thinking(drafter: str | None, folder: Path, tokenizer: Tokenizer) -> None:
    """Say so if requests are not asked as the drafter was trained, unless they say otherwise."""
    if not tokenizer.has_thinking_switch:
        return
    try:
        default = default_thinking(tokenizer)
    except RequestError:  # a template that refuses a lone turn; requests will say more
        return
    trained = trained_thinking(drafter, folder)
    if trained not in ("on", "off") or trained == default:
        return
    entry = entry_of(drafter, folder)
    loss = "fewer draft tokens will be accepted"
    if entry is not None and entry.thinking is not None:
        loss = "its users report less than half as many accepted draft tokens then"
    logger.warning(
        "the drafter was trained with thinking %s, and the chat template has it %s by default: %s; "
        'send "chat_template_kwargs": {"enable_thinking": %s}, or use another drafter',
        trained,
        default,
        loss,
        "true" if trained == "on" else "false",
    )

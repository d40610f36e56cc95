"""What OpenAI's Responses and Anthropic's Messages have in common here. No torch.

Both become a ChatRequest, so that exactness, queues, metrics, calls and cancellation are one path.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from blockdraft.core.errors import RequestError
from blockdraft.server.protocol import AnswerFields


class ChatFields(AnswerFields):
    """Fields of a chat that these interfaces take under the same names, theirs or not."""

    chat_template_kwargs: dict[str, Any] | None = None

    # Of chats, and refused here if they ask for what would change the answer.
    add_generation_prompt: Literal[True] | None = None
    add_special_tokens: Literal[False] | None = None
    chat_template: None = None
    continue_final_message: Literal[False] | None = None
    echo: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None

    def answer_fields(self) -> dict[str, Any]:
        """Those of AnswerFields that were given, for the chat."""
        names = AnswerFields.model_fields
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """In errors, call the parameters of the chat that was made as the client has called them."""
    try:
        yield
    except RequestError as error:
        whole = (error.param or "").split("[")[0].split(".")[0]
        error.param = names.get(whole, error.param)
        message = str(error)
        for name, own_name in names.items():
            # Others are English words too, such as messages.
            if name == whole or "_" in name:
                message = re.sub(rf"\b{name}\b", own_name, message)
        error.args = (message,)
        raise

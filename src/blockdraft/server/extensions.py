"""What OpenAI's Responses and Anthropic's Messages have in common here. No torch.

Both become a ChatRequest, so that exactness, queues, metrics, calls and cancellation are one path.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from blockdraft.core.errors import RequestError
from blockdraft.server.protocol import (
    MAX_LISTED_IDS,
    Ids,
    LogitBias,
    Number,
    Prediction,
    RequestFields,
    Speculative,
    StructuredFields,
)


class Extensions(StructuredFields):
    """Parameters of /v1/chat/completions that these interfaces lack, and take all the same."""

    seed: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    min_tokens: int | None = None
    thinking_token_budget: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_LISTED_IDS)] | None = None
    num_draft_tokens: int | None = None
    draft_depth: int | None = None
    speculative: Speculative = None
    prediction: Prediction | None = None
    receipt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Those that were given, but for the variables of the template, as a chat has them."""
        names = Extensions.model_fields.keys() - {"chat_template_kwargs"}
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def refuse_names(request: RequestFields, own_names: Mapping[str, str]) -> None:
    """Refuse a chat's parameter that has another name here; one sample is what is given anyway.

    Raises:
        RequestError: one was given.
    """
    given = request.model_extra or {}
    for name, own_name in own_names.items():
        if name in given:
            raise RequestError(f"{name} is called {own_name} here; give that", param=name)
    if given.get("n", 1) != 1:
        raise RequestError(f"n is {given['n']!r:.20}; one answer is given here", param="n")


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

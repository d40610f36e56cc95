"""What a caller gives as prompts, conversations and parameters: one or many, or refused."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from blockdraft.core.errors import RequestError
from blockdraft.core.request import SamplingParams

Params = SamplingParams | Sequence[SamplingParams]
"""For all prompts, or for each one its own."""


def params_for_each(params: Params | None, num_prompts: int) -> Sequence[SamplingParams]:
    """The parameters of each prompt; the usual ones for all of them if there are none.

    Raises:
        RequestError: they are no SamplingParams, or another number of them than of prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not _is_list(params) or isinstance(params, str):
        raise _no_params("params", params)
    for index, own in enumerate(params):
        if not isinstance(own, SamplingParams):
            raise _no_params(f"params[{index}]", own)
    if len(params) != num_prompts:
        raise RequestError(
            f"{len(params)} sampling params for {num_prompts} prompts; give one, or one for each"
        )
    return params


def _no_params(name: str, found: object) -> RequestError:
    kind = type(found).__name__
    what = "None" if found is None else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
    values = ""
    # What other engines' requests look like, and how it is written here.
    if isinstance(found, Mapping) and all(isinstance(key, str) for key in found):
        values = ", ".join(f"{key}={value!r:.40}" for key, value in found.items())
    return RequestError(f"{name} is {what}; give SamplingParams({values:.200})")


def is_one_conversation(messages: object) -> bool:
    """True for a list of messages, False for a list of such lists.

    Raises:
        RequestError: it is neither.
    """
    if not _is_list(messages) or isinstance(messages, str):
        raise RequestError(
            f"messages are {messages!r:.60}; give a list of messages with role and content, "
            "or call generate"
        )
    kinds = {isinstance(item, Mapping) for item in messages}
    if len(kinds) > 1:
        raise RequestError("messages and conversations are mixed; give one conversation, or a list")
    return kinds != {False}


def is_one_prompt(prompts: object) -> bool:
    """True for one prompt, False for a list of prompts.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, str):
        return True
    if not _is_list(prompts):
        raise _no_prompt(prompts)
    return bool(prompts) and _are_ids(prompts)


def ids_of(prompt: Sequence[int]) -> list[int]:
    """The token ids of a prompt that is no text.

    Raises:
        RequestError: it does not consist of token ids.
    """
    if not _are_ids(prompt):
        raise _no_prompt(prompt)
    return list(prompt)


def _are_ids(prompt: object) -> bool:
    # A bool is an int for Python, and no id that anybody means.
    return _is_list(prompt) and all(
        isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt
    )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Bytes and ranges are sequences of numbers too, and hardly meant as token ids."""
    others = bytes | bytearray | memoryview | range
    return isinstance(value, Sequence) and not isinstance(value, others)


def _no_prompt(found: object) -> RequestError:
    return RequestError(
        f"prompt {found!r:.60} is neither text nor a list of token ids; give a str "
        "(bytes.decode() makes one of bytes) or a list of ints (array.tolist() of an array)"
    )

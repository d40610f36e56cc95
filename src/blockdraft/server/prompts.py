"""From what a request sends to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.engine.async_engine import AsyncEngine
from blockdraft.server.conversation import (
    prediction_text,
    speaks_of_tools,
    template_messages,
    template_options,
)
from blockdraft.server.errors import blaming
from blockdraft.server.protocol import ChatRequest, Ids, Sampling, TokenizeRequest
from blockdraft.server.shape import Toolbox, read_toolbox
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_prompt import encode_tool_chat


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the engine takes it. For `thinks` see Answer."""

    prompt_ids: list[int]
    toolbox: Toolbox | None
    thinks: bool | None
    prediction_ids: tuple[int, ...]


class PromptReader:
    """Makes token ids of prompts. To be called in threads: a long prompt takes a while.

    has_channels: the model answers in the format of text/harmony.py, where thinking has a channel.
    """

    def __init__(self, tokenizer: Tokenizer, engine: AsyncEngine, *, has_channels: bool) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._has_channels = has_channels

    def chat(self, request: ChatRequest) -> ChatPrompt:
        """What a conversation asks.

        Raises:
            RequestError, ContextTooLong: see encode_tool_chat.
        """
        toolbox = read_toolbox(request, self._tokenizer)
        prompt_ids = self.encode_chat(request, toolbox, most=self._engine.max_tokens)
        thinks = self._thinks(prompt_ids)
        return ChatPrompt(prompt_ids, toolbox, thinks, self.prediction(request))

    def prediction(self, request: Sampling) -> tuple[int, ...]:
        """What the answer is expected to be.

        Raises:
            RequestError: it is not text, or too long.
        """
        with blaming("prediction"):
            return self._engine.prediction_ids(prediction_text(request.prediction))

    def encode_chat(
        self,
        request: ChatRequest | TokenizeRequest,
        toolbox: Toolbox | None,
        *,
        most: int | None = None,
    ) -> list[int]:
        """The prompt of a conversation in which the model is told of the tools.

        most: tokens, of which more are refused early where that is certain.

        Raises:
            RequestError, ContextTooLong: see encode_tool_chat.
        """
        num = len(request.messages or ())
        if num > self._engine.max_tokens:
            raise ContextTooLong(
                f"the conversation has {num} messages, but the context has room for "
                f"{self._engine.max_tokens} tokens; send fewer"
            )
        messages, options = template_messages(request.messages or ()), self._options(request)
        tools = () if toolbox is None else toolbox.tools
        if tools or speaks_of_tools(messages):
            return encode_tool_chat(self._tokenizer, messages, tools, options, most=most)
        return self._tokenizer.encode_chat(messages, options, most=most)

    def _options(self, request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """What the chat template is told beside the messages."""
        options = template_options(
            request.chat_template_kwargs, request.reasoning_effort, self._tokenizer
        )
        for name in ("add_generation_prompt", "continue_final_message"):
            if name in options:
                raise RequestError(
                    f"{name} is a parameter of its own; move it out of chat_template_kwargs",
                    param="chat_template_kwargs",
                )
            options[name] = getattr(request, name)
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        return options

    def texts(self, prompt: str | list[str] | Ids | list[Ids]) -> list[list[int]]:
        """The prompts of a text completion.

        Raises:
            RequestError, ContextTooLong: one of them is empty, or too long, or an id is unknown.
        """
        most = self._engine.max_tokens
        if isinstance(prompt, str):
            return [self._tokenizer.encode(prompt, most=most)]
        if not prompt:
            raise RequestError("prompt is an empty list; give at least one", param="prompt")
        ids = [one for one in prompt if isinstance(one, int)]
        texts = [one for one in prompt if isinstance(one, str)]
        if texts:
            return [self._tokenizer.encode(text, most=most) for text in texts]
        prompts = [ids] if ids else [list(one) for one in prompt if isinstance(one, list)]
        for one in prompts:
            self._engine.check_ids("prompt", one)  # an echo decodes them
        return prompts

    def _thinks(self, prompt_ids: Sequence[int]) -> bool | None:
        if self._has_channels or not self._tokenizer.thinks:
            return None
        return self._tokenizer.begins_thinking(prompt_ids)

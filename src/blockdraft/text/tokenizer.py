"""A target's tokenizer: text to ids, the chat template, and the ids that end an answer."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from blockdraft.core.config import Thinking
from blockdraft.core.errors import ContextTooLong, ModelError, RequestError, reason_of
from blockdraft.core.files import read_json
from blockdraft.core.thinking import ALL_TAGS, THINK, Tags, ThinkingMarks
from blockdraft.hub.model_config import code_is_needed, load_config
from blockdraft.text.least_tokens import LeastTokens
from blockdraft.text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""One turn of a conversation: `role` and `content`, both texts; an answer may have
`reasoning_content`; `tool_calls`, and what belongs to them, for a template that knows tools."""

TOOL_KEYS = frozenset({"tool_calls", "tool_call_id", "name"})

THINKING_SWITCH = "enable_thinking"
"""The variable by which chat templates (Qwen 3 and its followers) turn thinking on and off."""

TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError),
    RecursionError,  # a variable that is nested too deeply
)
"""A template computes with what it is given, and so may fail in any way."""

_OTHER_THINKING, _CHANNEL = "message.thinking", "<|channel|>"
_TAIL = 16
"""Tokens at the end of a prompt in which the mark of a thinking section is looked for."""
OPTIONAL_KEYS = frozenset({"reasoning_content"})
_RESERVED_OPTIONS = frozenset(
    {
        *("add_special_tokens", "chat_template", "conversation", "conversations", "documents"),
        *(
            "max_length",
            "messages",
            "padding",
            "return_assistant_tokens_mask",
            "return_dict",
            "return_tensors",
        ),
        *("sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Arguments of transformers that are no variables of a template."""


def thinking_options(thinking: Thinking) -> dict[str, bool]:
    """Variables for a chat template that has the switch."""
    return {} if thinking == "template" else {THINKING_SWITCH: thinking == "on"}


class Tokenizer:
    """Wraps the transformers tokenizer of a model folder.

    `backend` is the underlying fast tokenizer, `eos_ids` all ids that end an answer.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.backend: Backend = tokenizer.backend_tokenizer
        self.eos_ids = frozenset(eos_ids)
        # What transformers would do at the first text. Later ones change nothing in the backend, so
        # they may come in several threads.
        tokenizer.model_max_length = VERY_LARGE_INTEGER  # longer texts are warned of: not by us
        self.backend.no_truncation()
        self.backend.no_padding()

    def drop_unknown_eos_ids(self, vocab_size: int) -> None:
        """Leave out ids outside of the target's vocabulary, which it can never choose; say so."""
        known = frozenset(i for i in self.eos_ids if 0 <= i < vocab_size)
        if unknown := sorted(self.eos_ids - known):
            logger.warning(
                "end-of-text ids %s are outside the target's vocabulary of %d tokens and are left "
                "out; correct eos_token_id in its generation_config.json or config.json",
                ", ".join(map(str, unknown)),
                vocab_size,
            )
            self.eos_ids = known

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the decoder sees in each token."""
        return Vocabulary(self.backend)

    @cached_property
    def _least_tokens(self) -> LeastTokens:
        return LeastTokens(self.backend)

    def check_size(self, text: str, most: int) -> None:
        """Refuse a text that certainly has more than `most` tokens, in less time than making them.

        Raises:
            ContextTooLong: says by how much it is too long at least.
        """
        least = self._least_tokens.of(text, most)
        if least:
            raise ContextTooLong(
                f"the text has {len(text)} characters, which are at least {least} tokens, and "
                f"there is room for {most}; shorten it"
            )

    @property
    def has_chat_template(self) -> bool:
        """True if the model says how a conversation is written."""
        return self._tokenizer.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The template as it stands in the model's files; empty without one."""
        template = self._tokenizer.chat_template
        return "" if template is None else str(template)

    @property
    def has_thinking_switch(self) -> bool:
        """True if the chat template can be told to let the model think before it answers."""
        return THINKING_SWITCH in self.chat_template

    @property
    def template_source(self) -> str | None:
        """The chat template that is used with tools."""
        if not self.has_chat_template:
            return None
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Token ids of a text, with whatever the model puts at its start.

        Raises:
            RequestError: the text is empty, or not valid Unicode.
            ContextTooLong: see `check_size`; only with `most`.
        """
        if not text:
            raise RequestError("the prompt is empty; give some text")
        _check_unicode(text)
        if most is not None:
            self.check_size(text, most)
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def encode_continuation(self, text: str, *, most: int | None = None) -> list[int]:
        """Token ids of a text that stands behind others.

        Raises:
            RequestError: it is not valid Unicode.
            ContextTooLong: see `check_size`; only with `most`.
        """
        _check_unicode(text, "text")
        if most is not None:
            self.check_size(text, most)
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.backend.encode(text, add_special_tokens=False).ids)

    @property
    def thinks(self) -> bool:
        """True if the chat template knows a section of thinking at the start of an answer."""
        return any(end in self.chat_template for _, end in ALL_TAGS)

    @property
    def thinking_tags(self) -> Tags:
        """The marks that the chat template writes around a section of thinking."""
        return next((tags for tags in ALL_TAGS if tags[1] in self.chat_template), THINK)

    @cached_property
    def thinking_marks(self) -> ThinkingMarks | None:
        """The tokens around a section of thinking; None if the chat template knows none."""
        if not self.thinks:
            return None
        start, end = map(self.encode_continuation, self.thinking_tags)
        return ThinkingMarks(tuple(start), tuple(end))

    def mark_ids(self, marks: Iterable[str]) -> dict[str, int]:
        """Those of the marks that are no text for a grammar, which must name them as tokens.

        These are special tokens, and added ones in angle brackets (the marks of Qwen3), which
        llguidance takes for special too.
        """
        added = self.backend.get_added_tokens_decoder()
        found = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        return {mark: found[mark] for mark in marks if mark in found}

    def without_text(self, token_ids: Iterable[int]) -> frozenset[int]:
        """Those of the tokens that have no text unless they are shown."""
        return frozenset(one for one in token_ids if not self.vocabulary.has_text(one))

    @cached_property
    def thinking_ids(self) -> dict[str, int]:
        """The marks around a section of thinking, as in `mark_ids`."""
        return self.mark_ids(self.thinking_tags) if self.thinks else {}

    def begins_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """True if a prompt ends where a section of thinking begins."""
        return self.decode_all(prompt_ids[-_TAIL:]).rstrip().endswith(self.thinking_tags[0])

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        `options` are variables for the chat template, such as THINKING_SWITCH, and transformers'
        `add_generation_prompt` (True unless given) and `continue_final_message`. `tools` are for a
        template that shows them; text/tool_prompt.py knows whether it does.

        Raises:
            RequestError: a message is malformed, all of them are empty, the model has no chat
                template, or its template refuses the conversation.
            ContextTooLong: see `check_size`; only with `most`.
        """
        if not self.has_chat_template:
            raise RequestError(
                "the target has no chat template; let it continue a text instead (--raw, "
                "LLM.generate, /v1/completions), or use a chat model"
            )
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        for message in messages:
            _check_message(message, with_tools=tools is not None)
        if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
            raise RequestError("the prompt is empty; give some text")
        options = {"add_generation_prompt": True, **(options or {})}
        if reserved := _RESERVED_OPTIONS & options.keys():
            raise RequestError(
                f"{min(reserved)} is not a chat template variable; leave it out",
                param="chat_template_kwargs",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._as_template_has_it(message) for message in messages],
                # Some templates take an empty list for tools.
                tools=[dict(tool) for tool in tools or ()] or None,
                chat_template=None if tools is None else self.template_source,
                tokenize=False,
                **options,
            )
            if most is not None:
                self.check_size(text, most)
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split())
            refusal = f"the target's chat template refuses this: {reason}"
            # Of all that a template is given, tools and variables alone can be nested.
            is_nested = isinstance(error, RecursionError) and not tools
            param = "chat_template_kwargs" if is_nested else None
            raise RequestError(refusal, param=param) from error
        return ids

    def _as_template_has_it(self, message: Message) -> dict[str, Any]:
        """A message for a template that calls thinking otherwise (gpt-oss, LFM2.5).

        That of gpt-oss takes none beside the text of a turn that makes calls, and shows such text
        as thinking.
        """
        found = dict(message)
        if _OTHER_THINKING not in self.chat_template or "reasoning_content" not in found:
            return found
        found["thinking"] = found.pop("reasoning_content")
        if _CHANNEL in self.chat_template and found.get("tool_calls") and found["content"]:
            found["thinking"] += "\n\n" + found["content"]
            found["content"] = ""
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=False))


def _check_message(message: Message, *, with_tools: bool) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"message {message!r:.100} is not a mapping; give one with role and content"
        )
    if missing := [key for key in ("role", "content") if key not in message]:
        raise RequestError(f"message {dict(message)!r:.100} lacks {missing[0]!r}; give it")
    allowed = {"role", "content"} | (OPTIONAL_KEYS | TOOL_KEYS if with_tools else OPTIONAL_KEYS)
    if unknown := [key for key in message if key not in allowed]:
        raise RequestError(
            f"message {dict(message)!r:.100} has the key {unknown[0]!r}; leave it out"
        )
    texts = [value for key, value in message.items() if key not in TOOL_KEYS]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"message {message!r:.100} holds something other than text; give role and content as "
            "str"
        )
    for text in texts:
        _check_unicode(text)


def _check_unicode(text: str, called: str = "prompt") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the {called} is not valid Unicode ({error}); give UTF-8") from error


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder; only with `trust_remote_code` is code of it run.

    Raises:
        ModelError: the model cannot be a target, see `load_config`; or its tokenizer is missing,
            damaged, or exists in Python only.
    """
    has_file = (folder / "tokenizer.json").is_file()
    if (folder / "config.json").is_file():
        # Blame the model's config for its own damage: the tokenizer's loader reads it too.
        load_config(folder, trust_remote_code=trust_remote_code)
    if not has_file and (folder / "tiktoken.model").is_file():
        # transformers would split texts by the pattern of another model.
        raise ModelError(
            f"the tokenizer in {folder} is a tiktoken.model, which does not say how texts are "
            "split, and no tokenizer.json; put one there that was converted from it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    # The Rust library raises bare Exceptions for a damaged file.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise code_is_needed(f"the tokenizer in {folder}") from error
        which = "" if has_file else ", which has no tokenizer.json"
        raise ModelError(
            f"cannot load a tokenizer from {folder}{which}: {reason_of(error)}; copy the "
            "tokenizer's files there"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"the tokenizer in {folder} has no tokenizer.json; convert it to a fast tokenizer"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(folder)
    return Tokenizer(tokenizer, _eos_ids(folder, tokenizer.eos_token_id))


def _processor_template(folder: Path) -> str | None:
    """The chat template of some models for text and images, which transformers reads with images.

    Raises:
        ModelError: its file is damaged.
    """
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = read_json(path)["chat_template"]
        if not isinstance(template, str):
            raise ValueError("its chat_template is not text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read {path} ({error}); copy the file again") from error
    return template


def _eos_ids(folder: Path, tokenizer_eos_id: int | None) -> frozenset[int]:
    """The tokenizer's id and those of the generation config, or else of the model's config.

    A chat model may end a turn with one token and a document with another: any of them ends.
    """
    for name in ("generation_config.json", "config.json"):
        if ids := _listed_eos_ids(folder / name):
            break
    return ids if tokenizer_eos_id is None else ids | {tokenizer_eos_id}


def _listed_eos_ids(path: Path) -> frozenset[int]:
    if not path.is_file():
        return frozenset()
    try:
        raw = read_json(path)
        value = raw.get("eos_token_id")
        if value is None and isinstance(raw.get("text_config"), dict):
            value = raw["text_config"].get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        return frozenset(int(one) for one in values if one is not None)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"cannot read eos_token_id of {path} ({error}); copy the file again"
        ) from error

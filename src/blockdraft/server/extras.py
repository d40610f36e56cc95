"""The fields of a request that protocol.py does not know: refused or ignored, and who is told.

What is known to change the answer, and is not supported here, is refused unless it asks for what
happens anyway. Everything else is ignored, or refused if the server is strict. No torch.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from blockdraft.core.errors import RequestError
from blockdraft.server.errors import ApiError, shown
from blockdraft.server.protocol import RequestFields, StreamOptions

MAX_NAMED = 8
"""Unknown fields of one request that are told of by name."""
_MAX_NAME = 60

logger = logging.getLogger(__name__)

_LEAVE_OUT = "; leave it out"
_OR_LEAVE_OUT = ", or leave it out"
_NO_BEAMS = f"beam search is not supported{_LEAVE_OUT}"
_NO_SAMPLER = f"this sampling method is not supported{_LEAVE_OUT}"
_SHAPE = f"give structured_outputs or response_format instead{_OR_LEAVE_OUT}"
_TOKENS = f"give max_tokens instead{_OR_LEAVE_OUT}"
_MESSAGE = f"put it into this route's messages, input or prompt{_OR_LEAVE_OUT}"
_THINKING = (
    "give enable_thinking in chat_template_kwargs, or reasoning_effort to /v1/chat/completions"
    f"{_OR_LEAVE_OUT}"
)
_OWN_CODE = f"code and weights from a request are not run{_LEAVE_OUT}"

_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "use_beam_search": ((False,), _NO_BEAMS),
    "num_beams": ((1,), _NO_BEAMS),
    "length_penalty": ((1,), f"it is for beam search, and {_NO_BEAMS}"),
    "early_stopping": ((False,), f"it is for beam search, and {_NO_BEAMS}"),
    "typical_p": ((1,), _NO_SAMPLER),
    "tfs_z": ((1,), _NO_SAMPLER),
    "top_a": ((0,), _NO_SAMPLER),
    "mirostat": ((0,), _NO_SAMPLER),
    "dry_multiplier": ((0,), _NO_SAMPLER),
    "xtc_probability": ((0,), _NO_SAMPLER),
    "top_n_sigma": ((0, -1), _NO_SAMPLER),
    "no_repeat_ngram_size": ((0,), _NO_SAMPLER),
    "penalty_alpha": ((0,), _NO_SAMPLER),
    "epsilon_cutoff": ((0,), _NO_SAMPLER),
    "dynatemp_range": ((0,), _NO_SAMPLER),
    "smoothing_factor": ((0,), _NO_SAMPLER),
    "samplers": (([], ""), _NO_SAMPLER),
    "do_sample": ((True,), "give temperature instead, 0 for greedy decoding" + _OR_LEAVE_OUT),
    "random_seed": ((), "give seed instead" + _OR_LEAVE_OUT),
    "custom_logit_processor": (("",), _OWN_CODE),
    "lora_path": (("",), _OWN_CODE),
    "repeat_penalty": ((1,), "give repetition_penalty instead" + _OR_LEAVE_OUT),
    "bad_words": (([],), "give logit_bias for the tokens to avoid" + _OR_LEAVE_OUT),
    "repetition_detection": (
        ({},),
        "no answer is ended for its repetitions; give repetition_penalty" + _OR_LEAVE_OUT,
    ),
    "vllm_xargs": (({},), f"arguments of plugins are not supported{_LEAVE_OUT}"),
    "logprob_token_ids": (
        ([],),
        "log-probabilities are those of the most probable tokens; give logprobs" + _OR_LEAVE_OUT,
    ),
    "return_tokens_as_token_ids": (
        (False,),
        "tokens are told as text; give return_token_ids for their ids" + _OR_LEAVE_OUT,
    ),
    "include_reasoning": (
        (True,),
        "an answer comes with its thinking; ignore reasoning_content" + _OR_LEAVE_OUT,
    ),
    "allowed_token_ids": ((), _SHAPE),
    "logits_processors": (([],), "code from a request is not run; give logit_bias" + _OR_LEAVE_OUT),
    "max_new_tokens": ((), _TOKENS),
    "max_output_tokens": ((), _TOKENS),
    "max_length": ((), _TOKENS),
    "max_completion_tokens": ((), _TOKENS),
    "n_predict": ((-1,), _TOKENS),
    "prompt": ((), "it belongs to /v1/completions and /tokenize" + _LEAVE_OUT),
    "messages": ((), "they belong to /v1/chat/completions and /tokenize" + _LEAVE_OUT),
    "input": ((), _MESSAGE),
    "instructions": (("",), _MESSAGE),
    "system": (("", []), _MESSAGE),
    "text": (
        ({}, {"format": {"type": "text"}}),
        "give messages or prompt for a text, response_format for a format" + _OR_LEAVE_OUT,
    ),
    "thinking": ((), _THINKING),
    "reasoning": (({},), _THINKING),
    "enable_thinking": ((), _THINKING),
    "stop_sequences": (([],), "give stop instead" + _OR_LEAVE_OUT),
    "eos_token_id": (([],), "give stop_token_ids instead" + _OR_LEAVE_OUT),
    "n": ((1,), "this route returns one answer" + _LEAVE_OUT),
    "num_return_sequences": ((1,), "give n instead" + _OR_LEAVE_OUT),
    "tools": (([],), "they belong to /v1/chat/completions" + _LEAVE_OUT),
    "suffix": (("",), "inserting before a suffix is not supported" + _LEAVE_OUT),
    "best_of": ((1,), "ranking samples is not supported" + _LEAVE_OUT),
    "truncate_prompt_tokens": ((), "prompts are never cut; send a shorter one" + _OR_LEAVE_OUT),
    "prompt_embeds": ((), "give prompt as text or token ids" + _OR_LEAVE_OUT),
    "prompt_logprobs": ((), "echo and logprobs of /v1/completions score a prompt" + _LEAVE_OUT),
    "spaces_between_special_tokens": ((True,), "special tokens are not in the text" + _LEAVE_OUT),
    "guided_whitespace_pattern": (
        (),
        'a schema may have {"x-guidance": {"whitespace_pattern"}}' + _LEAVE_OUT,
    ),
    "structural_tag": ((), _SHAPE),
    "grammar": (("",), _SHAPE),
    "json_schema": ((), _SHAPE),
    "regex": ((), _SHAPE),
    "ebnf": ((), _SHAPE),
    "functions": (([],), "it is the old form of tools; give tools instead" + _OR_LEAVE_OUT),
    "function_call": (
        ("none", "auto"),
        "it is the old form of tool_choice; give that instead" + _OR_LEAVE_OUT,
    ),
    "audio": ((), "answers are text" + _LEAVE_OUT),
    "documents": (([],), "put them into a message" + _OR_LEAVE_OUT),
    "web_search_options": ((), "there is no web search here" + _LEAVE_OUT),
}
"""What would change the answer, fields of other routes included: the values that ask for nothing,
and the reason with the remedy."""


def tell_of_ignored(request: Request, body: RequestFields, *, strict: bool) -> None:
    """Tell the client and the log of the fields that are ignored.

    Raises:
        RequestError: a field asks for what is not supported.
        ApiError: a field is unknown, and `strict`.
    """
    given = body.model_extra or {}
    _refuse_other_names(given, body.own_names)
    _refuse_unsupported(given)
    unknown = [name for name in given if name not in _UNSUPPORTED]
    options = getattr(body, "stream_options", None)
    if isinstance(options, StreamOptions):
        unknown += [f"stream_options.{name}" for name in options.model_extra or {}]
    if not unknown:
        return
    told = [_plain(name) for name in unknown[:MAX_NAMED]]
    if strict:
        raise ApiError(
            400,
            f"unknown parameter {told[0]}; leave it out, or serve without --strict",
            param=told[0],
            code="unknown_parameter",
        )
    if len(unknown) > len(told):
        told.append(f"{len(unknown) - len(told)} more")
    for name in told:
        logger.info("%s ignored the unknown parameter %s", request.state.request_id, name)
    listed = ", ".join(told)
    request.state.warning = f'299 blockdraft "ignored unknown parameters: {listed}"'


def _refuse_other_names(given: Mapping[str, Any], own_names: Mapping[str, str]) -> None:
    for name, own_name in own_names.items():
        if name in given:
            raise RequestError(f"{name} is called {own_name} here; use that name", param=name)


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name in [name for name in given if name in _UNSUPPORTED]:
        neutral, reason = _UNSUPPORTED[name]
        if given[name] not in neutral:
            raise RequestError(f"{name} is {shown(given[name])}: {reason}", param=name)


def _plain(name: str) -> str:
    """A name fit for a header and a line of the log."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_MAX_NAME])

"""Hooks of schemathesis: most bodies that it makes up ask for too much; half of them are mended.

What is then accepted is answered, streamed or not, with whatever odd values are left.
"""

import schemathesis

_LIMITS = {
    "max_tokens": (1, 8),
    "max_completion_tokens": (1, 8),
    "min_tokens": (0, 2),
    "n": (1, 2),
    "best_of": (1, 2),
    "temperature": (0, 2),
    "top_p": (0.1, 1),
    "min_p": (0, 1),
    "top_k": (0, 100),
    "top_logprobs": (0, 3),
    "seed": (0, 2**64 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.5, 2),
}
_LENGTHS = ("max_tokens", "max_completion_tokens")
_CONTEXT = 8192
_seen = 0


@schemathesis.hook
def map_body(context, body):
    """Bring every second request for an answer into the ranges that no schema tells."""
    global _seen
    if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
        return body
    _seen += 1
    return _shortened(body if _seen % 2 else _mended(body))


def _shortened(body):
    """No answer that fills the context, which takes minutes."""
    lengths = [body[name] for name in _LENGTHS if body.get(name) is not None]
    if not lengths or any(isinstance(length, int) and 8 < length < _CONTEXT for length in lengths):
        return {**body, "max_tokens": 8} | {n: 8 for n in _LENGTHS if body.get(n) is not None}
    return body


def _mended(body):
    mended = dict(body)
    for name, (least, most) in _LIMITS.items():
        value = mended.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            mended[name] = type(value)(min(max(value, least), most))
    if mended.get("max_completion_tokens") is not None:
        mended["max_tokens"] = mended["max_completion_tokens"]
    for name in ("model", "logit_bias", "stop_token_ids", "tools", "tool_choice", "best_of"):
        mended.pop(name, None)
    if isinstance(mended.get("messages"), list):
        mended["messages"] = [_mended_message(turn) for turn in mended["messages"]] or [
            {"role": "user", "content": "Hi!"}
        ]
    if mended.get("prompt") in ("", []):
        mended["prompt"] = "Once"
    return mended


def _mended_message(turn):
    if not isinstance(turn, dict):
        return turn
    kept = {name: turn[name] for name in turn if name not in ("name", "tool_call_id", "tool_calls")}
    if kept.get("role") == "tool":
        kept["role"] = "user"
    return kept | {"content": kept.get("content") or "Hi!"}

"""How a worker talks: requests on standard input, answers on standard output, JSON in lines.

Needs nothing but Python, for it runs in environments of other engines.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

Settings = Mapping[str, Any]
Decode = Callable[[list[int], int], dict[str, Any]]
"""From the prompt's token ids and the most tokens of output to an answer: `token_ids`;
`total_seconds` from the request to its last token; `decode_seconds` from the first token to the
last; `num_passes` of the target, the prompt's included, or None."""


def serve(load: Callable[[Settings], Decode], packages: tuple[str, ...]) -> None:
    """Load the engine, say so, and answer until standard input ends."""
    # What libraries print must not get between the answers.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: Settings) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        decode = load(json.loads(sys.argv[1]))
    except Exception as error:
        send({"error": _words(error)})
        raise
    send({"ready": True, "versions": {name: version(name) for name in packages}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            send(decode(request["prompt_ids"], request["max_tokens"]))
        except Exception as error:
            send({"error": _words(error)})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]

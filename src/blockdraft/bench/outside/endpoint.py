"""A server with OpenAI's routes as an engine to compare with."""

from collections.abc import Mapping
from time import perf_counter

from blockdraft.bench.outside.interface import EngineFailed, OutsideOutput, PromptFailed
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import ConfigError, NetworkError
from blockdraft.data.endpoint_answers import Endpoint, Refused
from blockdraft.text.tokenizer import Tokenizer


class EndpointEngine:
    """A server; its answers are streamed and timed here, network included.

    Where it returns no token ids, those of its text are taken, which may be others than it chose.

    Raises:
        EngineFailed: it does not answer, refuses, or serves several models.
    """

    def __init__(
        self, url: str, model: str | None, tokenizer: Tokenizer, *, answer_seconds: float
    ) -> None:
        try:
            self._endpoint = Endpoint.find(url, model)
        except Refused as error:
            raise EngineFailed(f"refuses to list its models: {error}") from error
        except (ConfigError, NetworkError) as error:
            raise EngineFailed(str(error)) from error
        self._tokenizer, self._answer_seconds = tokenizer, answer_seconds
        self.versions: Mapping[str, str] = {"model": self._endpoint.model}

    def decode(self, prompt_ids: list[int], max_tokens: int) -> OutsideOutput:
        """Answer greedily.

        Raises:
            EngineFailed: it does not answer, or in another form.
            PromptFailed: it refuses this prompt.
        """
        body = {
            "model": self._endpoint.model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }
        text, token_ids, times = "", list[int](), list[float]()
        start = perf_counter()
        try:
            for event in self._endpoint.stream("/completions", body, timeout=self._answer_seconds):
                if "error" in event:
                    raise PromptFailed(f"answers with the error {event['error']!r}")
                for choice in event.get("choices", []):
                    piece, ids = choice.get("text") or "", choice.get("token_ids") or []
                    if piece or ids:
                        times.append(perf_counter())
                    text, token_ids = text + piece, token_ids + ids
        except Refused as error:
            raise PromptFailed(f"refuses: {error}") from error
        except (ConfigError, NetworkError) as error:
            raise EngineFailed(str(error)) from error
        except (AttributeError, TypeError) as error:
            raise EngineFailed(f"does not answer in OpenAI's format ({error!r})") from error
        if not times:
            raise PromptFailed("returned no token")
        return OutsideOutput(
            TimedOutput(
                token_ids=tuple(token_ids or self._tokenizer.encode(text)),
                total_seconds=times[-1] - start,
                decode_seconds=times[-1] - times[0],
            )
        )

    def close(self) -> None:
        """Nothing to do: the server is not ours."""

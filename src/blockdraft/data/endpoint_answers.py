"""Answers by a server that serves the target: any with OpenAI's routes that returns token ids."""

import hashlib
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from blockdraft.core.errors import BlockdraftError, ConfigError, NetworkError
from blockdraft.data.answers import Answer, Job
from blockdraft.text.kinds import loops

logger = logging.getLogger(__name__)

KEY_VARIABLE = "BLOCKDRAFT_ENDPOINT_KEY"
NUM_TRIES = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between tries: each pause is twice the one before."""
TIMEOUT = 600.0
"""Seconds without a sign of life; an answer comes whole."""
_MODEL_OPTION = "--endpoint-model (of `bench speed`: --against-model)"

_NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What leaves the target's distribution as it is. Servers fill in what a request leaves out, vLLM
from the model's generation_config.json for instance. The last three are not of OpenAI's API."""

_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
"""Statuses that another try may not meet."""
_ELSEWHERE = {301, 302, 303, 307, 308}
_OF_THE_JOB = {400, 413, 422}
"""Statuses that say something of one request."""


class _NoRedirects(HTTPRedirectHandler):
    """Python's own would hand the key on to whatever server a redirect names."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the redirect to the caller, as an HTTPError."""


_OPENER = build_opener(_NoRedirects)


def check_url(url: str) -> None:
    """Refuse what no client could connect to, and a password in it, which results would tell.

    Raises:
        ConfigError: it is no URL of a web server.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        fits = False
    # White space is passed over when a URL is taken apart, and refused when it is asked for.
    if not fits or any(sign.isspace() for sign in url):
        raise ConfigError(
            f"endpoint {url!r} is not a URL; give one such as http://localhost:8000/v1"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            "the endpoint's URL holds a user or a password, which would be in the log and in "
            f"results; leave them out, and put a key into ${KEY_VARIABLE}"
        )


class Refused(BlockdraftError):
    """The endpoint answers other requests, but not this one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server.

    url: as OpenAI's clients are given it, such as http://localhost:8000/v1. model: the name of the
    target there. key: sent with every request, empty without.
    """

    url: str
    model: str
    key: str

    @classmethod
    def find(cls, url: str, model: str | None) -> "Endpoint":
        """The endpoint at `url`, with the only model that it serves unless one is named.

        Raises:
            ConfigError: it refuses, is none, or serves several models.
            NetworkError: it does not answer.
        """
        check_url(url)
        url, key = url.rstrip("/"), os.environ.get(KEY_VARIABLE, "")
        if model is not None:
            return cls(url, model, key)

        def tell(reason: str) -> None:
            logger.warning(
                "endpoint %s does not answer (%s); retrying for about a minute",
                *(url, reason),
            )

        listed = cls(url, "", key).call("/models", None, tell)
        try:
            names = [str(entry["id"]) for entry in listed["data"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"endpoint {url} lists no models; give the URL that OpenAI clients use, with /v1"
            ) from error
        if len(names) != 1:
            raise ConfigError(
                f"endpoint {url} serves {len(names)} models ({', '.join(names)}); name the target "
                f"among them with {_MODEL_OPTION}"
            )
        return cls(url, names[0], key)

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        on_retry: Callable[[str], None] = lambda reason: None,
    ) -> Any:
        """The JSON of an answer; what may pass is tried again.

        Args:
            path: behind the URL.
            body: sent as JSON; None asks without one.
            on_retry: is told why the first try failed.

        Raises:
            ConfigError: it wants another key, or knows no such route or model.
            NetworkError: every try failed.
            Refused: it does not accept this body.
        """
        reason = ""
        for attempt in range(NUM_TRIES):
            if attempt == 1:
                on_retry(reason)
            if attempt:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))
                time.sleep(pause * random.uniform(0.5, 1.0))
            try:
                with _OPENER.open(self._request(path, body), timeout=TIMEOUT) as response:
                    return json.load(response)
            except HTTPError as error:
                with error:
                    reason = _reason_of(error)
                if error.code not in _AGAIN:
                    raise self._refusal(error.code, reason) from error
            # A connection that breaks while it is read is an OSError; half an answer, a ValueError
            # or, where its length was told, an HTTPException.
            except (HTTPException, URLError, OSError, ValueError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise NetworkError(
            f"endpoint {self.url} failed {NUM_TRIES} times, most recently with: {reason}; make "
            "sure that it runs, and give the same command again"
        )

    def stream(
        self, path: str, body: Mapping[str, Any], *, timeout: float
    ) -> Iterator[dict[str, Any]]:
        """The events of an answer as they come; nothing is tried again, so that it can be timed.

        Raises:
            ConfigError, Refused: as of `call`.
            NetworkError: it does not answer, breaks off, or is silent for `timeout` seconds.
        """
        try:
            with _OPENER.open(self._request(path, body), timeout=timeout) as response:
                for line in response:
                    event = line.decode("utf-8").strip().removeprefix("data:").strip()
                    if event.startswith("{"):
                        yield json.loads(event)
                    elif event == "[DONE]":
                        return
        except HTTPError as error:
            with error:
                reason = _reason_of(error)
            if error.code not in _AGAIN:
                raise self._refusal(error.code, reason) from error
            raise NetworkError(f"endpoint {self.url} failed: {reason}") from error
        except (HTTPException, URLError, OSError, ValueError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            raise NetworkError(f"endpoint {self.url} failed: {reason}") from error
        raise NetworkError(f"endpoint {self.url} disconnected in the middle of an answer")

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Request:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        return Request(self.url + path, data, headers)

    def _refusal(self, status: int, reason: str) -> BlockdraftError:
        if status in (401, 403):
            return ConfigError(
                f"endpoint {self.url} requires an API key ({reason}); put it into ${KEY_VARIABLE}"
            )
        if status in _OF_THE_JOB:
            return Refused(reason)
        if status in _ELSEWHERE:
            return ConfigError(
                f"endpoint {self.url} redirects to another URL ({reason}), which is not followed, "
                "as it would get the key; give the endpoint's URL there"
            )
        return ConfigError(
            f"endpoint {self.url} refuses ({reason}); give the URL that OpenAI clients use, with "
            f"/v1, and the target's name there with {_MODEL_OPTION}"
        )


def _reason_of(error: HTTPError) -> str:
    """Its status, and where it redirects to, or else the server's own words."""
    elsewhere = error.headers.get("Location") if error.code in _ELSEWHERE else None
    return f"{error.code} {elsewhere or _words_of(error)}"


def _words_of(error: HTTPError) -> str:
    """The server's own words, in OpenAI's envelope or not."""
    try:
        text = error.read(10_000).decode(errors="replace")
    except (HTTPException, OSError):  # it breaks off in the middle of its words
        return ""
    try:
        found = json.loads(text)
        text = found.get("error", {}).get("message") or found.get("message") or text
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300]


class EndpointWriter:
    """Writes answers with `slots` requests under way. See `EngineWriter`.

    An answer comes whole, so one that loops is told from others only when it has ended. Parameters
    of sampling that the endpoint refuses by name are no longer sent.
    """

    def __init__(self, endpoint: Endpoint, *, slots: int, capacity: int, seed: int) -> None:
        self._endpoint = endpoint
        self._slots, self._capacity, self._seed = slots, capacity, seed
        self._has_answered = False
        self._neutral, self._lock = dict(_NEUTRAL), threading.Lock()

    def write(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Yield answers as they finish; jobs that do not fit the capacity are skipped.

        Raises:
            ConfigError: the endpoint refuses, or returns no token ids.
            NetworkError: it does not answer.
        """
        fitting = (j for j in jobs if len(j.prompt_ids) + j.max_tokens <= self._capacity)
        asked: SimpleQueue[Job | None] = SimpleQueue()
        done: SimpleQueue[tuple[Job, Answer | Exception]] = SimpleQueue()
        num_running = 0
        for job in islice(fitting, self._slots):
            # Nobody waits for these threads: a program that is broken off ends at once.
            threading.Thread(target=self._work, args=(asked, done), daemon=True).start()
            asked.put(job)
            num_running += 1
        try:
            while num_running:
                job, result = done.get()
                num_running -= 1
                if isinstance(result, Answer):
                    self._has_answered = True
                    yield result
                elif isinstance(result, Refused) and self._has_answered:
                    logger.warning("no answer to %s: %s", job.id, result)
                elif isinstance(result, Refused):
                    raise ConfigError(
                        f"endpoint {self._endpoint.url} refuses: {result}; make sure that it "
                        f"serves the target, with room for {self._capacity} tokens of prompt and "
                        "answer"
                    )
                else:
                    raise result
                for job in islice(fitting, 1):
                    asked.put(job)
                    num_running += 1
        finally:
            for _ in range(self._slots):
                asked.put(None)

    def _work(
        self,
        asked: "SimpleQueue[Job | None]",
        done: "SimpleQueue[tuple[Job, Answer | Exception]]",
    ) -> None:
        while (job := asked.get()) is not None:
            try:
                done.put((job, self._answer(job)))
            except Exception as error:
                done.put((job, error))

    def _answer(self, job: Job) -> Answer:
        name = f"{self._seed}/{job.id}/{job.temperature}/{job.sample}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") // 2
        answer = self._ask(
            {
                "model": self._endpoint.model,
                "prompt": list(job.prompt_ids),
                "max_tokens": job.max_tokens,
                "temperature": job.temperature,
                "seed": seed,
                "return_token_ids": True,
            },
        )
        try:
            (choice,) = answer["choices"]
            ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"endpoint {self._endpoint.url} does not answer in OpenAI's format ({error!r}); "
                "give the URL that OpenAI clients use, with /v1"
            ) from error
        if not isinstance(ids, list) or not all(type(item) is int for item in ids):
            raise ConfigError(
                f"endpoint {self._endpoint.url} returns no token ids, and tokenizing its text may "
                "give different ones; serve the target with blockdraft, or with vLLM 0.10.2 or "
                "later, which honor return_token_ids"
            )
        # Servers name their ways to break off as they like, such as "abort".
        finish = "stop" if finish == "stop" else "length"
        return Answer(job=job, response_ids=tuple(ids), finish="loop" if loops(ids) else finish)

    def _ask(self, body: Mapping[str, Any]) -> Any:
        """The answer to a request that filters and penalizes nothing, as far as it may say so."""
        while True:
            with self._lock:
                neutral = dict(self._neutral)
            try:
                return self._endpoint.call("/completions", {**body, **neutral})
            except Refused as error:
                refused = [name for name in neutral if re.search(rf"\b{name}\b", str(error))]
                if not refused:
                    raise
                self._leave_out(refused, error)

    def _leave_out(self, names: Iterable[str], reason: Refused) -> None:
        with self._lock:
            # Requests that were under way are refused too.
            for name in (name for name in names if self._neutral.pop(name, None) is not None):
                logger.warning(
                    "endpoint %s refuses %s (%s), which is no longer sent; if it has a default of "
                    "its own for it, that shapes the answers",
                    *(self._endpoint.url, name, reason),
                )

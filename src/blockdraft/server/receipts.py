"""The receipts of answers, from which `blockdraft verify` checks them."""

import asyncio
from collections.abc import Callable

from blockdraft.core.receipt import Environment, Receipt
from blockdraft.engine.completion import Completion
from blockdraft.engine.samples import Job


class Receipts:
    """Makes receipts once it is prepared.

    Args:
        target: its name.
        environment: what an output depends on beside the request. Takes as long as reading all
            weights, and is asked once, in a thread.
    """

    def __init__(self, target: str, environment: Callable[[], Environment]) -> None:
        self._target = target
        self._find_environment = environment
        self._environment: Environment | None = None
        self._finding: asyncio.Task[Environment] | None = None

    async def prepare(self) -> None:
        """Find out the environment, unless it is known; others wait for whoever does."""
        found = self._finding
        if found is None or (found.done() and found.exception() is not None):
            found = asyncio.create_task(asyncio.to_thread(self._find_environment))
            self._finding = found
        # A thread cannot be stopped: a request that leaves must not make the next begin again.
        self._environment = await asyncio.shield(found)

    def make(self, job: Job, completion: Completion) -> Receipt:
        """That of one sample."""
        assert self._environment is not None, "it was not prepared"
        return completion.receipt(
            job.prompt_ids,
            job.params,
            target=self._target,
            environment=self._environment,
            shown_ids=job.shown_ids,
        )

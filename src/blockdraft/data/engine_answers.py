"""Answers by the engine that serves."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from itertools import islice

from transformers import PreTrainedModel

from blockdraft.core.config import LLMConfig
from blockdraft.core.request import SamplingParams
from blockdraft.data.answers import Answer, Job, has_begun_to_loop
from blockdraft.engine.engine import Engine
from blockdraft.engine.load import make_target, use_static_shapes
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.text.kinds import loops

logger = logging.getLogger(__name__)


class EngineWriter:
    """Writes answers by plain decoding, `slots` sequences at a time.

    It runs whatever the engine runs. An answer depends on its job and the seed alone; one that has
    begun to loop is cut off, since it would be left out anyway.

    Raises:
        ModelError: the engine does not run the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Iterable[int],
        slots: int,
        capacity: int,
        seed: int,
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._slots, self._seed = slots, seed
        target = make_target(LLMConfig(max_concurrency=slots, exact=False), model, None)
        use_static_shapes(target)
        self._capacity = min(capacity, target.max_context)
        self._engine = Engine(target, NoDrafter(), max_running=slots)

    def write(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Yield answers as they finish; jobs that do not fit the capacity are skipped."""
        waiting = (j for j in jobs if len(j.prompt_ids) + j.max_tokens <= self._capacity)
        running: dict[int, Job] = {}
        while True:
            for job in islice(waiting, self._slots - len(running)):
                running[self._add(job)] = job
            if not running:
                return
            outputs = self._engine.step()
            for key in [out.key for out in outputs if self._has_ended(out)]:
                job, sequence = running.pop(key), self._engine.take(key).sequence
                if sequence.error is not None:
                    logger.warning("no answer to %s: %s", job.id, sequence.error)
                    continue
                ids = tuple(sequence.output_ids)
                is_loop = sequence.finish_reason is None or loops(ids)
                finish = "loop" if is_loop else str(sequence.finish_reason)
                yield Answer(job=job, response_ids=ids, finish=finish)

    def _has_ended(self, output: StepOutput) -> bool:
        """True if an answer is complete, or has begun to loop and would be left out anyway."""
        if output.finish_reason is not None:
            return True
        sequence = self._engine.progress[output.key].sequence
        return has_begun_to_loop(sequence.output_ids)

    def _add(self, job: Job) -> int:
        params = SamplingParams(max_tokens=job.max_tokens, temperature=job.temperature)
        name = f"{self._seed}/{job.id}/{job.temperature}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        return self._engine.add(
            job.prompt_ids, params, eos_ids=self._stop_ids, sample_index=job.sample, seed=seed
        )

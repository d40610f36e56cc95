"""The outside engines of a run: each is there, or there is a reason why it is not."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.outside.endpoint import EndpointEngine
from blockdraft.bench.outside.engines import ENGINES, OutsideEngine, is_url
from blockdraft.bench.outside.environments import python_of
from blockdraft.bench.outside.interface import (
    EngineFailed,
    Failure,
    OutsideOutput,
    PromptFailed,
    ReadyEngine,
)
from blockdraft.bench.outside.process import EngineProcess
from blockdraft.core.errors import BlockdraftError, ModelError
from blockdraft.core.libraries import environment_for_others
from blockdraft.hub.folder import gguf_file
from blockdraft.hub.resolve import resolve_model
from blockdraft.llm import LLM
from blockdraft.speculate.drafters.other_engines import config_for_other_engine

logger = logging.getLogger(__name__)

_KINDS = ("dflash",)
"""Of drafters: neither vLLM's build for CPUs nor what we convert for llama.cpp has DFlash 2."""


@dataclass
class OtherEngine:
    """An outside engine by the name that it was asked for with.

    engine: None if it could not be started or has failed; `reason` says why.
    """

    name: str
    engine: ReadyEngine | None
    versions: Mapping[str, str]
    reason: str | None = None

    def decode(self, prompt_ids: list[int], max_tokens: int) -> OutsideOutput | Failure:
        """Its output, or why there is none; once it has failed as a whole it is not asked again."""
        if self.engine is None:
            return Failure(f"not run: {self.reason}")
        try:
            return self.engine.decode(prompt_ids, max_tokens)
        except PromptFailed as error:
            return Failure(str(error))
        except EngineFailed as error:
            self.reason = str(error)
            logger.warning("--against %s %s", self.name, self.reason)
            self.engine.close()
            self.engine = None
            return Failure(self.reason)


Start = Callable[[str, LLM, SpeedConfig], ReadyEngine]


def start_engine(name: str, llm: LLM, config: SpeedConfig) -> ReadyEngine:
    """Set up and start one engine.

    Raises:
        EngineFailed: it cannot be; says why.
    """
    if is_url(name):
        return EndpointEngine(
            name, config.against_model, llm.tokenizer, answer_seconds=config.against_timeout
        )
    engine = engine_on(llm.device, ENGINES[name])
    settings = json.dumps(settings_of(engine, llm, config))
    python = python_of(engine)
    threads = str(torch.get_num_threads())
    variables = {
        key: value for key, value in environment_for_others().items() if key != "PYTHONPATH"
    }
    variables |= {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if engine.packages:
        variables |= visible_card(llm.device)
    return EngineProcess(
        [str(python), str(engine.worker), settings],
        variables,
        answer_seconds=config.against_timeout,
    )


def engine_on(device: str, engine: OutsideEngine) -> OutsideEngine:
    """The engine for the device of our target: a build for CPUs would run on the CPU there.

    Raises:
        EngineFailed: it has none for a GPU.
    """
    if device == "cpu" or not engine.packages:
        return engine
    if engine.card_packages is None:
        raise EngineFailed(
            "cannot be compared: pip's build computes on CPUs only, and the target is on "
            f"{device}; start a server of it, and give its URL"
        )
    name = "-".join(engine.card_packages)
    return replace(engine, environment=name, packages=engine.card_packages, removed=())


def visible_card(device: str) -> dict[str, str]:
    """What lets an engine that takes the first GPU take that of our target."""
    name, _, number = device.partition(":")
    if name != "cuda" or not number:
        return {}
    # Numbers, or names, of those that this process sees.
    seen = [own for own in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if own]
    return {"CUDA_VISIBLE_DEVICES": seen[int(number)] if seen else number}


def settings_of(engine: OutsideEngine, llm: LLM, config: SpeedConfig) -> dict[str, Any]:
    """What a worker is told: the same target, precision, threads and ends as ours.

    Raises:
        EngineFailed: a model that it drafts with is missing, or not for it.
    """
    if llm.config.quantize is not None:
        raise EngineFailed(
            "cannot be compared: its weights would differ from those of --quantize "
            f"{llm.config.quantize}; leave that out"
        )
    gguf = gguf_file(llm.folder)
    assistant = None
    if engine.needs_assistant:
        if config.assistant is None:
            raise EngineFailed(
                "cannot be set up: it drafts with a small model that has the target's tokenizer; "
                "name one with --assistant"
            )
        try:
            assistant = str(resolve_model(config.assistant))
        except BlockdraftError as error:
            raise EngineFailed(f"cannot be set up: {error}") from error
    num_draft_tokens = None
    if engine.needs_drafter:
        if llm.drafter_folder is None:
            raise EngineFailed("cannot be set up: there is no drafter; name one with --drafter")
        try:
            drafter = config_for_other_engine(
                llm.drafter_folder, _KINDS, needs_index=engine.needs_index
            )
        except ModelError as error:
            raise EngineFailed(f"cannot be set up: {error}") from error
        num_draft_tokens = drafter.num_drafted
    return {
        "method": engine.method,
        "target": str(llm.folder),
        "gguf": None if gguf is None else str(gguf.resolve()),
        "drafter": str(llm.drafter_folder),
        "num_draft_tokens": num_draft_tokens,
        "assistant": assistant,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": llm.device,
        "threads": torch.get_num_threads(),
        "max_context": llm.engine.target.max_context,
        "eos_ids": sorted(llm.tokenizer.eos_ids),
        "trust_remote_code": llm.config.trust_remote_code,
    }


@contextmanager
def started_engines(
    names: Sequence[str], llm: LLM, config: SpeedConfig, start: Start = start_engine
) -> Iterator[list[OtherEngine]]:
    """Every engine that is asked for, one after the other; at the end all are ended."""
    others: list[OtherEngine] = []
    try:
        for name in names:
            try:
                engine = start(name, llm, config)
                others.append(OtherEngine(name, engine, engine.versions))
            except EngineFailed as error:
                logger.warning("--against %s %s", name, error)
                others.append(OtherEngine(name, None, {}, str(error)))
        yield others
    finally:
        for other in others:
            if other.engine is not None:
                other.engine.close()

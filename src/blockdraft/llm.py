"""Text in, text out."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from os import PathLike, fspath
from typing import Any, Literal, Self, cast, overload

import torch
from transformers import PreTrainedModel

from blockdraft.core.arguments import (
    Params,
    ids_of,
    is_one_conversation,
    is_one_prompt,
    params_for_each,
)
from blockdraft.core.config import DeviceMap, DraftDtype, KVCacheDtype, LLMConfig, Quantize
from blockdraft.core.errors import RequestError
from blockdraft.core.receipt import Receipt, read_receipt
from blockdraft.core.threads import refuse_a_fork
from blockdraft.core.uninterrupted import uninterrupted
from blockdraft.engine.audit import Audit, audit
from blockdraft.engine.completion import Chunk, Completion, Generation
from blockdraft.engine.load import load_engine
from blockdraft.engine.samples import Job, Samples
from blockdraft.engine.trained_target import warn_of_other_target
from blockdraft.engine.trained_thinking import warn_of_other_thinking
from blockdraft.hub.resolve import resolve_drafter, resolve_model
from blockdraft.measure.identity import describe_numbers
from blockdraft.measure.measuring import Meter, measured
from blockdraft.models.supported import head_dims_of
from blockdraft.models.target.loading import resolve_device, resolve_dtype, use_threads
from blockdraft.models.target.transformers import TransformersTarget
from blockdraft.text.grammar import Grammars
from blockdraft.text.outline import Outline, outline_of
from blockdraft.text.tokenizer import Message, load_tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

Prompts = list[str] | list[list[int]] | list[tuple[int, ...]]

Conversation = Sequence[Message]
"""Messages in order; each has a `role` and a `content`."""

_DEFAULTS = LLMConfig()


class LLM:
    """A target with its drafter, loaded and ready. See LLMConfig for the options.

    Not for use from several threads; several open streams of one thread are fine.

    Raises:
        ConfigError: an option has a bad value.
        ModelError: a model cannot be found or loaded, the pair does not fit, or exactness was
            asked for and this machine's kernels do not give it.
    """

    def __init__(
        self,
        target: str | PathLike[str] = _DEFAULTS.target,
        drafter: str | PathLike[str] | None = _DEFAULTS.drafter,
        *,
        dtype: str = _DEFAULTS.dtype,
        draft_dtype: DraftDtype = _DEFAULTS.draft_dtype,
        quantize: Quantize | None = _DEFAULTS.quantize,
        device: str | torch.device = _DEFAULTS.device,
        device_map: DeviceMap | None = _DEFAULTS.device_map,
        exact: bool = _DEFAULTS.exact,
        max_concurrency: int = _DEFAULTS.max_concurrency,
        prefill_chunk: int = _DEFAULTS.prefill_chunk,
        kv_cache_dtype: KVCacheDtype = _DEFAULTS.kv_cache_dtype,
        memory: float | None = _DEFAULTS.memory,
        adaptive: bool = _DEFAULTS.adaptive,
        num_draft_tokens: int | None = _DEFAULTS.num_draft_tokens,
        draft_depth: int | None = _DEFAULTS.draft_depth,
        lookup: bool | None = _DEFAULTS.lookup,
        shared_lookup: int = _DEFAULTS.shared_lookup,
        ngrams: bool = _DEFAULTS.ngrams,
        num_threads: int | None = _DEFAULTS.num_threads,
        recheck: bool = _DEFAULTS.recheck,
        trust_remote_code: bool = _DEFAULTS.trust_remote_code,
    ) -> None:
        config = LLMConfig(
            target=_as_text(target),
            drafter=None if drafter is None else _as_text(drafter),
            dtype=dtype,
            draft_dtype=draft_dtype,
            quantize=quantize,
            device=str(device) if isinstance(device, torch.device) else device,
            device_map=device_map,
            exact=exact,
            max_concurrency=max_concurrency,
            prefill_chunk=prefill_chunk,
            kv_cache_dtype=kv_cache_dtype,
            memory=memory,
            adaptive=adaptive,
            num_draft_tokens=num_draft_tokens,
            draft_depth=draft_depth,
            lookup=lookup,
            shared_lookup=shared_lookup,
            ngrams=ngrams,
            num_threads=num_threads,
            recheck=recheck,
            trust_remote_code=trust_remote_code,
        )
        self._load(config)

    @classmethod
    def of(cls, config: LLMConfig, check: Callable[[Outline], object] | None = None) -> Self:
        """Load what a configuration asks for.

        `check` is called before any weights are read, and may refuse what cannot be answered.
        """
        llm = cls.__new__(cls)
        llm._load(config, check)
        return llm

    def _load(self, config: LLMConfig, check: Callable[[Outline], object] | None = None) -> None:
        self.config = config
        use_threads(config.num_threads)
        self.num_threads = torch.get_num_threads()
        refuse_a_fork(self.num_threads)
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.folder = resolve_model(config.target)
        self.drafter_folder = resolve_drafter(config, self.folder)
        self.tokenizer = load_tokenizer(self.folder, trust_remote_code=config.trust_remote_code)
        if check is not None:
            check(outline_of(self.folder, self.tokenizer))
        self.engine = load_engine(
            self.config, self.folder, self.drafter_folder, self.dtype, self.device
        )
        if self.drafter_folder is not None:
            warn_of_other_target(self.folder, config.drafter, self.drafter_folder)
            warn_of_other_thinking(config.drafter, self.drafter_folder, self.tokenizer)
        self.tokenizer.drop_unknown_eos_ids(self.engine.target.vocab_size)
        grammars = Grammars(self.tokenizer, self.engine.target.vocab_size)
        self.samples = Samples(self.engine, self.tokenizer, grammars)

    def use_adaptive_drafting(self) -> None:
        """See Engine.use_adaptive_drafting; the limits are those of the configuration."""
        self.engine.use_adaptive_drafting(self.config.num_draft_tokens, self.config.draft_depth)

    def use_fixed_drafting(
        self, num_draft_tokens: int | None = None, draft_depth: int | None = None
    ) -> None:
        """See Engine.use_fixed_drafting."""
        self.engine.use_fixed_drafting(num_draft_tokens, draft_depth)

    def measured(self) -> AbstractContextManager[Meter]:
        """Account for all that runs inside: time, work and memory, line by line.

        `with llm.measured() as meter: llm.generate(...); ledger = meter.take()`. On a GPU it is
        waited for at every border between lines, which takes time itself.
        """
        return measured(self.engine, self.device)

    @property
    def devices(self) -> list[str]:
        """Where the layers of the target lie, each device once."""
        parameters = self._model.parameters()
        return list(dict.fromkeys(str(own.device) for own in parameters))

    @property
    def head_dims(self) -> list[int]:
        """Sizes of the heads with which the target attends."""
        return head_dims_of(self._model.config)

    @property
    def _model(self) -> PreTrainedModel:
        return cast("TransformersTarget", self.engine.target).model

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the bits of the target's logits depend on: its hash, precision, kernels, machine.

        Reads all weights the first time.
        """
        return describe_numbers(self)

    def receipts(self, generation: Generation) -> list[Receipt]:
        """What is needed to verify each sample of a generation of this LLM; see `verify`.

        Raises:
            RequestError: a sample ended with an error.
        """
        return [
            completion.receipt(
                generation.prompt_token_ids,
                generation.params,
                target=self.config.target,
                environment=self.environment,
            )
            for completion in generation.completions
        ]

    def verify(self, receipt: Receipt | Mapping[str, Any]) -> Audit:
        """Whether every token of an answer is what the target chooses, by one pass over it all.

        Takes a receipt, or its JSON. No drafter is asked. For the verdicts see Audit.

        Raises:
            RequestError: the receipt is malformed, or none that this target could have.
            ContextTooLong: prompt and output do not fit its context.
            ConfigError: the K/V memory has no room for them.
        """
        refuse_a_fork(self.num_threads)
        if not isinstance(receipt, Receipt):
            receipt = read_receipt(receipt, self.tokenizer)
        return audit(self.samples, receipt, self.environment)

    @overload
    def generate(
        self, prompts: Prompt, params: Params | None = ..., *, stream: Literal[False] = ...
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: Params | None = ...,
        *,
        stream: Literal[False] = ...,
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Prompts,
        params: Params | None = ...,
        *,
        stream: Literal[True],
    ) -> Iterator[Chunk]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        params: Params | None = None,
        *,
        stream: bool = False,
    ) -> Generation | list[Generation] | Iterator[Chunk]:
        """Continue one prompt or several, given as text or token ids; `params` may be one for each.

        Returns one Generation for one prompt and a list for a list; with `stream` an iterator of
        chunks. Closing the iterator early ends the request. Without a seed each prompt draws one.

        Raises:
            RequestError: an empty prompt, an unknown token id, a grammar that cannot be used, or
                params that are none, or another number of them than of prompts; at once, also
                with `stream`.
            ContextTooLong: a prompt and max_tokens do not fit the target's context.
        """
        is_single = is_one_prompt(prompts)
        many = cast("list[Prompt]", [prompts] if is_single else list(prompts))
        if not many:
            raise RequestError("the list of prompts is empty; give at least one")
        jobs = self._check_jobs([self._encode(prompt) for prompt in many], params)
        if stream:
            return self._run(jobs)
        generations = self._collect(jobs)
        return generations[0] if is_single else generations

    @overload
    def chat(
        self, messages: Conversation, params: Params | None = ..., *, stream: Literal[False] = ...
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params | None = ...,
        *,
        stream: Literal[False] = ...,
    ) -> list[Generation]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | None = ...,
        *,
        stream: Literal[True],
    ) -> Iterator[Chunk]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | None = None,
        *,
        stream: bool = False,
    ) -> Generation | list[Generation] | Iterator[Chunk]:
        """Answer one conversation or several; each message has a `role` and a `content`.

        Returns what `generate` returns.

        Raises:
            RequestError: as `generate`, no message, or the target has no chat template.
        """
        is_single = is_one_conversation(messages)
        many = cast("list[Conversation]", [messages] if is_single else list(messages))
        most = self.engine.limits.max_tokens
        prompts = [self.tokenizer.encode_chat(conversation, most=most) for conversation in many]
        if stream:
            return self.generate(prompts, params, stream=True)
        generations = self.generate(prompts, params)
        return generations[0] if is_single else generations

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, most=self.engine.limits.max_tokens)
        return ids_of(prompt)

    def _check_jobs(self, prompts: list[list[int]], params: Params | None) -> list[Job]:
        refuse_a_fork(self.num_threads)
        jobs = []
        for index, (prompt_ids, own) in enumerate(
            zip(prompts, params_for_each(params, len(prompts)), strict=True)
        ):
            self.samples.check(prompt_ids, own)
            seed = secrets.randbits(64) if own.seed is None else own.seed
            prediction_ids = self.samples.prediction_ids(own.prediction)
            jobs.append(Job(index, prompt_ids, own, seed, prediction_ids=prediction_ids))
        return jobs

    def _collect(self, jobs: list[Job]) -> list[Generation]:
        completions: list[list[Completion]] = [[] for _ in jobs]
        for chunk in self._run(jobs):
            if chunk.completion is not None:
                completions[chunk.prompt_index].append(chunk.completion)
        return [
            Generation(
                tuple(job.prompt_ids), tuple(sorted(done, key=lambda c: c.index)), job.params
            )
            for job, done in zip(jobs, completions, strict=True)
        ]

    def _run(self, jobs: list[Job]) -> Iterator[Chunk]:
        """Step until all samples of the jobs are finished; whatever happens, none stays behind."""
        open_keys: set[int] = set()
        try:
            for job in jobs:
                for index in range(job.params.n):
                    with uninterrupted():
                        open_keys.add(self.samples.add(job, index))
            while open_keys:
                # Another open stream may have advanced these samples too.
                with_news = open_keys.intersection(self.samples.with_news)
                if not with_news:
                    self.samples.step()
                for key in sorted(with_news):
                    chunk = self.samples.take_chunk(key)
                    if chunk.completion is not None:
                        open_keys.remove(key)
                    yield chunk
        finally:
            # Maybe called by the garbage collector, in the middle of somebody else's step. In two
            # calls, because an interrupt can come before the first line of ours, not of `extend`.
            self.samples.abandoned.extend(open_keys)
            self.samples.drop_abandoned()


def _as_text(model: str | PathLike[str]) -> str:
    """A path as the configuration has it; what is none is for the configuration to refuse."""
    return fspath(model) if isinstance(model, PathLike) else model

"""Prometheus metrics: vLLM's names for what both have, so that its dashboards and tools read them.

What speculation does beyond that has our own names. All of one app live in one registry.
"""

from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from blockdraft.engine.completion import Completion
from blockdraft.measure.phases import PHASES
from blockdraft.measure.step_report import Load, StepReport

MAX_TAGS = 32
OTHER_TAG = "other"
NO_TAG = "none"

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 600.0)
_LENGTHS = tuple(float(m * 10**n) for n in range(6) for m in (1, 2, 5))
_STATES = ("held", "kept", "free")


class Metrics:
    """Counts what the engine's steps and the requests report. A StepObserver.

    Args:
        model: the label `model_name` of all metrics.
        max_draft_depth: positions of drafts that may occur.
    """

    def __init__(self, model: str, max_draft_depth: int) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, processor time, open files, start
        self._model = model
        self._tags = {NO_TAG, OTHER_TAG}
        self._num_preempted = 0
        self._declare_speculation(max_draft_depth)
        self._declare_requests()
        self._declare_engine()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
        return histogram.labels(self._model)

    def _declare_speculation(self, max_draft_depth: int) -> None:
        name = "vllm:spec_decode_num"
        one = self._model
        self._drafts = self._counter(f"{name}_drafts", "Passes with draft tokens.").labels(one)
        self._drafted = self._counter(f"{name}_draft_tokens", "Draft tokens.").labels(one)
        self._accepted = self._counter(f"{name}_accepted_tokens", "Accepted draft tokens.").labels(
            one
        )
        by_position = self._counter(
            f"{name}_accepted_tokens_per_pos", "Accepted draft tokens, by position.", "position"
        )
        self._accepted_at = [by_position.labels(one, str(i)) for i in range(max_draft_depth)]
        self._passes = self._counter(
            "blockdraft:decode_passes",
            "Target passes after prefill, by number of draft tokens.",
            "depth",
        )
        self._pass_tokens = self._counter(
            "blockdraft:decode_tokens",
            "Tokens of target passes after prefill; divided by decode_passes: tau.",
        ).labels(one)
        self._source_drafted = self._counter(
            "blockdraft:draft_tokens", "Draft tokens of finished samples, by source.", "source"
        )
        self._source_accepted = self._counter(
            "blockdraft:accepted_tokens",
            "Accepted draft tokens of finished samples, by source.",
            "source",
        )
        self._tag_passes = self._counter(
            "blockdraft:tag_decode_passes", "Target passes of finished requests, by tag.", "tag"
        )
        self._tag_tokens = self._counter(
            "blockdraft:tag_decode_tokens",
            "Tokens of the target passes of finished requests, by tag.",
            "tag",
        )

    def _declare_requests(self) -> None:
        one = self._model
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.").labels(one)
        self._tokens = self._counter("vllm:generation_tokens", "Generated tokens.").labels(one)
        self._queried = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        ).labels(one)
        self._hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        ).labels(one)
        self._ended = self._counter(
            "vllm:request_success", "Finished samples, by reason.", "finished_reason"
        )
        self._prompt_lengths = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished sample.", _LENGTHS
        )
        self._output_lengths = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a finished sample.", _LENGTHS
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between the commits of a sample; one commit may bring several tokens.",
            _SECONDS,
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Decoding time of a sample divided by its tokens after the first.",
            _SECONDS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its end.", _LONG_SECONDS
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From the request to its first step.", _LONG_SECONDS
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "First step to first token.", _LONG_SECONDS
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", _LONG_SECONDS
        )

    def _declare_engine(self) -> None:
        one = self._model
        self._preemptions = self._counter("vllm:num_preemptions", "Preempted samples.").labels(one)
        phases = self._counter(
            "blockdraft:phase_seconds",
            "Time of the engine's loop, by phase; the phases add up to all of it.",
            "phase",
        )
        self._phases = {phase: phases.labels(one, phase) for phase in PHASES}
        self._steps = self._counter("blockdraft:steps", "Steps of the engine.").labels(one)
        self._stalls = self._counter(
            "blockdraft:stalls",
            "Gaps of over three times the sample's median gap, by whether a prompt was prefilled.",
            "cause",
        )
        self._refused = self._counter(
            "blockdraft:refused_requests", "Refused requests, by HTTP status.", "status"
        )

    def watch(self, load: Callable[[], Load]) -> None:
        """Read the gauges from `load` whenever they are asked for: they are never stale."""
        running = self._gauge("vllm:num_requests_running", "Running samples.")
        waiting = self._gauge("vllm:num_requests_waiting", "Waiting samples.")
        preparing = self._gauge(
            "blockdraft:num_requests_preparing", "Samples of requests being prepared."
        )
        share = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        pages = self._gauge("blockdraft:pages", "Pages of the KV cache.", "state")
        running.labels(self._model).set_function(lambda: load().num_running)
        waiting.labels(self._model).set_function(lambda: load().num_waiting)
        preparing.labels(self._model).set_function(lambda: load().num_preparing)
        share.labels(self._model).set_function(lambda: _share(load()))
        for state in _STATES:
            pages.labels(self._model, state).set_function(_page_counter(load, state))

    def on_step(self, report: StepReport) -> None:
        """See StepObserver."""
        one = self._model
        self._steps.inc()
        self._tokens.inc(report.num_tokens)
        self._prompt_tokens.inc(report.num_prompt_tokens)
        self._queried.inc(report.num_prompt_tokens)
        self._hits.inc(report.num_reused_tokens)
        self._pass_tokens.inc(report.num_pass_tokens)
        for (num_drafted, num_accepted), count in report.passes.items():
            self._passes.labels(one, str(num_drafted)).inc(count)
            if num_drafted:
                self._drafts.inc(count)
                self._drafted.inc(num_drafted * count)
                self._accepted.inc(num_accepted * count)
                for accepted_at in self._accepted_at[:num_accepted]:
                    accepted_at.inc(count)
        for gap in report.gaps:
            self._gap.observe(gap)
        if report.num_stalls:
            cause = "prompt" if report.has_prompt else "other"
            self._stalls.labels(one, cause).inc(report.num_stalls)
        self._preemptions.inc(report.num_preempted - self._num_preempted)
        self._num_preempted = report.num_preempted
        for phase, seconds in report.phases.seconds.items():
            self._phases[phase].inc(seconds)

    def count_end(self, completion: Completion, num_prompt: int, tag: str) -> None:
        """A sample has ended; its prompt had so many tokens."""
        timings, num_after = completion.timings, len(completion.token_ids) - 1
        self._ended.labels(self._model, completion.finish_reason).inc()
        self._prompt_lengths.observe(num_prompt)
        self._output_lengths.observe(len(completion.token_ids))
        self._first_token.observe(timings.first_token)
        self._queue_time.observe(timings.queue)
        self._prefill_time.observe(max(0.0, timings.first_token - timings.queue))
        self._decode_time.observe(timings.decode)
        self._whole.observe(timings.total)
        if num_after > 0:
            self._per_token.observe(timings.decode / num_after)
        tag = self._known_tag(tag)
        self._tag_passes.labels(self._model, tag).inc(completion.acceptance.num_passes)
        self._tag_tokens.labels(self._model, tag).inc(completion.acceptance.num_tokens)
        for source, num in completion.acceptance.drafted_by.items():
            self._source_drafted.labels(self._model, source).inc(num)
            num_accepted = completion.acceptance.accepted_by[source]
            self._source_accepted.labels(self._model, source).inc(num_accepted)

    def count_aborted(self, num_samples: int) -> None:
        """So many samples were given up by their client, or by us."""
        if num_samples:
            self._ended.labels(self._model, "abort").inc(num_samples)

    def count_refused(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    def _known_tag(self, tag: str) -> str:
        """Tags are made up by clients; a flood of them must not become a flood of time series."""
        if tag not in self._tags and len(self._tags) < MAX_TAGS:
            self._tags.add(tag)
        return tag if tag in self._tags else OTHER_TAG

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _share(load: Load) -> float:
    return 0.0 if load.pages is None else load.pages.share


def _page_counter(load: Callable[[], Load], state: str) -> Callable[[], float]:
    def count() -> float:
        pages = load().pages
        return 0.0 if pages is None else float(getattr(pages, state))

    return count

"""Where the time of a step goes: by torch's profiler, and by the engine's own ledger."""

from time import perf_counter
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # exported, but not by name
from torch.profiler import ProfilerActivity, profile

from blockdraft.bench.decode import encode_prompts
from blockdraft.bench.workload import mixed_prompts
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.measure.measuring import measured
from gpucheck.clock import wait
from gpucheck.notes import Notes
from gpucheck.pair import loaded, prompts, ways_to_measure
from gpucheck.settings import Settings

MAX_TOKENS = 200
WARM_STEPS = 4
NUM_TOP = 12
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def run(settings: Settings, notes: Notes) -> None:
    """Steps of plain and of drafted decoding, at a few numbers of requests."""
    for name, way in ways_to_measure(settings, notes).items():
        with loaded(settings, way, max_concurrency=max(settings.profiled)) as llm:
            for concurrency in settings.profiled:
                for drafts in (False, True):
                    found = _profiled(llm, settings, concurrency, drafts)
                    kind = "drafted" if drafts else "plain"
                    notes.note("steps", name, f"{concurrency} {kind}", value=found)


def _profiled(llm: LLM, settings: Settings, concurrency: int, drafts: bool) -> dict[str, Any]:
    engine, number = llm.engine, settings.profiled_steps
    llm.use_fixed_drafting(None if drafts else 0)
    params = SamplingParams(
        max_tokens=min(MAX_TOKENS, 12 * settings.max_tokens),
        ignore_eos=True,
        num_draft_tokens=None if drafts else 0,
    )
    chosen = mixed_prompts(prompts(settings), concurrency)
    keys = [engine.add(ids, params) for ids in encode_prompts(llm, chosen, params)]
    try:
        while any(engine.progress[key].sequence.num_output < 2 for key in keys):
            engine.step()
        for _ in range(WARM_STEPS):
            engine.step()
        wait(settings.device)
        begin = perf_counter()
        for _ in range(number):
            engine.step()
        wait(settings.device)
        seconds = (perf_counter() - begin) / number
        activities = [ProfilerActivity.CPU]
        if settings.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            for _ in range(number):
                engine.step()
            wait(settings.device)
        with measured(engine, settings.device) as meter:
            meter.take()
            for _ in range(number):
                engine.step()
            ledger = meter.take()
    finally:
        for key in keys:
            engine.take(key)
    lines = {line.name: line.nanoseconds / number / 1e6 for line in ledger.lines}
    return {
        "ms a step": round(1e3 * seconds, 3),
        **_summary(profiler, number),
        "ledger ms": {name: round(ms, 4) for name, ms in lines.items() if ms > 0},
    }


def _summary(profiler: Any, number: int) -> dict[str, Any]:
    """Counts and times of one step."""
    averages = profiler.key_averages()
    counts = {event.key: event.count for event in averages}
    on_device = [event for event in averages if event.device_type != DeviceType.CPU]
    busy = sum(event.self_device_time_total for event in on_device) / number
    operations = [event for event in averages if event.key.startswith("aten::")]
    return {
        "launches": sum(counts.get(name, 0) for name in LAUNCHES) / number,
        "graphs": sum(counts.get(name, 0) for name in GRAPHS) / number,
        "waits": sum(counts.get(name, 0) for name in WAITS) / number,
        "operations": sum(event.count for event in operations) / number,
        "device ms": round(busy / 1e3, 3),
        "kernels": [_row(e, e.self_device_time_total, number) for e in _largest(on_device, True)],
        "host": [_row(e, e.self_cpu_time_total, number) for e in _largest(averages, False)],
    }


def _largest(events: Any, by_device: bool) -> list[Any]:
    def time_of(event: Any) -> float:
        found = event.self_device_time_total if by_device else event.self_cpu_time_total
        return float(found)

    return sorted(events, key=time_of, reverse=True)[:NUM_TOP]


def _row(event: Any, microseconds: float, number: int) -> list[Any]:
    """Name, times a step, milliseconds a step."""
    return [event.key[:90], event.count / number, round(microseconds / number / 1e3, 4)]

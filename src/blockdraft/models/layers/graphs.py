"""Computations of a few fixed shapes, which a card replays as CUDA graphs."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch

from blockdraft.models.layers.waits import RefuseWaits

NUM_WARM = 2
"""Runs before a graph is made of one: kernels are compiled, and libraries set up. In the last one
nothing may wait for the card."""

Output = TypeVar("Output")

logger = logging.getLogger(__name__)


_are_off = ContextVar("graphs_are_off", default=False)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Run what is inside as it is, on the same memory, and capture nothing.

    For whoever looks into a forward or changes it: a graph that is replayed calls no hook and no
    other function, and one that is captured keeps what was there.
    """
    token = _are_off.set(True)
    try:
        yield
    finally:
        _are_off.reset(token)


class Graphs(Generic[Output]):
    """Runs what reads and writes memory that stays; on a card it is captured once for each shape.

    what: its name in the log. copied: of an output, since the next replay writes to the same
    memory. captures: False where nothing is captured any more, and everything runs as it is;
    why_not says why.
    """

    def __init__(self, what: str, device: torch.device, copied: Callable[[Output], Output]) -> None:
        self._what, self._device, self._copied = what, device, copied
        self.captures = device.type == "cuda"
        self.why_not = "" if self.captures else f"no graphs on {device.type}"
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}

    @property
    def shapes(self) -> list[int]:
        """What was captured, by numbers of rows."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def __call__(self, shape: int, run: Callable[[], Output]) -> Output:
        """What `run` gives, which is the same computation for all calls of a shape.

        In inference mode, whoever calls: a graph is captured in one mode and replayed in any, and
        its memory must not become a part of somebody's gradients.
        """
        if _are_off.get():
            return run()
        if self.captures and shape not in self._graphs:
            self._capture(shape, run)
        if shape not in self._graphs:
            return run()
        graph, output = self._graphs[shape]
        graph.replay()
        return self._copied(output)

    def _capture(self, shape: int, run: Callable[[], Output]) -> None:
        try:
            # The current card of this thread may be another one.
            with torch.cuda.device(self._device):
                usual = torch.cuda.current_stream()
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_stream(usual)
                # A capture that fails does not leave its stream, so this one is around it; and
                # without a stream it takes one of the card that was captured on first.
                with torch.cuda.stream(stream):
                    try:
                        for _ in range(NUM_WARM - 1):
                            run()
                        with RefuseWaits(self._device):
                            run()
                    finally:
                        # What runs next, as a graph or not, writes to the same memory.
                        usual.wait_stream(stream)
                    graph = torch.cuda.CUDAGraph()
                    # Other threads may use the card meanwhile.
                    own = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
                    with _no_collection(), own:
                        output = run()
            self._graphs[shape] = graph, output
        except RuntimeError as error:  # an operation of the model waits for the card
            self.captures, self.why_not = False, str(error).split("\n")[0]
            logger.warning("no CUDA graphs of %s: %s", self._what, self.why_not)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let Python look for cycles later: a graph of an engine that was dropped may be in one.

    To free it while another is captured would break the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

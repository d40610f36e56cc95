"""An LLM that answers at once, on a clock of its own, for tests of the measurements."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from blockdraft.bench import decode
from blockdraft.cache.memory import Memory
from blockdraft.cli import options
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ContextTooLong
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.engine.completion import Completion, Generation, Timings
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.phases import PhaseTimer
from blockdraft.speculate.drafters.none import NoDrafter
from tests.command_line import run

FIRST_TOKEN_SECONDS = 0.5
SECONDS_PER_TOKEN = {0: 0.1, 15: 0.05, "adaptive": 0.04}


def fake_allocator():
    return SimpleNamespace(policy=SimpleNamespace())


def run_bench(monkeypatch, llm, *arguments):
    """`blockdraft bench`, for which this LLM is loaded."""
    monkeypatch.setattr(options, "load_llm", lambda config, check=None: llm)
    return run("bench", *arguments)


class FakeLLM:
    """Repeats the prompt's last token. Requests come in sets that start and end together.

    A token takes SECONDS_PER_TOKEN by depth; with `slowdown`, that share more for each other
    request that runs beside it, as it is or by depth. `broken`: depths at which the second token is
    wrong.
    `calls` records (depth, requests at once, prompts, max_tokens) of each `generate`.
    """

    def __init__(
        self,
        *,
        broken=(),
        slowdown=0.0,
        folder=Path("target"),
        drafter_folder=Path("drafter"),
    ):
        self.config = LLMConfig()
        self.dtype, self.device = torch.bfloat16, "cpu"
        self.devices, self.head_dims = ["cpu"], [64]
        self.folder, self.drafter_folder = folder, drafter_folder
        self.broken = broken
        self.slowdown = slowdown
        self.now = 0.0
        self.depth = None
        self.calls = []
        self.tokenizer = SimpleNamespace(
            has_chat_template=False,
            encode=lambda text: [ord(letter) for letter in text],
            backend=SimpleNamespace(
                encode=lambda text: SimpleNamespace(ids=[ord(letter) for letter in text])
            ),
        )
        self.engine = SimpleNamespace(
            drafter=NoDrafter(),
            proposer=SimpleNamespace(
                drafters=[SimpleNamespace(kind="dflash"), SimpleNamespace(kind="lookup")]
            ),
            scheduler=SimpleNamespace(max_running=None),
            timer=PhaseTimer(clock=lambda: int(self.now * 1e9)),
            allocator=fake_allocator(),
            target=SimpleNamespace(memory=Memory(), max_context=512),
            limits=SimpleNamespace(check_prompt=self._check_prompt),
        )

    def patch_clock(self, monkeypatch):
        """Let measurements read the fake clock."""
        monkeypatch.setattr(decode, "perf_counter", lambda: self.now)
        return self

    @contextmanager
    def interrupted(self, at_once):
        """Ctrl-C when so many requests are to run at once."""
        real = self.generate

        def generate(*args):
            if self.engine.scheduler.max_running == at_once:
                raise KeyboardInterrupt
            return real(*args)

        self.generate = generate
        yield
        self.generate = real

    def use_fixed_drafting(self, num_draft_tokens):
        self.depth = num_draft_tokens

    def use_adaptive_drafting(self):
        self.depth = "adaptive"
        self.engine.allocator = fake_allocator()

    def generate(self, prompts, params):
        assert (params.num_draft_tokens == 0) == (self.depth == 0)
        at_once = self.engine.scheduler.max_running
        self.calls.append((self.depth, at_once, prompts, params.max_tokens))
        generations, start = [], self.now
        with self.engine.timer.step(), self.engine.timer.phase("forward"):
            for index, prompt in enumerate(prompts):
                running = min(at_once, len(prompts) - index // at_once * at_once)
                total = self._seconds(params.max_tokens) * self._slowdown(running)
                if index % at_once == 0:
                    waited, self.now = self.now - start, self.now + total
                generations.append(self._answer(prompt, params.max_tokens, total, waited))
        return generations

    def _seconds(self, num_tokens):
        return FIRST_TOKEN_SECONDS + (num_tokens - 1) * SECONDS_PER_TOKEN[self.depth]

    def _slowdown(self, running):
        slowdown = self.slowdown
        if isinstance(slowdown, dict):
            slowdown = slowdown[self.depth]
        return 1 + slowdown * (running - 1)

    def _answer(self, prompt, num_tokens, total, waited):
        ids = [prompt[-1]] * num_tokens
        if self.depth in self.broken:
            ids[1] += 1
        stats = AcceptanceStats()
        for _ in range((num_tokens - 1) // 2):
            if self.depth:
                stats.record(2, Proposal.chain([0, 0, 0], "fake"), [0])
            else:
                stats.record(1, NOTHING, [])
                stats.record(1, NOTHING, [])
        first = total * FIRST_TOKEN_SECONDS / self._seconds(num_tokens)
        gap = (total - first) / max(1, num_tokens - 1)
        timings = Timings(waited + first, total - first, waited + total, 0.0, waited, gap)
        completion = Completion(0, tuple(ids), "", "length", 0, None, stats, timings)
        return Generation(tuple(prompt), (completion,))

    def _check_prompt(self, prompt_ids, params):
        if len(prompt_ids) + params.max_tokens > self.engine.target.max_context:
            raise ContextTooLong(f"prompt of {len(prompt_ids)} tokens is too long")

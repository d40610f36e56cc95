"""This engine, transformers and vLLM on the same prompts, in turns, in one run.

    python tools/experiments/compare_engines.py VLLM_PYTHON --prompts PROMPTS.jsonl[.gz]
        [--block 6 --block 16] [--limit 8] [--max-tokens 128] [--rounds 3] [--modes eager compiled]
        [--preload VLLM_ENVIRONMENT/lib/libiomp5.so LIBTCMALLOC]

VLLM_PYTHON is the interpreter of an environment with vllm. Every configuration of vLLM is a process
of its own, stopped while another side works. Each prompt is decoded by every side before the next
prompt is, so that a machine that slows down favors none; see bench/speed/bench.py for our sides.
Greedy, bfloat16, one prompt at a time. Prints one JSON object.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.speed.bench import Measurement, SpeedBench
from blockdraft.bench.workload import BenchPrompt, read_workload
from blockdraft.llm import LLM
from blockdraft.measure.provenance import describe_environment

WORKER = Path(__file__).with_name("against_vllm.py")
SHUTDOWN_SECONDS = 60
REFERENCES = ("plain", "transformers", "vllm eager plain", "vllm compiled plain")


@dataclass(frozen=True)
class Timed:
    """One output; every pass kept some drafts and gave one token more."""

    token_ids: tuple[int, ...]
    seconds: float
    passes: int = 0
    kept: int = 0


@dataclass
class Side:
    """What one side made of each prompt, round after round."""

    name: str
    rounds: dict[str, list[Timed]] = field(default_factory=dict)

    def add(self, prompt_id: str, timed: Timed) -> None:
        """Note one output."""
        self.rounds.setdefault(prompt_id, []).append(timed)

    def seconds(self) -> dict[str, float]:
        """For each prompt the median over rounds."""
        return {key: median(t.seconds for t in timed) for key, timed in self.rounds.items()}

    def outputs(self) -> dict[str, tuple[int, ...]]:
        """For each prompt the tokens of the first round."""
        return {key: timed[0].token_ids for key, timed in self.rounds.items()}

    def speeds(self) -> dict[str, float]:
        """Tokens per second of each prompt, the prompt's pass included."""
        outputs = self.outputs()
        return {key: len(outputs[key]) / seconds for key, seconds in self.seconds().items()}


class VllmProcess:
    """A configuration of vLLM that runs only while it is asked."""

    def __init__(self, args: argparse.Namespace, arguments: Sequence[str]) -> None:
        preload = {"LD_PRELOAD": ":".join(map(str, args.preload))} if args.preload else {}
        self._process = subprocess.Popen(
            [str(args.vllm_python), str(WORKER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # so that signals reach the workers of vLLM too
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | preload,
        )

    def wait_until_ready(self) -> str:
        """Returns the version of vLLM."""
        version: str = self._receive()["vllm"]
        return version

    def ask(self, prompt_ids: Sequence[int]) -> Timed:
        """Decode one prompt."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        print(json.dumps(list(prompt_ids)), file=self._process.stdin, flush=True)
        sample = self._receive()
        return Timed(
            tuple(sample["token_ids"]), sample["total_seconds"], sample["passes"], sample["kept"]
        )

    def close(self) -> None:
        """End it, and the workers that it started."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM failed; run this to see why: {self._process.args!r}")
        os.killpg(self._process.pid, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


def configurations(args: argparse.Namespace, llm: LLM) -> dict[str, list[str]]:
    """Options of vLLM, plain and with every block size, in every mode."""
    common = [str(llm.folder), "--max-tokens", str(args.max_tokens), "--cores", args.cores]
    found = {}
    for mode in args.modes:
        options = [*common, "--compiled"] if mode == "compiled" else common
        found[f"vllm {mode} plain"] = options
        for block in args.block:
            drafted = ["--drafter", str(llm.drafter_folder), "--block", str(block)]
            found[f"vllm {mode} block {block}"] = options + drafted
    return found


class Comparison:
    """Sides as they come in, prompt by prompt."""

    def __init__(self, llm: LLM, processes: Mapping[str, VllmProcess]) -> None:
        self._llm, self._processes = llm, processes
        self._sides: dict[str, Side] = {}

    def add(self, measurement: Measurement) -> None:
        """Take our own sides of a prompt, and ask every vLLM for it, each first in its turn."""
        prompt = measurement.prompt
        for name in ("plain", "drafted", "transformers"):
            sample = getattr(measurement, name)
            passes, committed = sample.acceptance.num_passes, sample.acceptance.num_tokens
            seconds = sample.total_seconds
            self._note(name, prompt, Timed(sample.token_ids, seconds, passes, committed - passes))
        messages = [{"role": "user", "content": prompt.text}]
        prompt_ids = self._llm.tokenizer.encode_chat(messages)
        for name, process in self._processes.items():
            self._note(name, prompt, process.ask(prompt_ids))
        print(f"{prompt.category}/{prompt.id}", file=sys.stderr)

    def _note(self, name: str, prompt: BenchPrompt, timed: Timed) -> None:
        self._sides.setdefault(name, Side(name)).add(f"{prompt.category}/{prompt.id}", timed)

    def report(self) -> dict[str, Any]:
        """Figures of every side."""
        return {name: self._describe(side) for name, side in self._sides.items()}

    def _describe(self, side: Side) -> dict[str, Any]:
        speeds, outputs = side.speeds(), side.outputs()
        every = [timed for timeds in side.rounds.values() for timed in timeds]
        passes = sum(timed.passes for timed in every)
        references = [self._sides[name] for name in REFERENCES if name in self._sides]
        return {
            "tokens_per_second": sum(map(len, outputs.values())) / sum(side.seconds().values()),
            "median_tokens_per_second": median(speeds.values()),
            "acceptance_length": 1 + sum(timed.kept for timed in every) / passes
            if passes
            else None,
            "median_ratio_to": {
                other.name: median(speeds[key] / other.speeds()[key] for key in speeds)
                for other in references
            },
            "num_equal_to": {
                other.name: sum(outputs[key] == other.outputs()[key] for key in outputs)
                for other in references
            },
            "prompts": {key: {"tok_s": speeds[key], "token_ids": outputs[key]} for key in speeds},
        }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("vllm_python", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="prompts of each file")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--block", type=int, action="append", default=[], help="of vLLM; repeatable"
    )
    parser.add_argument("--our-draft-tokens", type=int, help="if not a whole block")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument(
        "--preload", type=Path, nargs="+", help="libraries that vLLM asks for: libiomp5, tcmalloc"
    )
    parser.add_argument("--cores", default="0-1", help="that vLLM binds its threads to")
    return parser.parse_args()


def main() -> None:
    """Start every side, go through the prompts, and report."""
    args = parse_arguments()
    llm = LLM(dtype="bfloat16", num_draft_tokens=args.our_draft_tokens)
    bench = SpeedBench(llm)
    workload = [prompt for path in args.prompts for prompt in read_workload(path, args.limit)]
    # A stopped process would stay behind for good: end like Ctrl-C, through the stack.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        processes = {}
        for name, options in configurations(args, llm).items():
            processes[name] = VllmProcess(args, options)
            stack.callback(processes[name].close)
            version = processes[name].wait_until_ready()
            print(f"ready: {name}", file=sys.stderr)
        comparison = Comparison(llm, processes)
        config = SpeedConfig(max_tokens=args.max_tokens)
        bench.run(workload * args.rounds, config, comparison.add)
    facts = describe_environment() | {"threads": torch.get_num_threads(), "rounds": args.rounds}
    facts["versions"] |= {"vllm": version}
    json.dump(facts | {"sides": comparison.report()}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

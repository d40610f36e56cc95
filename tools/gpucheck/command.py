"""The command line of tools/gpu_check.py."""

import argparse
import logging
from pathlib import Path

from gpucheck.parts import PARTS, part_named
from gpucheck.private import Scrubber
from gpucheck.report import write_report
from gpucheck.runner import Runner
from gpucheck.settings import settings_for
from gpucheck.weights import join_pieces

MINUTES = 25.0


def main(arguments: list[str], description: str | None = None) -> int:
    """Run the parts that are asked for; 1 if one of them failed or ran out of time."""
    asked = _parser(description).parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    out, work = asked.out.absolute(), (asked.work or asked.out / "work").absolute()
    work.mkdir(parents=True, exist_ok=True)
    if asked.weights is not None:
        join_pieces(asked.weights, work / "cache")
    settings = settings_for(
        work,
        is_rehearsal=asked.rehearse,
        target=asked.target,
        drafter=asked.drafter,
        train_minutes=asked.train_minutes,
        piece_megabytes=asked.piece_megabytes,
    )
    scrubber = Scrubber.of_this_machine(out, work)
    runner = Runner(
        work, settings, on_result=lambda: write_report(out, work, scrubber, settings.is_rehearsal)
    )
    named = None if asked.parts is None else [part_named(name) for name in asked.parts.split(",")]
    runner.run(runner.waiting(PARTS) if named is None else named, asked.minutes * 60)
    print((out / "report.md").read_text(encoding="utf-8"))
    return 1 if runner.has_failed else 0


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the report")
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--parts", help=f"these only, again if they have run: {names}")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="of this call; the next one goes on"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--work", type=Path, help="folder of what stays between calls: OUT/work")
    parser.add_argument("--target", help="name or folder of the target: the default one")
    parser.add_argument("--drafter", help="name or folder of its drafter")
    parser.add_argument(
        "--weights", type=Path, help="folder with the default target's GGUF file, or pieces of it"
    )
    parser.add_argument("--train-minutes", type=float, help="of training: what is left of a call")
    parser.add_argument(
        "--piece-megabytes", type=int, default=15, help="of the pieces of the trained drafter"
    )
    return parser

"""The command line of tools/gpu_check.py."""

import argparse
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from types import FrameType

import torch

from blockdraft.core.errors import BlockdraftError
from blockdraft.core.files import folder_lock
from gpucheck.parts import PARTS, Part, part_named
from gpucheck.private import Scrubber
from gpucheck.report import write_findings, write_report
from gpucheck.runner import Runner
from gpucheck.settings import SETTINGS, Settings, read_settings, settings_for
from gpucheck.weights import join_pieces

MINUTES = 25.0
ENDED_BY_USER = 130
SAME_OF_ALL_CALLS = ("is_rehearsal", "target", "drafter")

logger = logging.getLogger(__name__)


def main(arguments: list[str], description: str | None = None) -> int:
    """Run the parts that are asked for; 1 if one of them failed or ran out of time."""
    asked = _parser(description).parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    named = None if asked.parts is None else [part_named(name) for name in asked.parts.split(",")]
    if not asked.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here; --rehearse runs all parts on a CPU")
    out = asked.out.absolute()
    # Beside the report, so that OUT holds what may be sent and nothing else.
    work = (asked.work or out.with_name(f"{out.name}-work")).absolute()
    try:
        with _signals_interrupt(), folder_lock(work):
            return _checked(asked, out, work, named)
    except KeyboardInterrupt:
        logger.info("stopped; the same command runs the remaining parts")
        return ENDED_BY_USER
    except (OSError, BlockdraftError) as error:
        raise SystemExit(
            f"{out} and {work}: {error}; fix this, and run the same command again"
        ) from error


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """As Ctrl-C does. Else the part that runs would stay on the card when a terminal is closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # by nohup, for instance
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _checked(asked: argparse.Namespace, out: Path, work: Path, named: list[Part] | None) -> int:
    out.mkdir(parents=True, exist_ok=True)
    settings = settings_for(
        work,
        is_rehearsal=asked.rehearse,
        target=asked.target,
        drafter=asked.drafter,
        train_minutes=asked.train_minutes,
        piece_megabytes=asked.piece_megabytes,
    )
    _refuse_other(work / SETTINGS, settings)
    if asked.weights is not None:
        join_pieces(asked.weights, work / "cache")
    given = [Path(name) for name in (asked.target, asked.drafter) if name is not None]
    scrubber = Scrubber.of_this_machine(out, work, *(one for one in given if one.is_absolute()))
    place = out, work, scrubber, settings.is_rehearsal
    runner = Runner(
        work,
        settings,
        on_result=lambda: write_report(*place),
        meanwhile=lambda: write_findings(*place),
    )
    runner.run(runner.waiting(PARTS) if named is None else named, asked.minutes * 60)
    print((out / "report.md").read_text(encoding="utf-8"))
    if waiting := [part.name for part in runner.waiting(PARTS)]:
        logger.info("not done: %s; the same command runs them", ", ".join(waiting))
    return 1 if runner.has_failed else 0


def _refuse_other(path: Path, settings: Settings) -> None:
    """Parts of a rehearsal, or of another pair, must not stand in the report as if they were ours.

    Raises:
        SystemExit: an earlier call had something else to check.
    """
    if not path.exists():
        return
    earlier = read_settings(path)
    for name in SAME_OF_ALL_CALLS:
        before, now = getattr(earlier, name), getattr(settings, name)
        if before != now:
            what = "was not a rehearsal" if now is True else f"had {name} {before}, not {now}"
            what = "was a rehearsal" if before is True else what
            raise SystemExit(f"{path.parent} is of a check that {what}; give another folder as OUT")


def _number(text: str) -> float:
    """A number above zero."""
    found = float(text)
    if not (isfinite(found) and found > 0):
        raise ValueError
    return found


def _whole_number(text: str) -> int:
    """A whole number above zero."""
    if (found := int(text)) <= 0:
        raise ValueError
    return found


# What argparse calls them when it refuses a value.
_number.__name__, _whole_number.__name__ = "number above zero", "whole number above zero"


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the report")
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--parts", help=f"these only, again if they have run: {names}")
    parser.add_argument(
        "--minutes", type=_number, default=MINUTES, help="of this call; the next call continues"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--work", type=Path, help="folder of what stays between calls: OUT-work")
    parser.add_argument("--target", help="name or folder of the target: the default one")
    parser.add_argument("--drafter", help="name or folder of its drafter")
    parser.add_argument(
        "--weights", type=Path, help="folder with the default target's GGUF file, or pieces of it"
    )
    parser.add_argument("--train-minutes", type=_number, help="of training: what is left of a call")
    parser.add_argument(
        "--piece-megabytes",
        type=_whole_number,
        default=15,
        help="of the pieces of the trained drafter",
    )
    return parser

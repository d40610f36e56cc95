"""Runs random cases in a process of its own: `python -m tests.fuzz.run shapes --case SEED`.

A fault in native code ends this process, and not the tests. Standard output is for the process that
started it: one JSON object a line, each case named before it begins.
"""

import argparse
import json
import logging
import random
import sys
import time
import warnings
from pprint import pformat
from typing import Any

from tests.fuzz.cases import GENERATORS
from tests.fuzz.runner import Report, run_case


def case_seed(seed: int, part: int, index: int) -> int:
    """Of one case of a run; a run may have several parts side by side."""
    return random.Random(f"{seed} {part} {index}").getrandbits(48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fuzz", choices=sorted(GENERATORS))
    parser.add_argument("--case", type=int, help="run this case alone and show it")
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if args.case is not None:
        sys.exit(_run_one(args.fuzz, args.case))
    _run_many(args)


def _run_one(fuzz: str, seed: int) -> int:
    case = GENERATORS[fuzz](seed)
    print(pformat(case), flush=True)  # noqa: T201
    report = run_case(case)
    print(pformat(report), *report.wrong, sep="\n")  # noqa: T201
    return 1 if report.wrong else 0


def _run_many(args: argparse.Namespace) -> None:
    end, index = time.monotonic() + args.seconds, args.first
    while time.monotonic() < end:
        seed = case_seed(args.seed, args.part, index)
        _tell(case=seed, index=index)
        _tell(done=seed, **_plain(run_case(GENERATORS[args.fuzz](seed))))
        index += 1


def _plain(report: Report) -> dict[str, Any]:
    tally = {**vars(report.tally), "widths": sorted(report.tally.widths)}
    return {"wrong": report.wrong, "refused": report.refused, "tally": tally}


def _tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

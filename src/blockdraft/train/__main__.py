"""The trainer alone: `PYTHONPATH=src python -m blockdraft.train [RUN.toml] [KEY=VALUE]...`.

For machines that have torch and transformers and nothing else of what the command line needs.
Settings are those of `blockdraft train`; the answers have to be there.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from blockdraft.core.errors import BlockdraftError, ConfigError, exit_status
from blockdraft.core.signals import sigterm_raises
from blockdraft.train.advice import below_plain
from blockdraft.train.config_file import RunFile, resolve_run
from blockdraft.train.estimate import estimate_run
from blockdraft.train.interrupted import how_to_go_on
from blockdraft.train.keys import describe_keys
from blockdraft.train.parallel import launched
from blockdraft.train.texts import are_written
from blockdraft.train.trainer import train
from blockdraft.train.untrained import write_untrained


def main(arguments: Sequence[str]) -> int:
    """Do what is asked for, and print where the drafter is; returns the exit status."""
    asked = _parser().parse_intermixed_args(arguments)
    if asked.keys:
        sys.stdout.write(describe_keys())
        return 0
    logging.basicConfig(format="blockdraft: %(message)s", level=logging.WARNING)
    run, is_main = None, True
    try:
        is_main = launched()[0] == 0
        logging.getLogger("blockdraft").setLevel(logging.INFO if is_main else logging.WARNING)
        run = resolve_run(asked.settings)
        with sigterm_raises():
            text = _described(run, asked)
    except KeyboardInterrupt as stop:
        if is_main:
            line = how_to_go_on(run) if run else "interrupted"
            sys.stderr.write(f"blockdraft: {line}\n")
        return exit_status(stop)
    except (BlockdraftError, OSError) as error:
        sys.stderr.write(f"blockdraft: {' '.join(str(error).split())}\n")
        return exit_status(error)
    if is_main:
        sys.stdout.write(f"{text}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m blockdraft.train",
        description="Train a drafter; starting it again with the same `out` resumes the run.",
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="RUN.toml | KEY=VALUE",
        help="a file of settings, and settings that override it",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--keys", action="store_true", help="print all keys of RUN.toml")
    instead.add_argument(
        "--plan",
        action="store_true",
        help="print the time and memory of the run, as JSON",
    )
    instead.add_argument("--init-only", action="store_true", help="write the untrained drafter")
    return parser


def _described(run: RunFile, asked: argparse.Namespace) -> str:
    """What to print at the end: the plan, or the drafter's folder."""
    if asked.plan:
        return json.dumps(estimate_run(run.train, run.answers).to_dict(), indent=2)
    if asked.init_only:
        return str(write_untrained(run.train, run.answers))
    if run.answers is not None and not are_written(run.answers):
        raise ConfigError(
            f"{run.answers.output} holds no finished answers; write them with `blockdraft data`"
        )
    result = train(run.train)
    if line := below_plain(result.best):
        logging.getLogger("blockdraft").warning("%s", line)
    return str(result.drafter)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The trainer alone: `PYTHONPATH=src python -m blockdraft.train [RUN.toml] [KEY=VALUE]...`.

For machines that have torch and transformers and nothing else of what the command line needs.
Settings are those of `blockdraft train`; the answers have to be there.
"""

import logging
import sys
from collections.abc import Sequence

from blockdraft.core.errors import BlockdraftError, ConfigError
from blockdraft.train.config_file import resolve_run
from blockdraft.train.parallel import launched
from blockdraft.train.texts import are_written
from blockdraft.train.trainer import train


def main(arguments: Sequence[str]) -> int:
    """Train, and tell where the drafter is; returns the exit status."""
    is_main = launched()[0] == 0
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(format="blockdraft: %(message)s", level=logging.WARNING)
    logging.getLogger("blockdraft").setLevel(level)
    try:
        run = resolve_run(arguments)
        if run.answers is not None and not are_written(run.answers):
            raise ConfigError(
                f"{run.answers.output} holds no finished answers; write them with `blockdraft data`"
            )
        result = train(run.train)
    except BlockdraftError as error:
        sys.stderr.write(f"blockdraft: {' '.join(str(error).split())}\n")
        return 2
    if is_main:
        sys.stdout.write(f"{result.drafter}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

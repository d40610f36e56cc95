"""What the measuring commands share: their checks, progress and reports."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.bench.context.prose import Prose
from blockdraft.bench.sets import read_prompts
from blockdraft.bench.workload import BUNDLED, BenchPrompt
from blockdraft.cli import options
from blockdraft.cli.output import (
    check_not_read,
    check_writable,
    describe_llm,
    print_json,
    write_report,
)
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.core.fingerprint import sample_files
from blockdraft.core.request import SamplingParams
from blockdraft.core.words import counted
from blockdraft.hub.catalog import display_name
from blockdraft.measure.identity import describe_card
from blockdraft.measure.provenance import describe_environment

if TYPE_CHECKING:
    from blockdraft.llm import LLM
    from blockdraft.text.outline import Outline

Output = Annotated[
    Path | None, typer.Option(help="Also write a report with all results, as JSON, to this file.")
]

Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSONL file of prompts, or the name of a set that `bench sets` lists. Repeatable.",
        show_default="the bundled ones",
    ),
]
SetsFolder = Annotated[
    Path | None,
    typer.Option("--sets", help="Folder with your copies of the sets that --prompts names."),
]


def read_prompts_or_bundled(paths: Sequence[Path] | None, folder: Path | None) -> list[BenchPrompt]:
    """The prompts of files and sets, or the bundled ones.

    Raises:
        ConfigError: see `read_prompts`.
    """
    return read_prompts(paths or [BUNDLED], folder, None)


def check_before_loading(
    llm_config: LLMConfig, output: Path | None, inputs: Sequence[Path] | None = None
) -> None:
    """Refuse at once what would fail only after minutes of measuring.

    inputs: files that are read, over which no report is written.

    Raises:
        ConfigError: there is no drafter, or the report could not be written.
    """
    check_not_read(output, inputs)
    if not llm_config.drafts:
        raise ConfigError(
            "there is nothing to compare without a drafter; name one with --drafter, or add "
            "--lookup"
        )
    check_writable(output)


def load_for_prompts(
    llm_config: LLMConfig,
    workload: Sequence[BenchPrompt],
    all_params: Sequence[SamplingParams],
    *,
    multi_turn: bool = False,
) -> "LLM":
    """Load the pair; prompts that it cannot answer are refused before weights are read.

    multi_turn: see `check_prompts`.
    """

    def check(outline: "Outline") -> None:
        from blockdraft.bench.decode import check_prompts

        for params in all_params:
            check_prompts(outline, workload, params, multi_turn=multi_turn)

    return options.load_llm(llm_config, check)


def parse_points(name: str, text: str) -> tuple[int, ...]:
    """Read numbers with commas between them.

    Raises:
        ConfigError: one is no number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; give numbers such as 1,2,4") from error


def show_points(points: tuple[int, ...]) -> str:
    """The text that `parse_points` reads."""
    return ",".join(map(str, points))


def publish(report: Mapping[str, Any], output: Path | None, *, as_json: bool) -> None:
    """Write the report to the file that was asked for, and print it if JSON was.

    Raises:
        DiskError: the file cannot be written; JSON was printed all the same.
    """
    try:
        if output is not None:
            write_report(output, json.dumps(report, indent=2) + "\n")
    finally:
        if as_json:
            print_json(report)


_WEIGHTS = ("*.safetensors", "*.gguf")


def settings_of(
    configs: Sequence[LLMConfig],
    llms: Sequence["LLM"],
    options: object,
    prompts: Sequence[BenchPrompt | Prose],
) -> dict[str, Any]:
    """All that must be the same for a run that was ended to go on, as plain values for JSON.

    configs: as they were asked for, and the LLM that was loaded for each. prompts: or what they are
    cut from.
    """
    import torch

    environment = describe_environment()
    texts = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    folders = {folder for llm in llms for folder in (llm.folder, llm.drafter_folder) if folder}
    return {
        # How many threads are taken may depend on what else runs.
        "models": [asdict(replace(one, num_threads=None)) for one in configs],
        "threads": torch.get_num_threads(),
        "cards": [describe_card(llm) for llm in llms],
        # A folder may hold other weights by now, such as those of another training.
        "weights": {str(folder): sample_files(folder, _WEIGHTS) for folder in sorted(folders)},
        "options": options,
        "prompts": sha256(texts.encode()).hexdigest(),
        **{name: environment[name] for name in ("git_commit", "versions", "machine")},
    }


def headline(llm: "LLM") -> str:
    """What was measured, on two lines."""
    loaded = describe_llm(llm)
    drafter = loaded["drafter"]
    pair = "without a draft model" if drafter is None else f"drafted by {display_name(drafter)}"
    exact = "exact" if loaded["exact"] else "NOT exact: outputs may differ"
    return (
        f"{display_name(loaded['target'])} {pair}\n"
        f"{loaded['dtype']} on {loaded['device']}, {counted(loaded['threads'], 'thread')}, {exact}"
    )


def requests_of(count: int, max_tokens: int) -> str:
    """How much was asked for, in the title of a table."""
    return f"{counted(count, 'request')} of at most {counted(max_tokens, 'token')}"


class Progress:
    """Counts what is finished on standard error."""

    def __init__(self, label: str, total: int, unit: str = "prompts") -> None:
        self._label, self._total, self._unit, self._done = label, total, unit, 0

    def advance(self, _measurement: object) -> None:
        """Note one more."""
        self._done += 1
        end = "\n" if self._done == self._total else ""
        if sys.stderr.isatty() or end:
            line = f"\r{self._label}: {self._done}/{self._total} {self._unit}"
            print(line, end=end, file=sys.stderr)

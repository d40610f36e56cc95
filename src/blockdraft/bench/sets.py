"""The sets of prompts that have names: what each is, and its file in a folder that the user keeps.

None of them comes with this project. A file is (gzipped) JSONL, a row for each prompt, as
`workload.py` reads it. Loads no model library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockdraft.bench.workload import BenchPrompt, chosen, read_workload
from blockdraft.core.config import Thinking
from blockdraft.core.errors import ConfigError
from blockdraft.data.boxed import BOXED_LINE


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A set: its name, its file without endings, rows, license and source.

    use: what it measures. suffix: what the paper's benchmark adds to each prompt and the published
    file does not hold.
    """

    name: str
    file: str
    num_prompts: int | None
    license: str
    source: str
    use: str
    suffix: str = ""


_NOT_SHARED = "third parties': measure, do not share"

SETS = {
    one.name: one
    for one in (
        PromptSet(
            "gsm8k", "gsm8k_test", 1319, "MIT", "openai/grade-school-math", "paper", BOXED_LINE
        ),
        PromptSet("math500", "math500", 500, "MIT", "hendrycks/math, 500 of its test", "paper"),
        PromptSet("aime25", "aime25", 30, _NOT_SHARED, "MAA", "paper"),
        PromptSet("humaneval", "humaneval", 164, "MIT", "openai/human-eval", "paper"),
        PromptSet("mbpp", "mbpp_sanitized_test", 257, "CC-BY-4.0", "google-research/mbpp", "paper"),
        PromptSet(
            "livecodebench", "livecodebench_v1", 400, _NOT_SHARED, "LiveCodeBench v1", "paper"
        ),
        PromptSet("mt-bench", "mt_bench", 80, "Apache-2.0", "lm-sys/FastChat", "paper"),
        PromptSet("spec-bench", "spec_bench", 480, "Apache-2.0", "hemingkx/Spec-Bench", "mixed"),
        PromptSet(
            "speed-bench",
            "speed_bench",
            None,
            "license of your copy",
            "nvidia/SPEED-Bench",
            "mixed",
        ),
        PromptSet("ifeval", "ifeval", 541, "Apache-2.0", "google-research/ifeval", "formats"),
        PromptSet("bfcl", "bfcl_v4", 1258, "Apache-2.0", "ShishirPatil/gorilla", "tools"),
        PromptSet("qmsum", "qmsum_test", 105, "MIT", "Yale-LILY/QMSum", "long context"),
        PromptSet(
            "kv-retrieval", "kv_retrieval_75", 100, "MIT", "lost-in-the-middle", "long context"
        ),
    )
}


def read_prompts(
    names: Sequence[Path],
    folder: Path | None,
    limit: int | None,
    seed: int = 0,
    thinking: Thinking = "template",
) -> list[BenchPrompt]:
    """The prompts of files and of sets by name, `limit` of each at most, drawn by the seed.

    thinking: what the chat template is told for each.

    Raises:
        ConfigError: one is neither, a set has no file in `folder`, or a file holds no prompts.
    """
    return [
        replace(prompt, thinking=thinking)
        for name in names
        for prompt in chosen(_read(name, folder), limit, seed)
    ]


def files_of(names: Sequence[Path] | None, folder: Path | None) -> list[Path]:
    """The files that `read_prompts` reads; none without names.

    Raises:
        ConfigError: a set has no file in `folder`.
    """
    known = ((name, _known(name)) for name in names or ())
    return [name if one is None else _file_of(one, folder) for name, one in known]


def _known(name: Path) -> PromptSet | None:
    """The set of a name; a file of that name goes before it."""
    return None if name.is_file() else SETS.get(str(name))


def _read(name: Path, folder: Path | None) -> list[BenchPrompt]:
    known = _known(name)
    if known is None:
        if not name.suffix and not name.exists():
            raise ConfigError(
                f"--prompts {name} is neither a file nor a set; sets are {', '.join(SETS)}, and "
                "`blockdraft bench sets` says what each is"
            )
        return read_workload(name)
    prompts = read_workload(_file_of(known, folder))
    return [
        replace(prompt, category=known.name, text=prompt.text + known.suffix)
        if known.use == "paper"
        else prompt
        for prompt in prompts
    ]


def _file_of(known: PromptSet, folder: Path | None) -> Path:
    if folder is None:
        raise ConfigError(
            f"--prompts {known.name} is a set whose file you must bring; name the folder that "
            f"holds {known.file}.jsonl or {known.file}.jsonl.gz with --sets"
        )
    for ending in (".jsonl", ".jsonl.gz"):
        if (path := folder / (known.file + ending)).is_file():
            return path
    raise ConfigError(
        f"{folder} holds neither {known.file}.jsonl nor {known.file}.jsonl.gz, the set "
        f"{known.name} ({known.source}); put it there, one row for each prompt, with turns or "
        "prompt"
    )

"""Several ways to draft, in one run: tau and speed-up on each set of prompts.

    python tools/experiments/compare_ways.py --way [NAME: ]KEY=VALUE[,KEY=VALUE]... [--way ...]...
        [--plain KEY=VALUE[,KEY=VALUE]...] --prompts FILE [--prompts FILE]... [--limit 20]
        [--max-tokens 192] [--temperature 0] [--unlike FILE]... [--output FILE]

A way is options of LLM, such as drafter=FOLDER, lookup=false, draft_dtype=target, adaptive=false
(whole blocks) or num_draft_tokens=7; the values are JSON or else text. `--plain` has those of plain
decoding, such as another target, which is then that of each way too. Every prompt is decoded
plainly and in each way, in turns that another one begins each time; of a conversation every turn,
behind the answers of plain decoding. Prompts are taken evenly from each file, and their sets are
the files' names, or with `--by-category` what the prompts say; those that overlap a prompt of
`--unlike`, such as those of training, are left out. Prints a table for all outputs and one for
those that do not loop, and exits with 1 if any drafted output differs from the plain one. The
result also lists the prompts, and for each way its drafter's parameters, how it was trained, and
the milliseconds of drafting and of verifying in a target pass. With `--output` a run that was ended
goes on when the same command is given again.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from blockdraft.bench.config import warm_up_of
from blockdraft.bench.decode import encode_prompt, encode_prompts, in_turn
from blockdraft.bench.journal import Journal, journal_path
from blockdraft.bench.result import VERSION, describe_memory, resumed
from blockdraft.bench.speed.bench import Measurement
from blockdraft.bench.speed.figures import DEFINITIONS, Figures, groups_of
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.bench.workload import BenchPrompt, read_workload
from blockdraft.cli.bench_output import settings_of
from blockdraft.core.jsonl import set_name
from blockdraft.core.recorder import Line
from blockdraft.core.request import SamplingParams
from blockdraft.data.overlap import Overlap
from blockdraft.data.prompts import read_prompts
from blockdraft.llm import LLM
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.measure.provenance import describe_environment
from blockdraft.text.sent_back import as_sent_back

PLAIN = "plain"


DRAFT_LINES: tuple[Line, ...] = ("free", "inject", "draft", "draft_head", "guess")
VERIFY_LINES: tuple[Line, ...] = ("accepted", "bonus", "siblings", "wasted", "choose")
NUM_COSTED = 2
"""Prompts that are decoded again, with the time of every part of a step."""
COSTS = {
    "draft_ms": "milliseconds for each target pass that went into proposals: the drafter's "
    "forwards and head, the choice among its logits, features of generated tokens, lookup",
    "verify_ms": "milliseconds of the target's forward for each of its passes behind the prompt, "
    "and of its choices; both over the first prompts, decoded again with a ledger",
    "num_parameters": "numbers in the drafter's files, parts of the target that it shares left out",
}


def name_of(way: str) -> str:
    """What stands before the options, or else the options."""
    return way.partition(": ")[0]


def read_way(text: str) -> dict[str, Any]:
    """Options of LLM, from [NAME: ]KEY=VALUE,KEY=VALUE."""
    options = {}
    for item in filter(None, text.rpartition(": ")[2].split(",")):
        key, _, value = item.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def read_sets(
    paths: Iterable[Path], limit: int, unlike: Sequence[Path], *, by_category: bool
) -> list[BenchPrompt]:
    """At most so many of each file, evenly, in sets by file or by category."""
    chosen: list[BenchPrompt] = []
    trained = Overlap(prompt.text for path in unlike for prompt in read_prompts(path))
    for path in paths:
        prompts = [prompt for prompt in read_workload(path) if prompt.text not in trained]
        some = prompts[:: -(-len(prompts) // limit)]
        if not by_category:
            some = [replace(prompt, category=set_name(path)) for prompt in some]
        chosen += some
    return chosen


def decode(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
    """One output, as it is measured."""
    return timed_output(llm.generate(prompt_ids, params).completions[0])


def describe_way(
    llm: LLM, prompt_ids: Sequence[list[int]], params: SamplingParams
) -> dict[str, Any]:
    """Options, drafter and costs of a way, of decoding some prompts again; see COSTS."""
    passes, lines = 0, Counter[Line]()
    with llm.measured() as meter:
        for ids in prompt_ids:
            passes += decode(llm, ids, params).acceptance.num_passes
            lines.update(meter.take_totals().line_nanoseconds)

    def each(names: Sequence[Line]) -> float:
        return sum(lines.get(name, 0) for name in names) / passes / 1e6

    return {
        "config": asdict(llm.config),
        "draft_ms": each(DRAFT_LINES),
        "verify_ms": each(VERIFY_LINES),
        **({} if llm.drafter_folder is None else describe_drafter(llm.drafter_folder)),
    }


def describe_drafter(folder: Path) -> dict[str, Any]:
    """Its size, and what its training says of itself."""
    num_parameters = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        num_parameters += sum(prod(shape) for shape in shapes)
    path = folder / "provenance.json"
    provenance = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        "num_parameters": num_parameters,
        "training": {
            key: provenance[key] for key in ("config", "result", "data") if key in provenance
        },
    }


def measure(
    llms: Mapping[str, LLM],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    journal: Journal[Mapping[str, TimedOutput]],
) -> dict[str, list[Measurement]]:
    """Every turn of every prompt, in every way and by the LLM without a drafter, which is PLAIN.

    What the journal holds is not measured again.
    """
    plain = llms[PLAIN]
    encoded = encode_prompts(plain, prompts, params)
    for llm in llms.values():
        decode(llm, encoded[0], warm_up_of(params))
    rows: dict[str, list[Measurement]] = {name: [] for name in llms if name != PLAIN}
    number = 0
    for index, prompt in enumerate(prompts):
        answers: list[str] = []
        for turn in range(1, 2 + len(prompt.later)):
            samples = journal.done.get((index, turn))
            check = plain.engine.limits.check_prompt
            ids = encode_prompt(plain.tokenizer, check, prompt, params, answers)
            if samples is None:
                samples = {
                    name: decode(llms[name], ids, params) for name in in_turn(list(llms), number)
                }
                journal.add((index, turn), samples)
            number += 1
            for name, measured in rows.items():
                measured.append(Measurement(prompt, samples[PLAIN], samples[name], None, turn=turn))
            answers.append(as_sent_back(plain.tokenizer, ids, samples[PLAIN].token_ids))
        print(f"{index + 1} of {len(prompts)} prompts", flush=True)
    return rows


def table(rows: Mapping[str, Sequence[Measurement]]) -> str:
    """Tau and speed-up by set and way, as Markdown; in brackets the number of outputs."""
    lines = ["| set | " + " | ".join(f"{name}: tau | over plain (95 %)" for name in rows) + " |"]
    lines.append("|---" * (1 + 2 * len(rows)) + "|")
    by_name = {name: groups_of(measured) for name, measured in rows.items()}
    # Outputs do not depend on drafts, so all have the same groups.
    for group, first in next(iter(by_name.values())).items():
        cells = [f"{group} ({first.num_prompts})"]
        for figures in (by_set[group] for by_set in by_name.values()):
            cells += [f"{figures.acceptance_length:.2f}", _speedup(figures)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _speedup(figures: Figures) -> str:
    """With its band, if there are several prompts."""
    band = figures.speedup_bands["plain"]
    if band is None or band.low is None or band.high is None:
        return f"{figures.speedup_over_plain:.2f} (no spread)"
    return f"{band.value:.2f} ({band.low:.2f}-{band.high:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        *("--way",),
        action="append",
        required=True,
        metavar="[NAME: ]KEY=VALUE,...",
        help="options of LLM",
    )
    parser.add_argument("--plain", default="", help="options of LLM for plain decoding")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-category", action="store_true", help="instead of by file")
    parser.add_argument(
        "--unlike", type=Path, action="append", default=[], help="prompts of training"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    names = [name_of(way) for way in args.way]
    if len(set(names)) < len(names) or PLAIN in names:
        parser.error(f"--way gives a name twice, or {PLAIN!r}; leave it out")
    prompts = read_sets(args.prompts, args.limit, args.unlike, by_category=args.by_category)
    # Each has a target of its own, and so has plain decoding: where weights lie matters.
    shared = read_way(args.plain)
    llms = {PLAIN: LLM(drafter=None, **shared)}
    llms |= {name: LLM(**shared | read_way(way)) for name, way in zip(names, args.way, strict=True)}
    for llm in llms.values():
        compute_every_prompt(llm.engine)
    # Not the whole `args`: where the result lies changes nothing.
    configs = [llm.config for llm in llms.values()]
    settings = settings_of(configs, list(llms.values()), [names, asdict(params)], prompts)
    path = journal_path(args.output)
    journal = Journal[Mapping[str, TimedOutput]](path, settings, "compare_ways.py")
    rows = measure(llms, prompts, params, journal)
    again = encode_prompts(llms[PLAIN], prompts, params)[:NUM_COSTED]
    if args.output is not None:
        report = {
            "result": "ways",
            "result_version": VERSION,
            **describe_environment(),
            "memory": describe_memory(),
            "definitions": DEFINITIONS | resumed("speed") | COSTS,
            "num_resumed": journal.num_found,
            "settings": {key: str(value) for key, value in vars(args).items()},
            "prompts": [
                {
                    "id": row.prompt.id,
                    "turn": row.turn,
                    "category": row.prompt.category,
                    "num_tokens": len(row.plain.token_ids),
                    "num_passes": {
                        name: some[index].drafted.acceptance.num_passes
                        for name, some in rows.items()
                    },
                    "differ": [name for name, some in rows.items() if not some[index].identical],
                    "loops": row.loops,
                }
                for index, row in enumerate(next(iter(rows.values())))
            ],
            "ways": {name: describe_way(llm, again, params) for name, llm in llms.items()},
            "figures": {
                name: {group: asdict(figures) for group, figures in groups_of(measured).items()}
                for name, measured in rows.items()
            },
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    journal.remove()
    print(f"all outputs\n\n{table(rows)}")
    straight = {name: [row for row in some if not row.loops] for name, some in rows.items()}
    if all(straight.values()):
        print(f"\nwithout those that loop\n\n{table(straight)}")
    num_different = sum(not row.identical for some in rows.values() for row in some)
    print(f"\n{num_different} of {sum(map(len, rows.values()))} drafted outputs differ from plain")
    raise SystemExit(1 if num_different else 0)


if __name__ == "__main__":
    main()

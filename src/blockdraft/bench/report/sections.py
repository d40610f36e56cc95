"""What a report says of each kind of result: facts, tables and plots. Loads no model library."""

from collections.abc import Callable, Mapping
from typing import Any

from blockdraft.bench.report import load_sections, speed_sections, summary
from blockdraft.bench.report.section import Section, without_repeats
from blockdraft.bench.result import Result, damage_refused
from blockdraft.measure.provenance import command_line

_SECTIONS: Mapping[str, Callable[[Result], Section]] = {
    "summary": summary.summary_section,
    "speed": speed_sections.speed_section,
    "ways": speed_sections.ways_section,
    "concurrency": load_sections.concurrency_section,
    "pareto": load_sections.pareto_section,
    "never-slower": load_sections.never_slower_section,
    "context": speed_sections.context_section,
    "traffic": load_sections.traffic_section,
    "break-even": speed_sections.break_even_section,
    "plan": load_sections.plan_section,
}


def section_of(result: Result) -> Section:
    """The section of a result, by its kind.

    Raises:
        ConfigError: it lacks what its kind has, such as the baseline.
    """
    with damage_refused(result):
        made = _SECTIONS[result.kind](result)
        return Section(
            title=f"{result.name}: {made.title}",
            facts=[*_origin(result), *made.facts],
            grids=[without_repeats(grid) for grid in made.grids],
            plots=made.plots,
            definitions=dict(result.values.get("definitions", {})),
        )


def _origin(result: Result) -> list[str]:
    """Command, machine, versions and commit, as far as a result says them."""
    values = result.values
    facts = [f"Machine: {result.machine}."]
    command = values.get("command")
    if isinstance(command, list) and command:
        facts.append(f"Command: {command_line(command)}")
    about = [f"{key} {values[key]}" for key in ("date", "git_commit") if values.get(key)]
    versions = values.get("versions", {})
    about += [f"{name} {version}" for name, version in versions.items() if version]
    config = values.get("config", {})
    about += [f"{key} {config[key]}" for key in ("target", "drafter", "dtype") if config.get(key)]
    about += _kernel_words(values)
    memory = values.get("memory", {}).get("most_process_bytes")
    if memory:
        about.append(f"at most {memory / 2**30:.2f} GiB held")
    return [*facts, ", ".join(about)]


def _kernel_words(values: Mapping[str, Any]) -> list[str]:
    """Which kernels and instructions a result ran with; earlier results do not say it."""
    if "kernels" not in values:
        return []
    card, instructions, kernels = values["card"], values["instructions"], values["kernels"]
    if card["gpu"]:
        return [f"Triton kernels ({card['triton']})" if card["triton"] else "no Triton kernels"]
    registers = " with matrix registers" if kernels["matrix_registers"] else ""
    words = [f"C++ kernels{registers}" if kernels["used"] else "no C++ kernels"]
    words += [f"{name}={value}" for name, value in instructions["variables"].items()]
    return [*words, f"CPU has {' '.join(instructions['cpu_flags']) or 'none of our instructions'}"]

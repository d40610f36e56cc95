"""`blockdraft prove`: that drafting changes nothing, on the user's own pair and machine."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import options
from blockdraft.cli.bench_output import check_before_loading
from blockdraft.cli.logs import LOG
from blockdraft.cli.output import print_json, write_report
from blockdraft.cli.stages import stage_progress
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import INTERRUPTED, NO, DiskError
from blockdraft.core.words import counted
from blockdraft.proof.config import QUICK, ProofConfig
from blockdraft.proof.corpus import BUNDLED, first_of_each_kind, read_prompts
from blockdraft.proof.page import make_page
from blockdraft.proof.replay import compare, read_certificate, settings_of
from blockdraft.proof.summary import MARKS, Mark, sections, setting_line, verdict_line

if TYPE_CHECKING:
    from blockdraft.proof.findings import Findings
    from blockdraft.text.outline import Outline

_PROOF = ProofConfig()

BESIDE_REPLAY = {"replay", "output", "html", "as_json"}
"""Options that say nothing of what is proven."""
_COLORS: Mapping[Mark, str] = {"ok": "green", "failed": "bold red", "note": "dim"}


@options.models(
    without=(
        *options.DRAFTED,
        "recheck",
        "lookup",
        "shared_lookup",
    )
)
def prove(
    ctx: typer.Context,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Take one prompt of each kind: about two minutes on two cores."
        ),
    ] = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSONL file of your own prompts, in addition to the bundled ones. Repeatable."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum length of an output, in tokens.",
            show_default=f"{_PROOF.max_tokens}, quick {QUICK['max_tokens']}",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the first case; the others count on.")
    ] = _PROOF.seed,
    output: Annotated[
        Path | None, typer.Option(help="Write the certificate, all results as JSON, to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the certificate as a page to this HTML file.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Repeat the proof of a certificate, and report what differs."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Test that drafting changes no output of these two models on this machine.

    Decodes prompts with and without drafting, in several modes, and compares the outputs bit for
    bit. Then plants faults in the engine, which these tests must catch. Exits with 0 if no output
    differs, and with 1 if one does, a planted fault is missed, or a test tested nothing.
    """
    asked = _options(ctx.params) if replay is None else _replayed(ctx, replay)
    inputs = [*asked.paths, *([] if replay is None else [replay])]
    for path in (output, html):
        check_before_loading(asked.llm_config, path, inputs)
    certificate = _prove(asked, output, html)
    if as_json:
        print_json(certificate)
    else:
        _print_report(certificate)
    _write(certificate, output, html)
    raise typer.Exit(_exit_code(certificate))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to prove; `before` is the certificate to compare with, if one is replayed."""

    llm_config: LLMConfig
    config: ProofConfig
    paths: list[Path]
    before: Mapping[str, Any] | None = None


def _options(values: Mapping[str, Any]) -> _Asked:
    changed: dict[str, Any] = dict(QUICK) if values["quick"] else {}
    changed["seed"] = values["seed"]
    if values["max_tokens"] is not None:
        changed["max_tokens"] = values["max_tokens"]
    # The proof says itself how deep to draft.
    llm_config = replace(options.llm_config(values), adaptive=False)
    return _Asked(llm_config, ProofConfig(**changed), values["prompts"] or [])


def _replayed(ctx: typer.Context, path: Path) -> _Asked:
    """What a certificate says.

    Raises:
        ConfigError: it cannot be read, or an option is given that it settles.
    """
    options.refuse_others(ctx, BESIDE_REPLAY, "--replay takes everything from the certificate")
    certificate = read_certificate(path)
    return _Asked(*settings_of(certificate), certificate)


def _prove(asked: _Asked, output: Path | None, html: Path | None) -> dict[str, Any]:
    """Run the proof; what is known is written after each stage, and after an interrupt."""
    corpus = read_prompts(BUNDLED)
    if asked.config.one_of_a_kind:
        corpus = first_of_each_kind(corpus)
    own = [prompt for path in asked.paths for prompt in read_prompts(path)]

    def check(outline: "Outline") -> None:
        from blockdraft.proof.cases import check_own

        check_own(outline, own, asked.config)

    llm = options.load_llm(replace(asked.llm_config, recheck=True), check)
    from blockdraft.measure.graphs import describe_graphs
    from blockdraft.proof.certificate import describe_proof, make_certificate
    from blockdraft.proof.prove import Proof

    description = describe_proof(llm, asked.config, asked.paths)

    def certify(findings: "Findings") -> dict[str, Any]:
        """The certificate of what is known by now."""
        graphs = describe_graphs(llm.engine.target, llm.engine.drafter)
        certificate = make_certificate(description | {"graphs": graphs}, findings)
        if asked.before is not None:
            certificate |= {"replay": compare(asked.before, certificate)}
        return certificate

    def keep(findings: "Findings") -> None:
        """Write what is known by now; a disk that is full does not end the proof."""
        try:
            _write(certify(findings), output, html)
        except DiskError as error:
            LOG.warning("%s; the proof continues", error)

    with stage_progress() as on_progress:
        proof = Proof(llm, asked.config, corpus, own, on_progress=on_progress, on_stage=keep)
        try:
            proof.run()
        except KeyboardInterrupt:
            print("blockdraft: interrupted; the results so far follow", file=sys.stderr)
    return certify(proof.findings)


def _write(certificate: Mapping[str, Any], output: Path | None, html: Path | None) -> None:
    """Write the files that were asked for.

    Raises:
        DiskError: one cannot be written.
    """
    if output is not None:
        write_report(output, json.dumps(certificate, indent=2, ensure_ascii=False) + "\n")
    if html is not None:
        write_report(html, make_page(certificate))


def _exit_code(certificate: Mapping[str, Any]) -> int:
    changed = certificate.get("replay", {}).get("changes", [])
    if certificate["failures"] or any(change["area"] == "outputs" for change in changed):
        return NO
    return INTERRUPTED if certificate["partial"] else 0


def _print_report(certificate: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    print(f"{certificate['config']['target']} {setting_line(certificate)}")
    for section in sections(certificate):
        table = Table(title=section.title, title_justify="left", box=None, show_header=False)
        for line in section.lines:
            mark = Text(MARKS[line.mark], style=_COLORS[line.mark])
            table.add_row(mark, Text(line.name), Text(line.found))
        console.print(table)
    print(verdict_line(certificate))
    if left_out := certificate["left_out"]:
        print(f"{counted(len(left_out), 'prompt')} left out because the target cannot take them")
    print(f"{certificate['seconds']:.0f} s, {counted(len(certificate['cases']), 'case')}")

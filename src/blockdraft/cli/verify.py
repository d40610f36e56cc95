"""`blockdraft verify`: whether every token of an answer is what the target chooses."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli import options
from blockdraft.cli.output import print_json
from blockdraft.core.errors import NO, UNDECIDED
from blockdraft.core.receipt import Receipt, read_answers, read_receipt
from blockdraft.core.words import counted

if TYPE_CHECKING:
    from blockdraft.engine.audit import Audit
    from blockdraft.llm import LLM
    from blockdraft.text.outline import Outline

_EXIT_CODES = {"genuine": 0, "altered": NO, "cannot tell": UNDECIDED}
_WORST_FIRST = ("altered", "cannot tell", "genuine")


@options.models(without=("max_concurrency", *options.DRAFTED, "shared_lookup"))
def verify(
    ctx: typer.Context,
    answer: Annotated[
        Path,
        typer.Argument(
            help="JSON file: what `generate --receipt` wrote, or a server's answer to a request "
            'with "receipt": true.'
        ),
    ],
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Afterwards decode the answer again, plain and, if there is a drafter, drafted, "
            "and compare the times. Only this needs the drafter.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check an answer token by token, in one pass instead of decoding it again.

    Exits with 0 if every token is the target's choice, with 1 if one is not or the answer ends
    elsewhere, and with 6 if it differs but comes from another machine, precision or version.
    """
    answers = read_answers(answer)
    receipts: list[Receipt] = []

    def check(outline: "Outline") -> None:
        for one in answers:
            receipts.append(read_receipt(one, outline.tokenizer))
            params, num_output = receipts[-1].params, max(1, len(receipts[-1].token_ids))
            outline.check(
                receipts[-1].prompt_token_ids, replace(params, max_tokens=num_output, min_tokens=0)
            )

    config = options.llm_config(ctx.params)
    llm = options.load_llm(config if compare else replace(config, drafter="none"), check)
    found = [_verify(llm, receipt, compare=compare) for receipt in receipts]
    verdict = next(one for one in _WORST_FIRST if one in {each["verdict"] for each in found})
    if as_json:
        print_json({"verdict": verdict, "answers": found})
    else:
        for one in found:
            _print_audit(one)
    raise typer.Exit(_EXIT_CODES[verdict])


def _verify(llm: "LLM", receipt: Receipt, *, compare: bool) -> dict[str, Any]:
    found = _describe(llm, receipt, llm.verify(receipt))
    return found | {"compare": _compare(llm, receipt)} if compare else found


def _describe(llm: "LLM", receipt: Receipt, audit: "Audit") -> dict[str, Any]:
    finding = audit.finding
    described = None
    if finding is not None:
        described = asdict(finding)
        for name in ("found", "expected"):
            described[f"{name}_text"] = _text_of(llm, described[name])
        described["text_before"] = llm.tokenizer.decode(receipt.token_ids[: finding.position])
    return {
        "verdict": audit.verdict,
        "index": receipt.index,
        "finish_reason": receipt.finish_reason,
        "num_prompt_tokens": len(receipt.prompt_token_ids),
        "num_tokens": audit.num_tokens,
        "seconds": audit.seconds,
        "finding": described,
        "changes": [asdict(change) for change in audit.changes],
    }


def _text_of(llm: "LLM", token_id: int | None) -> str | None:
    if token_id is None or not llm.engine.limits.is_token(token_id):
        return None
    return llm.tokenizer.decode_all([token_id])


def _compare(llm: "LLM", receipt: Receipt) -> dict[str, Any]:
    """Seconds of the audit and of decoding the sample again, both warm, no prompt reused."""
    from blockdraft.bench.config import warm_up_of
    from blockdraft.engine.audit import decode_again
    from blockdraft.measure.measuring import compute_every_prompt

    compute_every_prompt(llm.engine)
    ways = {"plain": False} | ({} if llm.drafter_folder is None else {"drafted": True})
    warm_up = replace(receipt, params=warm_up_of(receipt.params))
    found: dict[str, Any] = {}
    for way, is_drafted in ways.items():
        decode_again(llm.samples, warm_up, is_drafted=is_drafted)
        completion = decode_again(llm.samples, receipt, is_drafted=is_drafted)
        found[way] = {
            "seconds": completion.timings.total,
            "num_tokens": len(completion.token_ids),
            "tokens_per_second": completion.timings.tokens_per_second,
        }
    found["audit_seconds"] = llm.verify(receipt).seconds
    for way in ways:
        found[way]["audit_share"] = found["audit_seconds"] / found[way]["seconds"]
    return found


def _print_audit(found: Mapping[str, Any]) -> None:
    tokens = counted(found["num_tokens"], "token")
    print(f"sample {found['index']}: {found['verdict'].upper()}, {tokens}")
    if found["finding"] is None:
        print("  every token, and the end, is the target's choice")
    else:
        _print_finding(found["finding"])
    if found["changes"]:
        print("  a differing token would prove nothing here:")
        for change in found["changes"]:
            print(f"    {_change_line(change)}")
    num_prompt = counted(found["num_prompt_tokens"], "prompt token")
    print(f"  audited in {found['seconds']:.3g} s, with {num_prompt}")
    if "compare" in found:
        _print_comparison(found["compare"])


def _change_line(change: Mapping[str, Any]) -> str:
    name, then, now = change["name"], change["then"], change["now"]
    if name == "environment":
        return "the receipt names no environment"
    if then == now:
        return f"{name}: {now!r} in the receipt and here"
    return f"{name}: {then!r} in the receipt, {now!r} here"


def _print_finding(finding: Mapping[str, Any]) -> None:
    print(f"  {finding['what']} at output position {finding['position']}: {finding['why']}")
    if finding["found"] is not None:
        print(f"    found   {finding['found']} {finding['found_text']!r}")
    if finding["expected"] is not None:
        print(f"    target  {finding['expected']} {finding['expected_text']!r}")
    if finding["margin"] is not None:
        print(f"    margin  {finding['margin']:.3g} in logits")
    print(f"    behind  {finding['text_before'][-60:]!r}")


def _print_comparison(found: Mapping[str, Any]) -> None:
    for way in ("plain", "drafted"):
        if way in found:
            one = found[way]
            print(
                f"  {way} decoding of {counted(one['num_tokens'], 'token')} takes "
                f"{one['seconds']:.3g} s, and the audit {found['audit_seconds']:.3g} s: "
                f"{one['audit_share']:.1%} of that"
            )

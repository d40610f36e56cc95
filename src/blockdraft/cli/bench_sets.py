"""`blockdraft bench sets`."""

from dataclasses import asdict

from blockdraft.bench.sets import SETS
from blockdraft.cli import options
from blockdraft.cli.output import print_json


def sets(as_json: options.Json = False) -> None:
    """List the sets of prompts that `bench speed --prompts NAME --sets FOLDER` knows.

    None comes with blockdraft: FOLDER holds your copies.
    """
    if as_json:
        print_json([asdict(one) for one in SETS.values()])
        return
    print(
        "Name: what it measures (paper: one of the seven sets of the DFlash paper), prompts, "
        "license, source;\nbelow it the file that the folder of --sets must hold."
    )
    for one in SETS.values():
        number = "" if one.num_prompts is None else f"{one.num_prompts} prompts, "
        suffix = " (with the boxed-answer line added)" if one.suffix else ""
        print(f"{one.name}: {one.use}, {number}{one.license}, from {one.source}{suffix}")
        print(f"    {one.file}.jsonl or {one.file}.jsonl.gz")

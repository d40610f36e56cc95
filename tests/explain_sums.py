"""What the sums of an explanation must hold, counted again from its rounds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MOST_OTHER = 0.05
"""Of the rejections of a run, those whose cause is not known."""


def check_sums(report: Mapping[str, Any]) -> int:
    """Hold a report against its own rounds; the number of rejections in it.

    Each round of which a draft was not kept is one rejection, with one cause: over all prompts, of
    each prompt, of each category of prompts, of each kind of text, and of each place in the block.
    """
    prompts = report["prompts"]
    for one in prompts:
        _check(one["sums"], [one])
    _check(report["sums"], prompts)
    for group in report["groups"]:
        _check(group["sums"], [one for one in prompts if one["category"] == group["category"]])
    num_rejected: int = report["sums"]["num_rejected"]
    assert num_rejected == sum(group["sums"]["num_rejected"] for group in report["groups"])
    return num_rejected


def _check(sums: Mapping[str, Any], prompts: Iterable[Mapping[str, Any]]) -> None:
    rounds = [one for prompt in prompts for one in prompt["rounds"]]
    rejected = [one for one in rounds if one["num_kept"] < len(one["drafted_ids"])]
    causes = Counter(one["rejection"]["cause"] for one in rejected)
    assert +Counter(sums["causes"]) == causes
    assert sums["num_rejected"] == len(rejected) == causes.total()
    assert all(one["rejection"] is None for one in rounds if one not in rejected)
    assert causes["other"] <= MOST_OTHER * len(rejected)
    for parts in (sums["by_kind"].values(), sums["by_slot"]):
        counted = sum((Counter(part["causes"]) for part in parts), Counter())
        assert counted == causes
        for part in parts:
            assert part["num_rejected"] == sum(part["causes"].values())
    slots = Counter(one["rejection"]["slot"] for one in rejected)
    assert {i: part["num_rejected"] for i, part in enumerate(sums["by_slot"])} == {
        i: slots[i] for i in range(len(sums["by_slot"]))
    }

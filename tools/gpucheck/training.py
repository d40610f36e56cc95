"""Training from the committed answers, with true tau before and after."""

import json
import logging
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockdraft.core.files import write_whole
from blockdraft.train.config import TrainConfig
from blockdraft.train.run_log import evaluations, read_log
from blockdraft.train.trainer import train
from gpucheck.notes import Notes
from gpucheck.recipe import WAYS, train_config
from gpucheck.settings import Settings

LAST_SECONDS = 150.0
"""For the start, the last evaluation and what users may expect of the drafter."""
PLAN = "plan.json"
MEGABYTE = 2**20


def run(settings: Settings, notes: Notes) -> None:
    """Train, or go on with what an interrupted call has left."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = notes.work / "training"
    folder.mkdir(exist_ok=True)
    plan = _plan(folder / PLAN, settings, notes)
    notes.note("plan", value=plan)
    config = replace(
        train_config(settings, folder / "run"),
        **WAYS[plan["way"]],
        max_minutes=plan["minutes"],
        max_steps=settings.train_steps,
        # One on the way, in case that the last one never comes.
        eval_minutes=max(3.0, (plan["minutes"] or 0.0) / 2),
        save_minutes=2.0,
    )
    try:
        _train(config, notes)
    finally:
        drafter = folder / "run" / "drafter"
        if drafter.exists():
            pieces = pack(drafter, notes.work, settings.piece_megabytes * MEGABYTE)
            notes.note("pieces", value=[piece.name for piece in pieces])


def _plan(path: Path, settings: Settings, notes: Notes) -> dict[str, Any]:
    """What the first call decided: a run goes on only as it began."""
    if path.exists():
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return plan
    minutes = settings.train_minutes
    if minutes is None and settings.train_steps is None:
        minutes = max(1.0, (notes.seconds - LAST_SECONDS) / 60)
    plan = {"way": _fastest(notes), "minutes": minutes}
    write_whole(path, json.dumps(plan))
    return plan


def _fastest(notes: Notes) -> str:
    """The way with the most blocks a second of those that were timed; the first if none was."""
    timed = notes.earlier("steps").get("ways", {})
    known = {name: found.get("blocks_per_second", 0) for name, found in timed.items()}
    return max(known, key=lambda name: known[name]) if known else next(iter(WAYS))


def _train(config: TrainConfig, notes: Notes) -> None:
    try:
        result = train(config)
        notes.note("num_steps", value=result.num_steps)
    finally:
        if rows := evaluations(config.out):
            notes.note("evaluations", value=[_kept(row) for row in rows])
        seconds = [row["seconds"] for row in read_log(config.out) if "seconds" in row]
        if seconds:
            notes.note("steps so far", value=len(seconds))
            notes.note("seconds a step", value=round(sum(seconds) / len(seconds), 4))


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": row["step"],
        "minutes": row["minutes"],
        "held_out_tau": row["held_out"]["tau"],
        "loss": row["held_out"]["loss"],
        "true_tau": row["true_tau"],
        "speedup": row["speedup"],
    }


def pack(drafter: Path, work: Path, size: int) -> list[Path]:
    """The drafter as one archive in pieces: `cat drafter.tar.* | tar x` gives it back."""
    for stale in work.glob("drafter.tar*"):
        stale.unlink()
    whole = work / "drafter.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(drafter, "drafter")
    pieces: list[Path] = []
    with whole.open("rb") as file:
        while part := file.read(size):
            pieces.append(work / f"drafter.tar.{len(pieces):03d}")
            pieces[-1].write_bytes(part)
    whole.unlink()
    return pieces

"""What stands above results: models by their names, and counts with the right noun."""

import json

import pytest
import torch

from blockdraft.cli.bench_output import headline
from blockdraft.core.config import LLMConfig
from blockdraft.core.words import counted
from blockdraft.diagnose.doctor.machine_checks import threads_check
from blockdraft.hub.catalog import CATALOG, PROVENANCE_FILE, display_name
from blockdraft.hub.resolve import resolve_model
from blockdraft.proof.summary import setting_line
from tests.bench_fakes import FakeLLM

DRAFTER = "smollm2-135m-dflash"


@pytest.fixture
def package_folder():
    return resolve_model(DRAFTER)


@pytest.mark.parametrize(("number", "shown"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads")])
def test_one_thing_is_no_plural(number, shown):
    assert counted(number, "thread") == shown


def test_a_model_is_called_by_its_name(tmp_path, package_folder):
    snapshot = "/cache/models--org--name/snapshots/0123"
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / PROVENANCE_FILE).write_text(json.dumps({"name": "smollm2-135m"}))
    assert display_name(str(package_folder)) == DRAFTER
    assert display_name(str(converted)) == "smollm2-135m"
    assert display_name(snapshot) == "org/name"
    assert all(display_name(name) == name for name in CATALOG)
    assert display_name("runs/mine/drafter") == "runs/mine/drafter"


def test_the_headline_of_a_measurement(monkeypatch, package_folder):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert headline(FakeLLM(drafter_folder=package_folder)).splitlines() == [
        f"smollm2-135m drafted by {DRAFTER}",
        "bfloat16 on cpu, 1 thread, exact",
    ]
    assert headline(FakeLLM(drafter_folder=None)).startswith("smollm2-135m without a draft model\n")


def test_the_headline_of_a_proof(package_folder):
    certificate = {
        "drafter_folder": str(package_folder),
        "threads": 1,
        "config": {"dtype": "float32", "device": "cpu", "exact": True},
        "card": {"gpu": None, "triton": None},
    }
    expected = f"drafted by {DRAFTER}; float32 on cpu, 1 thread, exact"
    assert setting_line(certificate) == expected
    certificate |= {"card": {"gpu": "NVIDIA Test", "triton": False}}
    certificate["config"] |= {"device": "cuda:0"}
    assert "float32 on cuda:0 (NVIDIA Test), 1 thread" in setting_line(certificate)


def test_the_doctor_counts_threads_and_cores(monkeypatch):
    monkeypatch.setattr("blockdraft.core.machine.num_cpus", lambda: 1)
    assert threads_check(LLMConfig(num_threads=1)).found.startswith("1 thread, 1 core")

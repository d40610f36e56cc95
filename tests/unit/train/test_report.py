"""The page of a run: its axes and tables can be read, whatever has been measured so far."""

import re

import pytest

from blockdraft.train.report import write_report
from tests.rows import write_rows


def evaluation(step, tau, marginal, real):
    return {
        "step": step,
        "minutes": 0.1,
        "tokens": 1000,
        "held_out": {"tau": tau, "marginal_tau": marginal, "loss": 2.0, "accuracy": [0.0, 0.0]},
        "true_tau": {"all": real},
        "speedup": {"all": 1.0},
        "measured_on": "",
    }


@pytest.mark.parametrize(
    "rows",
    [
        [evaluation(0, 1.003, 1.0, 1.001)],
        [evaluation(0, 1.0000001, 1.0, 1.0)],
        [evaluation(0, 2.441, 2.4, 2.45), evaluation(9, 2.444, 2.4, 2.449)],
    ],
)
def test_the_labels_of_an_axis_differ_and_are_short(tmp_path, rows):
    write_rows(tmp_path / "log.jsonl", rows)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    charts = page.split("<figure>")[1:]
    assert len(charts) >= 4
    for chart in charts:
        labels = re.findall(r'text-anchor="end">([-\d.e]+)<', chart)
        assert len(set(labels)) == 3
        assert all(len(label) <= 6 for label in labels)


def test_every_column_has_a_name(tmp_path):
    rows = [evaluation(0, 1.0, 1.0, 1.0), evaluation(9, 2.0, 2.0, 2.0)]
    write_rows(tmp_path / "log.jsonl", rows)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert all(re.findall(r'<th scope="col">(.*?)</th>', page))
    assert page.count(">kept<") == 1

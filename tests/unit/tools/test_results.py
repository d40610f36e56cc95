"""README's plot and tables are what tools/results.py makes from the committed figures."""

import copy
import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("results", ROOT / "tools" / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tool):
    return tool.read_results()


def test_committed_files_are_up_to_date(tool, results):
    for path, text in tool.documents(results).items():
        found = (ROOT / path).read_text(encoding="utf-8")
        assert found == text, f"{path} is out of date; run `python tools/results.py`"


@pytest.mark.parametrize("run", ["benchmarks", "untuned"])
def test_another_figure_changes_every_file(tool, results, run):
    other = copy.deepcopy(results)
    other["runs"][run]["all"]["greedy"]["speedup"] = 0.5
    now, then = tool.documents(results), tool.documents(other)
    assert [path for path in now if now[path] == then[path]] == []


def test_the_plot_is_drawn_to_scale_and_inside_its_frame(tool, results):
    root = ElementTree.fromstring(tool.plot(results))
    bars = [e for e in root if e.get("class") in ("greedy", "sampled") and e.get("height") == "14"]
    rows = [row for run in results["runs"].values() for row in tool.all_rows(run)]
    speedups = [row[kind]["speedup"] for row in rows for kind in ("greedy", "sampled")]
    assert len(bars) == len(speedups)
    unit = tool.x_of(1.0) - tool.LEFT
    for bar, speedup in zip(bars, speedups, strict=True):
        assert float(bar.get("width")) == pytest.approx(speedup * unit, abs=0.2)
        assert tool.LEFT + float(bar.get("width")) < tool.WIDTH - tool.RIGHT


def test_a_missing_mark_is_told(tool):
    with pytest.raises(SystemExit, match="lacks the mark"):
        tool.between_marks("no marks here", "content", Path("README.md"))

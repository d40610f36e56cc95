"""Colors of curves that stand in one chart can be told apart, in both schemes."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from blockdraft.bench.report.svg import STYLE as STYLE_OF_A_PLOT
from blockdraft.report import render

STYLE = Path(render.__file__).with_name("templates") / "style.css"
FAR = 30.0
"""CIE 1976 distance; two shades of one color are nearer."""
TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / np.array([[0.9505], [1.0], [1.0888]])


def lab(color):
    """Lightness, green to red and blue to yellow of "#rrggbb"."""
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ linear
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_are_told_apart_by_color(scheme):
    style = STYLE.read_text(encoding="utf-8")
    ground = dict(re.findall(r"(--\w+): (#\w{6});", style.split("@media")[0]))
    dark = dict(re.findall(r"(--\w+): (#\w{6});", style.split("@media")[1].split("* {")[0]))
    named = ground | (dark if scheme == "dark" else {})
    curves = re.findall(r"\.color-(\d) \{ --color: (?:var\((--\w+)\)|(#\w{6}));", style)
    colors = {number: named[name] if name else value for number, name, value in curves}
    assert len(colors) == 8
    near = [
        (one, other)
        for one, other in itertools.combinations(colors, 2)
        if np.linalg.norm(lab(colors[one]) - lab(colors[other])) < FAR
    ]
    assert near == []


def test_bands_are_seen_on_their_bars_in_a_dark_plot():
    band = re.search(r"\.spread \{ stroke: (#\w{6}); \}", STYLE_OF_A_PLOT)[1]
    bars = re.findall(r"\.way-\d \{ color: (#\w{6}); \}", STYLE_OF_A_PLOT)
    assert len(bars) == 6
    assert min(lab(band)[0] - lab(bar)[0] for bar in bars) > 10

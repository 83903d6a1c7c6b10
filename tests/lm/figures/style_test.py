"""One style: light and dark, legible without color, the same bytes for the same figure."""

import ast
import re
import sys

import matplotlib.image
import numpy as np
import pytest

from fp8jax import figures
from fp8jax.lm.figures import style as style_of
from fp8jax.lm.figures.style import panels, require_matplotlib, svg_text
from tests.support import ROOT


def lightness(color: str) -> float:
    """Relative luminance of #rrggbb as WCAG defines it, from 0 to 1."""
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def contrast(a: str, b: str) -> float:
    low, high = sorted([lightness(a), lightness(b)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_stand_out_from_the_background(dark):
    with style_of(dark=dark) as look:
        assert contrast(look.text, look.background) > 7
        assert contrast(look.muted, look.background) > 4.4
        assert contrast(look.bad, look.background) > 4.5
        # Half of Okabe and Ito's colors are light: markers and line styles tell them apart too.
        assert min(contrast(color, look.background) for color in look.colors) > 2.2
        heat = look.heat()(np.linspace(0, 1, 32))[:, :3] @ [0.2126, 0.7152, 0.0722]
        assert np.all(np.diff(heat) < 0) if look.ink else np.all(np.diff(heat) > 0)


def test_each_curve_has_a_second_cue():
    with style_of() as look:
        lines = [look.line(i) for i in range(49)]
    for cue in ("color", "marker", "linestyle"):
        assert len({str(line[cue]) for line in lines[:7]}) == 7
    assert len({(line["color"], line["marker"]) for line in lines}) == 49


def drawn(dark=False):
    with style_of(dark=dark) as look:
        figure, grid = panels(1, 1, height=1.0)
        grid[0][0].plot([1, 2], [3, 4], **look.line(0))
    return figure


def test_files_are_written_twice_with_the_same_bytes(tmp_path):
    png, svg = figures.save(drawn(), tmp_path / "new" / "v1.5")
    again = figures.save(drawn(), tmp_path / "again")
    assert (png.name, svg.name) == ("v1.5.png", "v1.5.svg")
    assert [png.read_bytes(), svg.read_bytes()] == [path.read_bytes() for path in again]
    pixels = matplotlib.image.imread(png)
    assert pixels.shape[:2] == (200, 1400) and tuple(pixels[0, 0, :3]) == (1, 1, 1)
    with pytest.raises(ValueError, match="without .svg"):
        figures.save(drawn(), tmp_path / "a.svg")


def test_dark_figures_keep_their_background_in_svg():
    text = svg_text(drawn(dark=True))
    assert not re.search(r' d="[^"]*\.\d{3}', text) and " d=" in text
    assert text.startswith("<svg") and "#15181c" in text and "#ffffff" not in text


def test_a_style_ends():
    before = matplotlib.rcParams["figure.facecolor"]
    with style_of(dark=True):
        assert matplotlib.rcParams["figure.facecolor"] == "#15181c"
    assert matplotlib.rcParams["figure.facecolor"] == before


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        require_matplotlib()
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        figures.number_formats()


def test_matplotlib_is_imported_only_in_functions():
    for path in (ROOT / "fp8jax/lm/figures").glob("*.py"):
        at_top = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert "matplotlib" not in " ".join(map(ast.unparse, at_top)), path

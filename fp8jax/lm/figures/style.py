"""The one style of all figures: sizes for print, colors for every reader, light and dark.

Colors are those of Okabe and Ito, which color-blind readers can tell apart. Each color comes with a
marker and a line style of its own, and scales of colors grow steadily in lightness, so that figures
stay legible in grayscale. matplotlib is an extra (`pip install matplotlib`) and is imported
when a figure is made.
"""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH = 7.0  # inches: two columns of a printed page


class NothingToDraw(ValueError):
    """The run, the rows or the benchmark lack what a figure shows; the message says what.

    Example:
      >>> run = fp8jax.figures.RunFiles(path=Path("runs/a"), name="a")
      >>> fp8jax.figures.losses(run)
      Traceback (most recent call last):
      fp8jax.lm.figures.style.NothingToDraw: a: no loss in metrics.jsonl
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """The colors of one version of the style.

    Attributes:
      colors: of lines, in order; neighbors differ most.
      text, muted, background: of text and axes, of what is only for reference, of the page.
      bad: of what went wrong.
      few, many: the ends of the part of the color map "cividis" that shows on the background.
      ink: whether the color of the largest number of a heat map is the darkest.
    """

    colors: tuple[str, ...]
    text: str
    muted: str
    background: str
    bad: str
    few: float
    many: float
    ink: bool

    def line(self, index: int) -> dict[str, Any]:
        """Returns color, marker and line style of the index-th curve, as keywords of `plot`.

        Each of the first seven differs from the others in all three; no two of the first 49 are
        equal in color and marker.
        """
        around, place = divmod(index, len(self.colors))
        return {
            "color": self.colors[place],
            "marker": _MARKERS[(place + around) % len(_MARKERS)],
            "linestyle": _LINES[(place + around) % len(_LINES)],
        }

    def shades(self, count: int) -> Any:
        """Returns a color map of `count` colors for things in order, such as layers."""
        import matplotlib
        import numpy as np
        from matplotlib.colors import ListedColormap

        ends = np.linspace(self.few, self.many, max(count, 1))
        return ListedColormap(matplotlib.colormaps["cividis"](ends))

    def heat(self) -> Any:
        """Returns the color map of heat maps: the more, the farther from the background.

        What lies below the smallest number has the color of the background.
        """
        import matplotlib
        import numpy as np
        from matplotlib.colors import ListedColormap

        ends = (1.0, 0.0) if self.ink else (0.12, 1.0)
        colors = matplotlib.colormaps["cividis"](np.linspace(*ends, 256))
        return ListedColormap(colors).with_extremes(under=self.background)


_LIGHT = Style(
    colors=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"),
    text="#222222",
    muted="#777777",
    background="#ffffff",
    bad="#b00020",
    few=0.0,
    many=0.88,
    ink=True,
)
_DARK = Style(
    colors=("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#ffffff"),
    text="#e6e6e6",
    muted="#9a9a9a",
    background="#15181c",
    bad="#ff6b6b",
    few=0.3,
    many=1.0,
    ink=False,
)
_PATH = re.compile(r'(?<= d=")[^"]*')
_LONG = re.compile(r"(\.\d\d)\d+")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


@contextlib.contextmanager
def style(*, dark: bool = False) -> Iterator[Style]:
    """Gives the figures that are made inside the style, for figures of your own too.

    Args:
      dark: whether to draw for dark pages.

    Returns:
      A context manager that gives the colors.

    Raises:
      ImportError: matplotlib is not installed.

    Example:
      >>> with fp8jax.figures.style() as look:
      ...     print(look.colors[0])
      #0072b2
    """
    require_matplotlib()
    import matplotlib

    look = _DARK if dark else _LIGHT
    with matplotlib.rc_context(_settings(look)):
        yield look


def _settings(look: Style) -> Any:
    return {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "figure.titlesize": 9,
        "figure.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.2,
        "lines.markersize": 3.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "legend.frameon": False,
        "hatch.linewidth": 0.5,
        "hatch.color": look.muted,
        "figure.dpi": 120,
        "figure.facecolor": look.background,
        "axes.facecolor": look.background,
        "savefig.facecolor": look.background,
        **dict.fromkeys(
            (
                "text.color",
                "axes.labelcolor",
                "axes.edgecolor",
                "axes.titlecolor",
                "xtick.color",
                "ytick.color",
                "xtick.labelcolor",
                "ytick.labelcolor",
            ),
            look.text,
        ),
    }


def require_matplotlib() -> Any:
    """Returns matplotlib's Figure. Call it before long work that ends in a figure.

    Raises ImportError, with what to install, if matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error
    return Figure


def panels(
    rows: int, columns: int, *, width: float = WIDTH, height: float, **kwargs: Any
) -> tuple[Any, Any]:
    """Returns a Figure of that many inches and its axes [rows, columns]; `kwargs` of `subplots`."""
    figure = require_matplotlib()(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def svg_text(figure: Any) -> str:
    """Returns a figure as SVG, from `<svg` on, to embed in a page; equal figures give equal text.

    Args:
      figure: a `matplotlib.figure.Figure`.

    Returns:
      The SVG element, without an XML declaration.

    Raises:
      AttributeError: not a figure.

    Example:
      >>> fp8jax.figures.svg_text(fp8jax.figures.relative_error())[:4]
      '<svg'
    """
    text = _svg(figure)
    return text[text.index("<svg") :]


def _svg(figure: Any) -> str:
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fp8jax", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    # A hundredth of a point is enough for a path, and shortens the file.
    return _PATH.sub(lambda path: _LONG.sub(r"\1", path[0]), file.getvalue())


def save(figure: Any, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes PATH.png, for the screen and print, and PATH.svg; makes the folder.

    Args:
      figure: a `matplotlib.figure.Figure`.
      path: of the files, without a suffix.

    Returns:
      The two paths. Equal figures give equal bytes.

    Raises:
      ValueError: the path has one of these suffixes already.
      OSError: a file cannot be written.

    Example:
      >>> folder = Path(tempfile.mkdtemp())
      >>> written = fp8jax.figures.save(fp8jax.figures.relative_error(), folder / "error")
      >>> [path.name for path in written]
      ['error.png', 'error.svg']
    """
    path = Path(path)
    if path.suffix in (".png", ".svg"):
        raise ValueError(f"{path}: give the path without {path.suffix}; both files are written")
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
    figure.savefig(png, dpi=200, metadata={"Software": None}, pil_kwargs={"optimize": True})
    svg.write_text(_svg(figure), encoding="utf-8")
    return png, svg

"""Plots as inline SVG: one picture for one input, in the colours of the page around it. matplotlib is an extra."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from quasar.errors import InvalidRequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"#010203": "var(--ink)", "#010204": "var(--accent)", "#010205": "var(--rule)"}
_INK, _ACCENT, _RULE = _COLOURS
"""Stand-ins, which become colours of the page's style sheet: it knows whether the reader's screen is dark."""
_SETTINGS = {
    "svg.hashsalt": "quasar",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _RULE,
}
_NO_METADATA = dict.fromkeys(["Date", "Creator", "Format", "Type"])
_BARS = 32
_TICKS = 16


def require_matplotlib() -> None:
    """Refuse early what would fail after a long measurement.

    Raises:
        InvalidRequestError: matplotlib is not installed, or cannot be imported.
    """
    try:
        import matplotlib
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidRequestError(
            f"plots need the extra html (matplotlib cannot be imported: {error}); "
            "install it with: pip install 'quasar-decode[html]'"
        ) from error


def differences(values: Mapping[int, float]) -> str:
    """Size of a difference by width, on a logarithmic axis whose foot is zero: bit-identical rows.

    What is not finite has no place on the axis and is left out.
    """
    logarithms = {width: math.log10(value) for width, value in values.items() if 0 < value < math.inf}
    foot = math.floor(min(logarithms.values(), default=-6)) - 1
    top = math.ceil(max(logarithms.values(), default=-1))
    decades = range(foot + 1, top + 1, -(-(top - foot) // 6))
    zeros = [width for width, value in values.items() if value == 0]

    def draw(axes: Axes) -> None:
        # The logarithms are plotted, not the values: a logarithmic scale of matplotlib's has no place for zero.
        axes.set_ylim(foot - 0.4, top + 0.2)
        axes.set_yticks([foot, *decades], ["0, bitwise", *(f"1e{decade}" for decade in decades)])
        axes.plot(zeros, [foot] * len(zeros), "o", markerfacecolor="none", markeredgecolor=_ACCENT)
        axes.plot(list(logarithms), list(logarithms.values()), "o", color=_ACCENT)
        axes.set_xticks(_some_of(list(values)))

    return _inline("differences", "width", "largest |Δlogit|", draw)


def counts(values: Mapping[int, int]) -> str:
    """A number of mismatches by width, as bars."""

    def draw(axes: Axes) -> None:
        axes.bar(list(values), list(values.values()), color=_ACCENT)
        axes.set_xticks(_some_of(list(values)))
        _count_upwards(axes, max(values.values(), default=0))

    return _inline("counts", "width", "argmax mismatches", draw)


def lengths(runs: Sequence[int]) -> str:
    """How many runs have which length: bars of equal whole width, at most :data:`_BARS` of them."""
    step = -(-max(runs, default=1) // _BARS)
    bars = Counter((run - 1) // step for run in runs)

    def draw(axes: Axes) -> None:
        lefts = [bar * step + 0.5 + 0.05 * step for bar in bars]  # a bar of length 3 stands over 3
        axes.bar(lefts, list(bars.values()), width=0.9 * step, align="edge", color=_ACCENT)
        axes.set_xlim(0, max(runs, default=1) + step)
        _count_upwards(axes, max(bars.values(), default=0))

    return _inline("lengths", "length of the run, in tokens", "runs", draw)


def _some_of(widths: Sequence[int]) -> Sequence[int]:
    """As many as have room for their numbers, at even distances."""
    return widths[:: max(1, -(-len(widths) // _TICKS))]


def _count_upwards(axes: Axes, largest: int) -> None:
    """Whole numbers from 0; where all are 0, it is said."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, 1.1 * max(largest, 1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if largest == 0:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")


def _inline(name: str, x: str, y: str, draw: Callable[[Axes], None]) -> str:
    """Set up axes, draw, and return an ``<svg>`` element whose ids begin with ``name``."""
    import matplotlib.style
    from matplotlib.figure import Figure

    # The defaults, so that a reader's own settings change nothing; they are put back afterwards.
    with matplotlib.style.context(["default", _SETTINGS]):
        figure = Figure(figsize=(6.4, 3.0), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", f'<svg role="img" aria-label="{y} by {x}"', 1)

"""Axis labels that do not overlap, whatever the numbers and names are."""

from __future__ import annotations

import math
import textwrap
from itertools import pairwise

from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, Formatter, MaxNLocator

_MOST = 5  # maximum number of intervals between labels on a horizontal axis
_LONG = 1e7  # from here, numbers are written with an exponent


class PlainFormatter(Formatter):
    """Numbers with thousands separators, and as many digits as neighbours need to differ."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        ticks = [] if self.axis is None else self.axis.get_majorticklocs()
        step = min((b - a for a, b in pairwise(ticks) if b > a), default=abs(x) or 1.0)
        largest = max((abs(tick) for tick in ticks), default=abs(x)) or 1.0
        # 2.5 needs one digit more than its magnitude suggests.
        decimals = next((d for d in range(16) if abs(round(step, d) - step) < 1e-6 * step), 16)
        if step >= 1e-4 and largest < _LONG:
            return f"{x if abs(x) > step / 2 else 0.0:,.{decimals}f}".replace("-", "−")
        digits = max(0, math.ceil(math.log10(largest / step)))
        return "0" if abs(x) < step / 2 else f"{x:.{digits}e}".replace("-", "−").replace("e+", "e")


def spread(axis: Axis, formatter: Formatter | None = None, most: int = _MOST) -> None:
    """Set few enough round ticks that their labels do not overlap; by default with plain numbers."""
    axis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(formatter or PlainFormatter())


def thousands(unit: str = "") -> EngFormatter:
    """Return a formatter that gives ``250k``, ``1.5M``, or with a unit ``30 s``."""
    return EngFormatter(unit, sep=" " if unit else "")


def wrap_text(text: str, width: int) -> str:
    """Wrap `text` to lines of at most `width` characters, broken at spaces if possible."""
    return "\n".join(textwrap.wrap(text, width)) or text

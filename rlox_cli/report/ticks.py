"""Labels of axes that stay apart, whatever the numbers and names are."""

from __future__ import annotations

import math
import textwrap
from itertools import pairwise

from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, Formatter, MaxNLocator

_MOST = 5  # intervals between labels side by side
_LONG = 1e7  # from here on numbers are written with an exponent


class PlainFormatter(Formatter):
    """Numbers with thousands separators, and as many digits as neighbours need to differ."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        ticks = [] if self.axis is None else self.axis.get_majorticklocs()
        step = min((b - a for a, b in pairwise(ticks) if b > a), default=abs(x) or 1.0)
        largest = max((abs(tick) for tick in ticks), default=abs(x)) or 1.0
        # 2.5 needs a digit more than its magnitude says.
        decimals = next((d for d in range(16) if abs(round(step, d) - step) < 1e-6 * step), 16)
        if step >= 1e-4 and largest < _LONG:
            return f"{x if abs(x) > step / 2 else 0.0:,.{decimals}f}".replace("-", "−")
        digits = max(0, math.ceil(math.log10(largest / step)))
        return "0" if abs(x) < step / 2 else f"{x:.{digits}e}".replace("-", "−").replace("e+", "e")


def spread(axis: Axis, formatter: Formatter | None = None, most: int = _MOST) -> None:
    """Few enough round ticks that their labels stand apart; by default as plain numbers."""
    axis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(formatter or PlainFormatter())


def thousands(unit: str = "") -> EngFormatter:
    """``250k``, ``1.5M``; with a unit ``30 s``."""
    return EngFormatter(unit, sep=" " if unit else "")


def wrapped(text: str, width: int) -> str:
    """On lines of at most `width` signs, broken at spaces where there are some."""
    return "\n".join(textwrap.wrap(text, width)) or text

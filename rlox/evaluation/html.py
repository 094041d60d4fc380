"""Tables and curves as HTML and SVG, for notebooks. Colours of text and lines are those of the notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# Okabe and Ito's palette, which colour-blind people can distinguish.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_WIDTH, _HEIGHT = 520, 220  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 34  # around the curves
_MOST_POINTS = 500  # of a line: about as many as there are pixels


class Line(NamedTuple):
    """One curve, with the band around it if there is one."""

    label: str
    x: ArrayLike  # (K,)
    y: ArrayLike  # (K,); NaN is left out
    low: ArrayLike | None = None  # (K,)
    high: ArrayLike | None = None  # (K,)


def write_table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table. Cells are text; numbers that are not finite become a dash."""
    lines = ['<table style="text-align:right">']
    if caption:
        lines.append(f'<caption style="text-align:left">{html.escape(caption)}</caption>')
    lines.append("".join(["<thead><tr>", *(f"<th>{html.escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]))
    for first, *others in rows:
        cells = [f'<th style="text-align:left">{html.escape(_text(first))}</th>']
        cells += [f"<td>{html.escape(_text(cell))}</td>" for cell in others]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _text(value: object) -> str:
    if isinstance(value, float):
        return format_number(value) if math.isfinite(value) else "–"
    return str(value)


def format_number(value: float) -> str:
    """Return a number with about four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_curves(lines: Sequence[Line], x_name: str, y_name: str) -> str:
    """Return curves as an SVG with a legend, or an empty text if there is no finite point."""
    drawn = [(line, keep) for line in lines if len(keep := _choose_points(line))]
    if not drawn:
        return ""
    xs = np.concatenate([np.asarray(line.x, float)[keep] for line, keep in drawn])
    ys = np.concatenate(
        [np.asarray(part, float)[keep] for line, keep in drawn for part in line[2:] if part is not None]
    )
    x_ends, y_ends = _ends(xs), _ends(ys)

    def place(x: np.ndarray, y: np.ndarray) -> list[str]:
        across = _LEFT + (x - x_ends[0]) / (x_ends[1] - x_ends[0]) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - y_ends[0]) / (y_ends[1] - y_ends[0]) * (_HEIGHT - _TOP - _BOTTOM)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True) if math.isfinite(b)]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{html.escape(f"{y_name} over {x_name}", quote=True)}" font-size="11" fill="currentColor">',
        f'<path d="M{_LEFT},{_TOP} V{_HEIGHT - _BOTTOM} H{_WIDTH - _RIGHT}" fill="none" stroke="currentColor"/>',
    ]
    for value, y in zip(y_ends, (_HEIGHT - _BOTTOM, _TOP + 8), strict=True):
        parts.append(f'<text x="{_LEFT - 5}" y="{y}" text-anchor="end">{format_number(value)}</text>')
    for value, x, anchor in ((x_ends[0], _LEFT, "start"), (x_ends[1], _WIDTH - _RIGHT, "end")):
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="{anchor}">{value:,.0f}</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 4}" text-anchor="middle">{html.escape(x_name)}</text>')
    for i, (line, keep) in enumerate(drawn):
        colour, x = _COLOURS[i % len(_COLOURS)], np.asarray(line.x, float)[keep]
        if line.low is not None and line.high is not None:
            low, high = (np.asarray(part, float)[keep] for part in (line.low, line.high))
            inside = np.isfinite(low) & np.isfinite(high)
            outline = place(x[inside], high[inside]) + place(x[inside], low[inside])[::-1]
            parts.append(f'<polygon points="{" ".join(outline)}" fill="{colour}" opacity="0.2"/>')
        points = place(x, np.asarray(line.y, float)[keep])
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) == 1:  # a line of one point is invisible
            parts.append(
                f'<circle cx="{points[0].split(",")[0]}" cy="{points[0].split(",")[1]}" r="3" fill="{colour}"/>'
            )
    parts.append("</svg>")
    names = [
        f'<span style="color:{_COLOURS[i % len(_COLOURS)]}">■</span> {html.escape(line.label)}'
        for i, (line, _) in enumerate(drawn)
        if line.label
    ]
    return f"<div>{html.escape(y_name)}<br>{''.join(parts)}<br>{' &nbsp; '.join(names)}</div>"


def _choose_points(line: Line) -> np.ndarray:
    """Return the indices of the points to draw: those that are finite, at most `_MOST_POINTS` of them."""
    there = np.flatnonzero(np.isfinite(np.asarray(line.y, float)))
    return there[np.linspace(0, len(there) - 1, min(len(there), _MOST_POINTS)).astype(int)]


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of an axis that shows all finite values."""
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    return (low, high) if low < high else (low - 0.5, high + 0.5)

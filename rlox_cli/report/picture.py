"""Learning curves, performance profiles and speed of groups of runs, drawn with Matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_cli.records.runs import LANGUAGE, RETURNS, Group, Run, ended, metric_name, short, units
from rlox_cli.report.statistics import Interval, interval, iqm, profile
from rlox_cli.report.ticks import spread, thousands, wrap_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind people can distinguish, without yellow (too light) and black (too heavy).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", "--")  # in the colours' second round
_GREY = "#999999"
_STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "text.parse_math": False,  # labels are settings: a dollar is a dollar
    "svg.hashsalt": "rlox",
}
_SHADES = {"collect": "#4D4D4D", "update": "#999999", "other": "#DDDDDD"}
_MOST_POINTS = 100  # of a curve
_FEW_POINTS = 25  # up to which a curve is drawn with its points
_MOST_SINGLE = 10  # runs of a group that are drawn individually
_FEW, _ENOUGH = 3, 5  # runs for a band; for a profile
_DPI = 130
_TITLE, _HEIGHT, _NAME = 42, 30, 34  # characters on a line of a panel's title, of its y label, and of a bar's name


@dataclass
class Curve:
    """A group's metric over steps or seconds."""

    x: np.ndarray  # (K,)
    singles: list[tuple[np.ndarray, np.ndarray]]  # of each run, as far as it got
    middle: Interval  # (K,) IQM over the runs that got there, with its band
    n: np.ndarray  # (K,) number of these runs


@dataclass
class Summary:
    """The results of a group."""

    n: int  # runs whose final scores are counted
    final: Interval  # IQM over them
    finals: np.ndarray  # (n,)
    best: float | None  # IQM of each run's best; only of returns, since the best loss is not the highest
    speed: float  # median of environment steps (offline: updates) per second
    counted: str  # number of runs in each state


def summarise(group: Group, metric: str) -> Summary:
    runs = ended(group.runs)
    finals = np.array([run.series[metric].values[-1] for run in runs])
    states: dict[str, int] = {}
    for run in group.runs:
        states[run.status] = states.get(run.status, 0) + 1
    return Summary(
        len(runs),
        interval([finals]),
        finals,
        float(iqm([run.series[metric].values.max() for run in runs])) if metric in RETURNS else None,
        float(np.median([run.speed for run in group.runs])),
        ", ".join(f"{count} {state}" for state, count in states.items()),
    )


def curve(runs: Sequence[Run], metric: str, by_time: bool) -> Curve:
    """Bring the runs' series onto one axis and take their IQM.

    A run that finished before the others (at its score or its time limit) keeps its last value. A run that was stopped
    contributes as far as it got.
    """
    series = [(s.seconds if by_time else s.steps, s.values) for s in (run.series[metric] for run in runs)]
    end = max(x[-1] for x, _ in series)
    grid = np.unique(np.concatenate([x for x, _ in series]))
    if len(grid) > _MOST_POINTS:
        edges = np.linspace(0, end, _MOST_POINTS + 1)
        series = [_average_bins(x, y, edges) for x, y in series]
        grid = np.unique(np.concatenate([x for x, _ in series]))
        grid = np.linspace(grid[0], grid[-1], _MOST_POINTS)
    grid = grid[grid >= max(x[0] for x, _ in series)]
    values = np.stack(
        [
            np.interp(grid, x, y, right=None if run.status == "finished" else np.nan)
            for run, (x, y) in zip(runs, series, strict=True)
        ],
        axis=-1,
    )
    there = np.isfinite(values)
    middle = Interval(*np.full((3, len(grid)), np.nan))
    for pattern in np.unique(there, axis=0):
        at = (there == pattern).all(-1)
        if pattern.any():
            for into, part in zip(middle, interval([values[at][:, pattern]]), strict=True):
                into[at] = part
    return Curve(grid, series, middle, there.sum(-1))


def _average_bins(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of the points in each bin that is not empty."""
    n, _ = np.histogram(x, edges)
    sums = [np.histogram(x, edges, weights=w)[0][n > 0] / n[n > 0] for w in (x, y)]
    return sums[0], sums[1]


class Picture:
    """One figure with all panels of several groups.

    In SVG, the id of every element of the i-th of `labels` begins with ``g<i>-``.
    """

    def __init__(self, groups: Sequence[Group], metric: str, by_time: bool):
        self.groups, self.metric, self.by_time = groups, metric, by_time
        self.summaries = {group: summarise(group, metric) for group in groups}
        self.labels = list(dict.fromkeys(group.label for group in groups))
        self.coloured = self._best_labels()
        self._n_ids = 0

    def save(self, paths: Sequence[Path]) -> str:
        """Write the PNG, PDF and SVG files, and return the figure as an ``<svg>`` element."""
        from matplotlib import rc_context

        text = io.StringIO()
        with rc_context(_STYLE):
            figure = self.draw()
            for path in paths:
                figure.savefig(path, dpi=_DPI)
            figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return text.getvalue()[text.getvalue().index("<svg") :]

    def _best_labels(self) -> list[str]:
        """Return as many labels as can be distinguished, preferring those that are best in some environment."""
        ranks: dict[str, int] = {}
        for env in self._envs():
            ordered = sorted(self._of(env), key=lambda group: -self.summaries[group].final.value)
            for rank, group in enumerate(ordered):
                ranks[group.label] = min(rank, ranks.get(group.label, rank))
        best = sorted(self.labels, key=lambda label: ranks[label])[: len(_COLOURS) * len(_DASHES)]
        return [label for label in self.labels if label in best]

    def _envs(self) -> list[str]:
        return list(dict.fromkeys(group.env for group in self.groups))

    def _of(self, env: str) -> list[Group]:
        return [group for group in self.groups if group.env == env]

    def _draw_profile(self, env: str) -> list[Group]:
        """Return the groups with enough runs for a profile of their scores."""
        enough = [group for group in self._of(env) if self.summaries[group].n >= _ENOUGH]
        return [group for group in enough if group.label in self.coloured and self.metric in RETURNS]

    def _id(self, label: str) -> str:
        self._n_ids += 1
        return f"g{self.labels.index(label)}-{self._n_ids}"

    def appearance(self, label: str) -> tuple[str, str]:
        """Return the colour and the dashes of a label."""
        if label not in self.coloured:
            return _GREY, "-"
        turn, colour = divmod(self.coloured.index(label), len(_COLOURS))
        return _COLOURS[colour], _DASHES[turn]

    def draw(self) -> Figure:
        """Draw the figure, in the current style."""
        from matplotlib.figure import Figure

        envs = self._envs()
        profiled = [env for env in envs if self._draw_profile(env)]
        columns = max(min(3, len(envs)), *(min(3, len(self._other_metrics(env))) for env in envs))
        timed = [group for group in self.groups if group.label in self.coloured]
        rows: list[tuple[Sequence[Any], Callable[[Axes, Any], None], float]] = [
            ([(env, self.metric) for env in envs], self._draw_curves, 3.6)
        ]
        if profiled:
            rows.append((profiled, self._profiles, 3.1))
        if others := [(env, metric) for env in envs for metric in self._other_metrics(env)]:
            rows.append((others, self._draw_curves, 2.9))
        names = self._bar_names(timed)
        # The tallest name decides, since bars are evenly spaced.
        tall = max((name.count("\n") + 1 for name in names), default=1)
        heights = [
            *(height * -(-len(of) // min(3, len(of))) for of, _, height in rows),
            1.5 + (0.14 + 0.22 * tall) * len(timed),
        ]
        width = max(10.0, 5.0 * columns)
        entries = [wrap_text(label, self._legend_signs(width)).count("\n") + 1 for label in self.coloured]
        around = 0.5 + 0.25 * max(entries, default=1) * -(-(len(entries) + 1) // max(1, self._legend_columns(width)))
        figure = Figure(figsize=(width, sum(heights) + around), layout="constrained")
        *parts, last = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (of, panel, _) in zip(parts, rows, strict=True):
            across = min(3, len(of))
            axes = part.subplots(-(-len(of) // across), across, squeeze=False).ravel()
            for axis, item in zip(axes, of, strict=False):
                panel(axis, item)
            for axis in axes[len(of) :]:
                axis.set_visible(False)
        self._speeds(timed, names, *last.subplots(1, 2, sharey=True))
        self._explain(figure)
        return figure

    def _explain(self, figure: Figure) -> None:
        from matplotlib.lines import Line2D

        handles = []
        for label in self.coloured:
            colour, dashes = self.appearance(label)
            shown_label = wrap_text(label, self._legend_signs(figure.get_figwidth()))
            handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=2.2, label=shown_label))
        if others := len(self.labels) - len(self.coloured):
            handles.append(Line2D([], [], color=_GREY, linewidth=1, label=f"{others} others"))
        columns = max(1, min(len(handles), self._legend_columns(figure.get_figwidth())))
        figure.legend(handles=handles, loc="outside upper center", ncols=columns)
        single = all(len(group.runs) == 1 for group in self.groups)
        signs = ["line: a run" if single else "line: interquartile mean over runs"]
        if any(len(group.runs) >= _FEW for group in self.groups):
            signs.append("band: 95 % bootstrap interval")
        if any(1 < len(group.runs) <= _MOST_SINGLE for group in self.groups):
            signs.append("thin: single runs")
        if any(run.status != "finished" for group in self.groups for run in group.runs):
            signs += ["×: not finished", "dotted: only some runs got there"]
        unbroken = "; ".join(signs).replace(" ", "\xa0").replace(";\xa0", "; ")
        caption = textwrap.fill(unbroken, int(10 * figure.get_figwidth()))
        figure.supxlabel(caption, fontsize=11, color="#444444")

    def _legend_signs(self, width: float) -> int:
        """Return how many characters of a label fit on one line of a legend of `width` inches."""
        return int(width * 8) - 6

    def _legend_columns(self, width: float) -> int:
        """Return how many labels fit next to each other in `width` inches."""
        longest = min(max(len(label) for label in self.labels), self._legend_signs(width))
        return max(1, int(width * 8 / (longest + 6)))

    def _bar_names(self, groups: Sequence[Group]) -> list[str]:
        several = len(self._envs()) > 1
        return [wrap_text(f"{group.label} · {group.env}" if several else group.label, _NAME) for group in groups]

    def _other_metrics(self, env: str) -> list[str]:
        """Return additional metrics to draw if all runs train a language model: those that all of them have."""
        runs = [run for group in self._of(env) for run in group.runs]
        if not all(run.flat.get("model") for run in runs):
            return []
        return [name for name in LANGUAGE if name != self.metric and all(name in run.series for run in runs)]

    def _draw_curves(self, axis: Axes, item: tuple[str, str]) -> None:
        """Draw one metric of the groups of one environment; `item` is the environment and the metric."""
        env, metric = item
        groups = sorted(self._of(env), key=lambda group: group.label in self.coloured)
        for group in groups:
            (colour, dashes), drawn = self.appearance(group.label), curve(group.runs, metric, self.by_time)
            coloured = group.label in self.coloured
            points = "." if len(drawn.x) <= _FEW_POINTS else ""
            for run, (x, y) in zip(group.runs, drawn.singles, strict=True):
                if coloured and 1 < len(group.runs) <= _MOST_SINGLE:
                    axis.plot(x, y, color=colour, linewidth=0.8, alpha=0.4, gid=self._id(group.label))
                if run.status != "finished":
                    axis.plot(x[-1], y[-1], "x", color=colour, markersize=8, gid=self._id(group.label))
            whole = drawn.n == len(group.runs)
            # The dotted line begins where the solid one ends.
            partial = ~whole | np.append(~whole[1:], False)
            for at, style, width in ((whole, dashes, 2.2 if coloured else 0.8), (partial, (0, (1, 1)), 1.4)):
                line = np.where(at, drawn.middle.value, np.nan)
                options = {"color": colour, "linestyle": style, "linewidth": width, "markersize": 4 * width}
                axis.plot(drawn.x, line, marker=points, gid=self._id(group.label), **options)
            if coloured:
                axis.fill_between(
                    *(drawn.x, drawn.middle.low, drawn.middle.high),
                    **{"where": drawn.n >= _FEW, "gid": self._id(group.label), **_band(colour)},
                )
        references = _draw_references(axis, groups) if metric in RETURNS else ""
        axis.set(title=wrap_text(env, _TITLE), ylabel=wrap_text(metric_name(metric), _HEIGHT))
        axis.set_xlabel(f"{'training time' if self.by_time else _name_count(groups)}{references}")
        spread(axis.xaxis, thousands("s" if self.by_time else ""))
        spread(axis.yaxis, most=8)

    def _profiles(self, axis: Axes, env: str) -> None:
        from matplotlib.ticker import PercentFormatter

        groups = self._draw_profile(env)
        finals = np.concatenate([self.summaries[group].finals for group in groups])
        margin = 0.03 * (np.ptp(finals) or 1.0)
        thresholds = np.unique([finals.min() - margin, *finals, finals.max() + margin])
        for group in groups:
            colour, dashes = self.appearance(group.label)
            shape = profile([self.summaries[group].finals], thresholds)
            style = {"color": colour, "linestyle": dashes, "linewidth": 2.2}
            axis.step(thresholds, shape.value, where="post", gid=self._id(group.label), **style)
            band = {"step": "post", "gid": self._id(group.label), **_band(colour)}
            axis.fill_between(thresholds, shape.low, shape.high, **band)
        title = wrap_text(f"{env}: performance profile", _TITLE)
        axis.set(title=title, xlabel="τ", ylabel="runs with a final score > τ")
        axis.set_ylim(-0.03, 1.03)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        spread(axis.xaxis)

    def _speeds(self, groups: Sequence[Group], names: Sequence[str], speed: Axes, share: Axes) -> None:
        from matplotlib.ticker import EngFormatter, PercentFormatter

        concise, fastest = EngFormatter(places=1, sep=""), 0.0
        for y, group in enumerate(groups):
            speeds, median = [run.speed for run in group.runs if run.seconds], self.summaries[group].speed
            if not speeds:
                continue
            (bar,) = speed.barh(y, median, color=self.appearance(group.label)[0], alpha=0.6, height=0.7)
            bar.set_gid(self._id(group.label))
            # Below the bar; its number is at the end of the bar.
            below = [y + 0.43] * len(speeds)
            speed.plot(speeds, below, ".", color="black", markersize=4, gid=self._id(group.label))
            style = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 11}
            speed.annotate(concise(median), (median, y), gid=self._id(group.label), **style)
            fastest = max(fastest, *speeds)
            left, shares = 0.0, [run.shares for run in group.runs if run.shares]
            for name, shade in _SHADES.items() if shares else ():
                width = float(np.mean([of_run[name] for of_run in shares]))
                (bar,) = share.barh(y, width, left=left, color=shade, height=0.7, label=name if y == 0 else None)
                bar.set_gid(self._id(group.label))
                left += width
        speed.set_yticks(range(len(names)), names)
        speed.set_ylim(len(names) - 0.5, -0.5)
        speed.set(title="speed (median; dots: runs)", xlabel=f"{_name_count(groups)} per second")
        speed.set_xlim(0, 1.3 * (fastest or 1.0))  # room for a number next to the longest bar
        spread(speed.xaxis, thousands(), 4)
        share.set(title="share of training time", xlim=(0, 1))
        spread(share.xaxis, PercentFormatter(1.0))
        share.figure.legend(*share.get_legend_handles_labels(), loc="outside lower right", ncols=len(_SHADES))


def _band(colour: str) -> dict[str, object]:
    return {"color": colour, "alpha": 0.18, "linewidth": 0}


def _draw_references(axis: Axes, groups: Sequence[Group]) -> str:
    """Draw a line at each score that tuned settings must reach, and return the text for the label below the panel.

    Curves end near these lines, so there is no room for text next to a line.
    """
    known: dict[float, set[str]] = {}
    for run in (run for group in groups for run in group.runs):
        if run.reference is not None:
            known.setdefault(run.reference, set()).add(run.algo)
    names = []
    for value, algos in sorted(known.items()):
        axis.axhline(value, color="black", linewidth=1, linestyle=(0, (6, 3)))
        whose = f" ({', '.join(sorted(algos))})" if len(known) > 1 else ""
        names.append(f"{value:g}{whose}".replace("-", "−"))
    return "\n" + wrap_text(f"dashed: reference {', '.join(names)}", _TITLE) if names else ""


def _name_count(groups: Sequence[Group]) -> str:
    """Return what the groups' runs count, for the label of an axis."""
    return units(run for group in groups for run in group.runs).replace("steps", "environment steps")


def cells(summary: Summary) -> tuple[str, ...]:
    """Return the cells of a summary in a table: runs, final score, its interval, best score, speed."""
    low, high = summary.final.low, summary.final.high
    bounds = f"{short(low)} to {short(high)}" if np.isfinite(low) else "one run"
    return summary.counted, short(summary.final.value), bounds, short(summary.best), f"{summary.speed:,.0f}"

"""Measurements of all plots of rlox: no text overlaps another text or a curve, or leaves the figure."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import matplotlib.text
import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from rlox_cli.bench import curves, data, train
from rlox_cli.records.runs import EVALUATION, Run, Series, group_runs
from rlox_cli.report import picture
from rlox_cli.report.ticks import PlainFormatter

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def texts(figure) -> list[tuple[matplotlib.text.Text, Bbox]]:
    """All visible texts of a figure with their boxes; of tick labels, only those within their axis."""
    FigureCanvasAgg(figure)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    ticks = {}
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            shown = {label for label in axis.get_ticklabels(which="both") if _within(axis, label)}
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                for label in (tick.label1, tick.label2):
                    ticks[label] = axis
                    if label not in shown or not axes.get_visible():
                        hidden.add(label)
        if not axes.get_visible() or not axes.axison:
            hidden |= set(axes.findobj(matplotlib.text.Text))
    found = [one for one in figure.findobj(matplotlib.text.Text) if one.get_visible() and one.get_text().strip()]
    return [(one, one.get_window_extent(renderer)) for one in dict.fromkeys(found) if one not in hidden]


def _within(axis, label) -> bool:
    at = label.get_position()[0 if axis.axis_name == "x" else 1]
    # As on the page: on a logarithmic axis, a margin in its own unit would cover many decades.
    low, high, at = axis.get_transform().transform([*sorted(axis.get_view_interval()), at])
    margin = 1e-9 * abs(high - low)
    return label.get_visible() and low - margin <= at <= high + margin


def require_readable(figure) -> None:
    found = texts(figure)
    assert found
    for (a, box), (b, other) in itertools.combinations(found, 2):
        smaller = Bbox.from_extents(box.x0 + 1, box.y0 + 1, box.x1 - 1, box.y1 - 1)
        assert not smaller.overlaps(other), f"{a.get_text()!r} lies on {b.get_text()!r}"
    for text, box in found:
        whole = figure.bbox
        outside = box.x0 < -1 or box.y0 < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
        assert not outside, f"{text.get_text()!r} leaves the figure"
    for axes in figure.axes:
        panel = axes.get_window_extent()
        assert not axes.get_visible() or min(panel.width, panel.height) > 60, "a panel has no room left"
        inside = [(text, box) for text, box in found if panel.overlaps(box)]
        for line in axes.lines:
            path = line.get_transform().transform_path(line.get_path())
            for text, box in inside if len(path.vertices) else ():
                assert not path.intersects_bbox(box, False), f"{text.get_text()!r} lies on a curve"


def a_run(label: str, seed: int, steps, values, *, env="CartPole-v1", seconds=30.0, reference=None, status="finished"):
    steps, values = np.asarray(steps), np.asarray(values, float)
    config = {"algo": {"name": "ppo", "label": label}, "env": {"id": env}, "seed": seed}
    if reference is not None:
        config["reference"] = {"mean_return": reference}
    flat = {"algo.name": "ppo", "algo.label": label, "env.id": env, "seed": seed}
    if reference is not None:
        flat["reference.mean_return"] = reference
    series = {EVALUATION: Series(steps, np.linspace(seconds / len(steps), seconds, len(steps)), values)}
    shares = {"collect": 0.3, "update": 0.5, "other": 0.2}
    folder = Path(f"outputs/{label}-{seed}")
    return Run(folder, config, flat, {}, status, int(steps[-1]), seconds, series, {EVALUATION}, shares)


def runs_of(kind: str) -> list[Run]:
    rng = np.random.default_rng(0)

    def curve(n=10, scale=500.0, offset=0.0):
        return offset + scale * np.minimum(1.0, np.cumsum(rng.random(n)) / n * 2)

    steps = np.arange(1, 11) * 10_000
    if kind == "one run":
        return [a_run("a", 0, steps, curve(), reference=475.0)]
    if kind == "two points":
        return [a_run("a", seed, [1000, 2000], [1.0, 2.0]) for seed in range(3)]
    if kind == "one point":
        return [a_run("a", 0, [1000], [1.0])]
    if kind == "many groups":
        return [a_run(f"{k}e-4", s, steps, curve(), seconds=3.0 * (k + 1)) for k in range(20) for s in range(5)]
    if kind == "long names":
        names = [f"a name of a setting that is {'very ' * k}long and shown whole, number {k}" for k in (3, 4, 5)]
        env = "SomePackage/An-Environment-With-A-Name-Of-More-Than-Sixty-Signs-In-All-v12"
        return [a_run(n, s, steps, curve(), env=env, reference=475.0) for n in names for s in range(6)]
    if kind == "three environments":
        ids = [f"MiniGrid-ObstructedMaze-2Dlhb-{k}-v0" for k in range(3)]
        return [
            a_run(n, s, steps, curve(), env=env, reference=400.0 + 5 * (n == "a"))
            for env, n, s in itertools.product(ids, "ab", range(5))
        ]
    if kind == "at the reference":
        return [a_run("a", s, steps, np.full(10, 475.0) + rng.normal(0, 1, 10), reference=475.0) for s in range(5)]
    if kind == "huge values":
        return [a_run("a", s, steps * 10_000, curve(scale=3e9)) for s in range(5)]
    if kind == "tiny values":
        return [a_run("a", s, steps, curve(scale=3e-7)) for s in range(5)]
    if kind == "a small spread far away":
        return [a_run("a", s, steps, curve(scale=0.5, offset=1_234_567.0)) for s in range(5)]
    if kind == "few steps":
        return [a_run("a", s, np.arange(1, 11) * 100 + 1_000, -curve(scale=1600)) for s in range(5)]
    if kind == "many steps":
        return [a_run("a", s, np.arange(1, 11) * 10**8, -curve(scale=1600), seconds=1e6) for s in range(5)]
    if kind == "not finished":
        return [a_run("a", s, steps[: 4 + s], curve(4 + s), status="killed") for s in range(6)]
    assert kind == "speeds far apart"
    return [a_run(n, s, steps, curve(), seconds=0.1 * 10 ** (3 * k + s)) for k, n in enumerate("ab") for s in range(3)]


KINDS = (
    *("one run", "two points", "one point", "many groups", "long names", "three environments", "at the reference"),
    *("huge values", "tiny values", "a small spread far away", "few steps", "many steps", "not finished"),
    "speeds far apart",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "by_time"), [*((kind, False) for kind in KINDS), ("one run", True), ("many steps", True)]
)
def test_curves_profiles_and_speeds(kind, by_time):
    with rc_context(picture._STYLE):
        require_readable(picture.Picture(group_runs(runs_of(kind)), EVALUATION, by_time).draw())


def test_the_number_is_next_to_its_bar():
    groups = group_runs(runs_of("speeds far apart"))
    with rc_context(picture._STYLE):
        figure = picture.Picture(groups, EVALUATION, False).draw()
        FigureCanvasAgg(figure)
        figure.canvas.draw()
    (axes,) = [axes for axes in figure.axes if axes.get_title().startswith("speed")]
    assert len(axes.texts) == len(axes.patches) == 2
    for bar, text in zip(axes.patches, axes.texts, strict=True):
        box, number = bar.get_window_extent(), text.get_window_extent()
        assert 0 < number.x0 - box.x1 < 20
        assert box.y0 < (number.y0 + number.y1) / 2 < box.y1


@pytest.mark.parametrize(
    "ends", [(1e-9, 3e-9), (0, 1), (-1600, -100), (1_234_567.0, 1_234_567.5), (0, 3e9), (-1e6, 1e6)]
)
def test_labels_of_ticks_differ(ends):
    from matplotlib.figure import Figure

    from rlox_cli.report.ticks import spread

    axes = Figure().subplots()
    axes.set_xlim(*ends)
    spread(axes.xaxis)
    ticks = axes.get_xticks()
    labels = axes.xaxis.get_major_formatter().format_ticks(ticks)
    assert isinstance(axes.xaxis.get_major_formatter(), PlainFormatter)
    assert len(set(labels)) == len(ticks) >= 3
    for tick, label in zip(ticks, labels, strict=True):
        assert float(label.replace("−", "-").replace(",", "")) == pytest.approx(tick, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seconds", [(0.2, 0.3, 5.0), (0.001, 10.0, 9000.0), (1.0, 1.0, 1.0), (50.0, 51.0, 52.0)])
def test_times_of_trainings(seconds):
    systems = ("rlox", "rlox torch", "original hybrid")
    row = {
        "case": "ppo",
        "title": "PPO with a title that says all of its settings, one after the other, as some of them do at length",
        "steps": 100_000,
        "ratio": {system: s / seconds[0] for system, s in zip(systems, seconds, strict=True)},
        "median": {system: {"cpu_s": s} for system, s in zip(systems, seconds, strict=True)},
        "runs": {system: [{"eval_return": -1234.0}, {"eval_return": -1180.0}] for system in systems},
    }
    require_readable(train.draw([row] * 3, "what was measured, where and with what"))


@pytest.mark.slow
def test_systems_are_compared_by_one_measure():
    """In the committed result every system has a range, which is of the evaluations after training."""
    result = json.loads((BENCHMARKS / "train.json").read_text())
    figure = train.draw(result["results"], train.caption(result))
    output = [text.get_text() for axes in figure.axes for text in axes.texts]
    rows = [row for row in result["results"] if "ratio" in row]
    ranges = []
    for row in rows:
        for system in reversed(row["median"]):
            found = sorted({f"{one['eval_return']:.0f}" for one in row["runs"][system]}, key=int)
            ranges.append(f"evaluation {' to '.join(dict.fromkeys([found[0], found[-1]]))}")
    assert len(output) == len(ranges)
    assert all(text.endswith(end) for text, end in zip(output, ranges, strict=True))
    require_readable(figure)


@pytest.mark.slow
def test_times_of_operations():
    result = json.loads((BENCHMARKS / "data.json").read_text())
    require_readable(data.draw(result["results"][::4], "what was measured, where and with what"))


def test_operations_of_one_size_are_points():
    systems = {"rlox": {"median_us": 1.0}, "numpy": {"median_us": 3.0}}
    rows = [{"title": name, "size": 1, "unit": "transitions", "systems": systems} for name in ("a", "b")]
    figure = data.draw(rows, "what was measured, where and with what")
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["a", "b"]
    require_readable(figure)


def test_without_ratios_there_is_no_picture(tmp_path, monkeypatch, capsys):
    of = {"cpu_s": 1.0, "wall_s": 1.0, "slowdown": 1.0, "eval_return": 9.0}
    systems = ("control", "rlox")
    row = {
        "case": "busy",
        "title": "busy",
        "steps": 1,
        "runs": {system: [of] for system in systems},
        "faults": {},
        "median": {system: of for system in systems},
        "slowdown": dict.fromkeys(systems, 1.0),
        "suffers": 1.0,
    }
    monkeypatch.setattr(train, "measure", lambda *_: row)
    train.main(["busy"], [], 1, [], tmp_path)
    assert "there is no picture of busy alone" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["train.json"]


@pytest.mark.slow
def test_learning_curves_as_committed():
    cells = json.loads((BENCHMARKS / "learning.json").read_text())["cells"]
    require_readable(curves.draw({label: cell for label, cell in cells.items() if cell["curves"]}))


@pytest.mark.parametrize("n", [1, 2, 10])
def test_learning_curves(n):
    curve = [{"step": 10_000 * (k + 1), "mean": 475.0 + k, "std": 0.0} for k in range(n)]
    cell = {
        "settings": {"dataset": None, "buffer": None, "eval": {"n_episodes": 20}},
        "curves": {str(seed): curve for seed in range(5)},
        "curves_before": {str(seed): curve for seed in range(3)},
        "threshold": {"score": 475.0},
    }
    name = "ppo-MountainCarContinuous-v0 algo.learning_rate=0.001 algo.gae_lambda=0.95 algo.n_steps=2048"
    require_readable(curves.draw({name: cell, "ppo-CartPole-v1": cell}))


@pytest.mark.parametrize("n_keys", [1, 12])
def test_a_search(n_keys):
    optuna = pytest.importorskip("optuna")
    from rlox_cli.sweep import study_report

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(0))

    def objective(trial):
        values = [trial.suggest_float(f"algo.a_setting_with_a_long_name_{k}", 0, 1) for k in range(n_keys)]
        return 1e6 * values[0] + sum(values)

    study.optimize(objective, n_trials=12)
    require_readable(study_report.draw(study, study_report.importance(study)))

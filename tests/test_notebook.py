"""A notebook shows a bar, tables and curves: executed in a real kernel, and looked at output by output."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from rlox.callbacks.base import History
from rlox.evaluation.episodes import Evaluation
from rlox.evaluation.html import Line, draw_curves, write_table

CELLS = [
    "from rlox import PPO\n"
    "from rlox.callbacks import EvalCallback\n"
    "def agent(name, **settings):\n"
    "    evaluations = [EvalCallback(n_points=2, n_episodes=3)]\n"
    "    return PPO('CartPole-v1', n_steps=32, logger=f'runs/{name}', callbacks=evaluations, **settings)\n"
    "ppo = agent('a', seed=0)",
    "_ = ppo.train(2_000, progress=True)",
    "ppo.evaluate(5)",
    "ppo.history",
    "_ = agent('b', seed=0, learning_rate=1e-3).train(2_000)",
    "from rlox_cli.notebook import compare_runs, open_runs\nopen_runs('runs')",
    "compare_runs('runs/a', 'runs/b')",
]


def pictures(page):
    """The pictures of a page, each of which must be XML."""
    found = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in found]


@pytest.mark.slow
def test_a_real_notebook(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason='pip install "rlox-cli[dev]"')
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, training, evaluation, history, quiet, runs, comparison = [cell.outputs for cell in notebook.cells]

    (bar,) = training  # one output that was replaced, not one for each update
    page = bar.data["text/html"]
    assert '<progress value="1.0000" max="1"' in page
    assert re.search(r"2,0\d\d/2,0\d\d steps", page)
    assert "evaluation" in page

    (shown,) = evaluation
    assert "5 deterministic episodes" in shown.data["text/html"]
    assert len(pictures(shown.data["text/html"])) == 1
    assert "Evaluation(" in shown.data["text/plain"]  # where there is no HTML

    (shown,) = history
    (picture,) = pictures(shown.data["text/html"])
    assert len(picture.findall("{*}polyline")) == 2  # training and evaluation
    assert "policy_loss" in shown.data["text/html"]

    assert quiet == []

    (shown,) = runs
    page = shown.data["text/html"]
    assert "learning_rate=0.001" in page
    assert len(pictures(page)[0].findall("{*}polyline")) == 2
    assert "Runs(2 in 2 groups" in shown.data["text/plain"]

    (shown,) = comparison
    page = shown.data["text/html"]
    assert "algo.learning_rate" in page
    assert "supports no verdict" in page
    assert len(pictures(page)) == 1


def test_evaluations_and_histories_show_their_numbers():
    page = Evaluation(np.array([10.0, 30.0]), np.array([5, 7]), 3, False, n_cut=1)._repr_html_()
    assert "2 sampled episodes, seed 3; 1 cut at the step limit" in page
    assert ">20<" in page
    history = History()
    assert "no metrics" in history._repr_html_()
    history.add(10, {"mean_reward": math.nan, "loss": 1.5})
    assert pictures(history._repr_html_()) == []  # nothing to draw yet
    history.add(20, {"mean_reward": 7.0, "loss": math.nan})
    page = history._repr_html_()
    (picture,) = pictures(page)
    assert len(picture.findall("{*}circle")) == 1  # a single point is visible
    assert ">1.5<" in page  # the last value that there was


def test_text_is_no_markup():
    page = write_table(["<b>"], [["<script>alert(1)</script>", math.inf, 12_345.6]], "a & b")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "12,346" in page
    assert "–" in page
    assert "<i>" not in draw_curves([Line("<i>", [0, 1], [0, 1])], "<i>", "<i>")


def test_curves_are_inside_the_picture_and_bands_around_them():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000), rng.normal(size=10_000).cumsum()
    y[17] = math.nan
    page = draw_curves([Line("one", x, y, y - 5, y + 5), Line("flat", [0, 9_999], [3, 3])], "steps", "return")
    (picture,) = pictures(page)
    width, height = float(picture.get("width")), float(picture.get("height"))
    lines = [line.get("points").split() for line in picture.findall("{*}polyline")]
    assert len(lines[0]) <= 500
    for point in [*lines[0], *lines[1], *picture.find("{*}polygon").get("points").split()]:
        across, down = map(float, point.split(","))
        assert 0 <= across <= width
        assert 0 <= down <= height
    assert draw_curves([], "x", "y") == ""
    assert draw_curves([Line("empty", [0], [math.nan])], "x", "y") == ""

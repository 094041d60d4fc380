"""``rlox plot`` and ``rlox compare`` on real runs, against computations with NumPy on their records."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rlox.config import RunConfig, SFTConfig
from rlox.config.base import operational_keys
from rlox.tracking import Record
from rlox_cli.main import app
from rlox_cli.records.runs import EVALUATION, find_differing_keys, group_runs, read_run, read_runs
from rlox_cli.report.compare import verdict
from rlox_cli.report.picture import curve
from rlox_cli.report.plot import main as draw
from rlox_cli.report.statistics import to_json_numbers

pytestmark = pytest.mark.slow

SMALL = ["env=CartPole-v1", "eval.n_episodes=2", "eval.n_points=4", "logger=none"]
FAST, SLOW = "ppo learning_rate=0.01", "ppo learning_rate=1e-05"


def rlox(*args, cwd, code=0):
    done = forked.run(*args, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two learning rates with five seeds each, and a separate run."""
    cwd = tmp_path_factory.mktemp("plot")
    rates = "algo.learning_rate=0.00001,0.01"
    seeds = "seed=0,1,2,3,4"
    rlox("train", "-m", *SMALL, rates, seeds, "total_timesteps=4096", "hydra.sweep.dir=sweep", cwd=cwd)
    rlox("train", *SMALL, "hydra.run.dir=again", "seed=7", "total_timesteps=2048", cwd=cwd)
    return cwd


@pytest.fixture
def sweep(made, tmp_path):
    shutil.copytree(made / "sweep", tmp_path / "sweep")
    return tmp_path / "sweep"


def rows(run: Path) -> list[dict]:
    whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def edit(run: Path, old: str, new: str, name: str = "config.yaml") -> None:
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))


def curves(folder: Path, rate: str) -> dict[int, np.ndarray]:
    """Steps and evaluation returns (K, 2) by seed, read directly from the files."""
    found = {}
    for run in folder.glob("*-s*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        if str(config["algo"]["learning_rate"]) == rate:
            points = [(r["step"], r[EVALUATION]) for r in rows(run) if EVALUATION in r]
            found[config["seed"]] = np.array(points)
    return dict(sorted(found.items()))


def finals(folder: Path, rate: str) -> np.ndarray:
    return np.array([points[-1, 1] for points in curves(folder, rate).values()])


def iqm(values) -> float:
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def resampled(*samples, statistic) -> tuple[float, float]:
    """A 95 % percentile interval, with other resamples than SciPy."""
    rng = np.random.default_rng(5)
    drawn = [statistic(*(rng.choice(s, len(s)) for s in samples)) for _ in range(4000)]
    return tuple(np.percentile(drawn, [2.5, 97.5]))


class Page(HTMLParser):
    """The resources that a page would load, its visible words, and the ids in its picture."""

    def __init__(self, text: str):
        super().__init__()
        self.loads, self.words, self.ids, self.tags = [], [], [], set()
        self._inside = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._inside = tag
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action") and not value.startswith(
                "#"
            ):
                self.loads.append(value)
            self.loads += [found for found in re.findall(r"url\(([^)]*)", value or "") if not found.startswith("#")]
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data):
        if self._inside in ("style", "script"):
            self.loads += re.findall(r"@import.*|https?:.*|fetch\(.*|url\([^#].*", data)
        elif data.strip():
            self.words.append(data.strip())


def test_a_sweep_is_plotted_and_its_numbers_equal_the_records(made):
    out = rlox("plot", "sweep", cwd=made).stdout
    assert "sweep/plot.png" in out
    assert "sweep/plot.html" in out
    text = (made / "sweep/plot.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert {"svg", "table", "script"} <= page.tags
    assert not page.tags & {"link", "img", "iframe"}
    for label, rate in ((FAST, "0.01"), (SLOW, "1e-05")):
        scores = finals(made / "sweep", rate)
        assert len(scores) == 5
        row = re.search(
            rf"^{re.escape(label)} +CartPole-v1 +5 finished +(\S+) +(\S+) to (\S+) +(\S+)", out, re.MULTILINE
        )
        assert float(row[1]) == pytest.approx(iqm(scores), rel=1e-3)
        # All resamples of five scores can be listed; a random bootstrap must come close to the quantiles of this list.
        listed = [iqm(resample) for resample in itertools.product(scores, repeat=5)]
        for shown, (least, most) in ((row[2], (0.015, 0.035)), (row[3], (0.965, 0.985))):
            bounds = np.quantile(listed, [least, most], method="inverted_cdf")
            assert bounds[0] - 0.05 <= float(shown) <= bounds[1] + 0.05
        best = iqm([points[:, 1].max() for points in curves(made / "sweep", rate).values()])
        assert float(row[4]) == pytest.approx(best, rel=1e-3)
        assert {label, row[1], row[4], f"{row[2]} to {row[3]}"} <= set(page.words)
    # The lower rate comes first, though it is greater as text; every group has its elements in the picture.
    assert page.words.index(SLOW) < page.words.index(FAST)
    assert all(sum(name.startswith(f"g{i}-") for name in page.ids) > 8 for i in (0, 1))
    assert any("rlox train env=CartPole-v1" in word and "algo.learning_rate=0.01 seed=0" in word for word in page.words)
    assert "mlflow" not in text  # the address of a tracker may contain a password


def test_losses_have_no_best_and_runs_on_a_dataset_count_updates(made, tmp_path):
    shutil.copytree(made / "again", tmp_path / "again")
    edit(tmp_path / "again", "dataset: null", "dataset: {source: rows.arrow}")
    out = rlox("plot", "again", "--metric", "loss/value", "--out", "a.html", cwd=tmp_path).stdout
    assert re.search(r"1 finished .* one run +– +[\d,]+ *$", out, re.MULTILINE)
    text = (tmp_path / "a.html").read_text()
    assert {"best", "updates/s", "–"} <= set(Page(text).words)
    assert "steps/s" not in text
    assert "best is the same of each run's highest return" in text


def test_the_list_of_runs_shows_small_scores(made, tmp_path):
    run = tmp_path / "outputs" / "again"
    shutil.copytree(made / "again", run)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'("eval/mean_return": ?)[\d.]+', r"\g<1>0.1234", text))
    assert re.search(r" finished +0\.1234 *$", rlox("ls", "runs", cwd=tmp_path).stdout, re.MULTILINE)


def test_the_picture_shows_both_groups(made, tmp_path):
    from matplotlib.image import imread

    draw(sorted((made / "sweep").glob("*-s*")), EVALUATION, "steps", [], [], [tmp_path / "plot.png"])
    picture = imread(tmp_path / "plot.png")
    height, width, _ = picture.shape
    assert height > 900
    assert width > 1200
    pixels = np.round(picture[..., :3] * 255).astype(int).reshape(-1, 3)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == colour).all(-1).sum() > 1000
    # Panels do not overlap: white rows across the whole width separate them.
    white = (picture[..., :3] > 0.99).all((1, 2))
    assert len([1 for is_white, run in itertools.groupby(white) if is_white and len(list(run)) > 5]) >= 4


@pytest.mark.parametrize(("suffix", "begins"), [(".pdf", b"%PDF-"), (".svg", b"<?xml")])
def test_the_ending_of_a_file_chooses_its_format(suffix, begins, made, tmp_path):
    path = (tmp_path / "plot").with_suffix(suffix)
    out = rlox("plot", "again", "--out", path, cwd=made).stdout
    assert out.endswith(f"  {suffix[1:]:<7} {path}\n")
    assert path.read_bytes().startswith(begins)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_groups_are_chosen_by_key_and_by_path(made, tmp_path):
    out = rlox("plot", "sweep", "--by", "learning_rate", "--out", tmp_path / "a.html", cwd=made).stdout
    assert re.search(r"^learning_rate=1e-05 +CartPole-v1 +5 finished", out, re.MULTILINE)
    done = rlox(
        *("plot", "sweep", "again", "--label", "<b>$x^{$", "--label", "[b]&", "--out", tmp_path / "deep" / "b.html"),
        *("--out", tmp_path / "b.png"),
        cwd=made,
    )
    assert re.search(r"^<b>\$x\^\{\$ +CartPole-v1 +10 finished", done.stdout, re.MULTILINE)
    assert re.search(r"^\[b\]& +CartPole-v1 +1 finished", done.stdout, re.MULTILINE)
    assert "pools runs that differ in algo.learning_rate" in done.stderr
    page = Page((tmp_path / "deep" / "b.html").read_text())
    assert {"<b>$x^{$", "[b]&"} <= set(page.words)
    assert "b" not in page.tags
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_rows_that_a_resume_superseded_are_not_plotted(made, tmp_path):
    run = tmp_path / "again"
    shutil.copytree(made / "again", run)
    shutil.copytree(run / "checkpoints", tmp_path / "older")
    rlox("train", "resume=again", "total_timesteps=4096", cwd=tmp_path)
    # Resume from the older checkpoint, with another learning rate so that the numbers differ.
    shutil.copytree(tmp_path / "older", run / "checkpoints", dirs_exist_ok=True)
    rlox("train", "resume=again", "total_timesteps=6144", "algo.learning_rate=0.1", cwd=tmp_path)
    evaluated = [r for r in rows(run) if EVALUATION in r]
    kept = [r for r in evaluated if r["segment"] == 0]
    after = [r for r in evaluated if r["segment"] == 2]
    assert len(kept) < len(evaluated) - len(after)
    read = read_run(run, [EVALUATION])
    steps, seconds, values = read.series[EVALUATION]
    assert steps.tolist() == [r["step"] for r in kept + after]
    assert values.tolist() == [r[EVALUATION] for r in kept + after]
    assert (np.diff(steps) > 0).all()
    assert (np.diff(seconds) > 0).all()
    # The time between stop and resume does not count as training.
    starts = [r["time"] for r in rows(run) if r.get("event") == "start"]
    assert seconds[-1] < starts[2] - starts[0]
    assert read.status == "finished"
    assert read.shares["update"] > 0


def test_unfinished_runs_are_plotted_up_to_their_last_row(sweep):
    killed = sweep / "4-ppo-CartPole-v1-s4"
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = [i for i, line in enumerate(lines) if EVALUATION in line][1]
    # No checkpoint covers the last rows: trackers must wait for them, plots need not. The very last row is incomplete.
    (killed / "metrics.jsonl").write_text("".join(x for x in lines[: last + 1] if '"event":"c' not in x) + '{"segme')
    # A running trainer that resumed at the last step and has written nothing yet.
    with Record(sweep / "9-ppo-CartPole-v1-s4", resume_step=4096):
        out = rlox("plot", sweep, "--out", sweep / "a.html", cwd=sweep).stdout
    assert re.search(rf"^{SLOW} +CartPole-v1 +4 finished, 1 killed", out, re.MULTILINE)
    assert re.search(rf"^{FAST} +CartPole-v1 +4 finished, 1 running", out, re.MULTILINE)
    assert "4 finished, 1 killed" in Page((sweep / "a.html").read_text()).words
    runs, notes = read_runs([sweep])
    assert notes == []
    slow = group_runs(runs)[0]
    found = curve(slow.runs, EVALUATION, by_time=False)
    assert found.n.tolist() == [5, 5, 4, 4]
    points = np.array([points[:, 1] for points in curves(sweep, "1e-05").values() if len(points) == 4])
    assert found.middle.value[-1] == pytest.approx(iqm(points[:, -1]))
    # The table counts scores of finished runs.
    assert float(re.search(rf"^{SLOW}.* killed +(\S+)", out, re.MULTILINE)[1]) == pytest.approx(
        iqm(points[:, -1]), rel=1e-3
    )


def test_runs_that_differ_only_in_how_they_were_run_are_one_group(sweep):
    runs = sorted(sweep.glob("*-s*"))
    edit(runs[0], "\n  workers: -1\n", "\n  workers: 0\n")  # as a launcher writes it
    edit(runs[1], "threads: 1", "threads: 2")
    edit(runs[2], "backend: native", "backend: torch")
    edit(runs[3], "every_s: 60.0", "every_s: 10.0")
    read, notes = read_runs([sweep])
    assert notes == []
    groups = group_runs(read)
    assert [(group.label, len(group.runs), group.pooled) for group in groups] == [(SLOW, 5, []), (FAST, 5, [])]
    assert not find_differing_keys(groups[0].runs)
    # A copy that differs only in them is a duplicate, unless its key is asked for.
    shutil.copytree(runs[4], sweep / "copy")
    edit(sweep / "copy", "threads: 1", "threads: 4")
    assert "has the same settings and seed, except for threads" in read_runs([sweep])[1][0]
    read, notes = read_runs([sweep], by=["threads"])
    assert notes == []
    assert [len(group.runs) for group in group_runs(read, ["threads"])] == [9, 1, 1]


def test_operational_settings_are_declared_where_the_setting_is():
    keys = set(operational_keys(RunConfig))
    assert {"logger", "checkpoint", "eval.workers", "env.workers", "device", "threads", "max_time", "remote"} <= keys
    assert not keys & {"seed", "total_timesteps", "env.n_envs", "eval.n_episodes", "model", "algo"}
    assert {"accumulation", "gradient_checkpointing"} == set(operational_keys(SFTConfig))


def test_damaged_runs_are_named_and_the_others_plotted(sweep):
    runs = sorted(sweep.glob("*-s*"))
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[0] / "metrics.jsonl").write_text("".join([*lines[:2], "{broken\n", *lines[3:]]))
    edit(runs[1], "seed: 1", "seed: one")
    edit(runs[2], '"eval/', '"odd/', "metrics.jsonl")
    shutil.copytree(runs[3], sweep / "copy")
    done = rlox("plot", sweep, "--out", sweep / "a.png", cwd=sweep)
    assert re.search(r"0-ppo-CartPole-v1-s0 is left out: .*metrics\.jsonl: line 3 must be one JSON object", done.stderr)
    assert "seed must have a valid value, got 'one'" in done.stderr
    assert "no eval/mean_return yet" in done.stderr
    assert "has the same settings and seed" in done.stderr
    assert re.search(rf"^{SLOW} +CartPole-v1 +2 finished", done.stdout, re.MULTILINE)
    assert (sweep / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "no runs under nowhere; name run folders"),
        (["sweep", "--metric", "loss/valu"], "no run has loss/valu; did you mean 'loss/value'?"),
        (["sweep", "--by", "learning"], "--by must be path or a key of the runs, got 'learning'"),
        (["sweep", "--out", "a.gif"], "--out must end in .png, .pdf, .svg or .html, got a.gif"),
        (["sweep", "--x", "epochs"], "--x must be steps or time, got 'epochs'"),
        (["sweep", "--label", "a", "--label", "b"], "--label must be given once for each PATH (1), got 2"),
    ],
)
def test_bad_input_is_a_paragraph(made, args, message, monkeypatch):
    monkeypatch.chdir(made)
    done = CliRunner().invoke(app, ["plot", *args])
    assert done.exit_code == 2
    assert done.stderr.startswith("rlox plot: ")
    assert message in done.stderr
    assert done.stdout == ""
    assert not (made / "outputs").exists()


def test_other_metrics_over_time(made, tmp_path):
    args = ("--metric", "mean_reward", "--x", "time", "--out", tmp_path / "a.png", "--out", tmp_path / "a.html")
    out = rlox("plot", "again", *args, cwd=made).stdout
    last = [r["episode/return"] for r in rows(made / "again") if "episode/return" in r][-1]
    assert float(re.search(r"1 finished +(\S+) +one run", out)[1]) == pytest.approx(last, rel=1e-3)
    assert "final training return" in (tmp_path / "a.html").read_text()


def test_compare_agrees_with_numpy(made, tmp_path):
    a, b = tmp_path / "slow", tmp_path / "fast"
    for i, run in enumerate(sorted((made / "sweep").glob("*-s*"))):
        shutil.copytree(run, (a if i < 5 else b) / run.name)
    edit(b / "5-ppo-CartPole-v1-s0", '"numpy":"', '"numpy":"9.', "metrics.jsonl")
    found = json.loads(rlox("compare", a, b, "--threshold", "60", "--json", cwd=tmp_path).stdout)
    assert found["config"] == {"algo.learning_rate": [["1e-05"], ["0.01"]]}
    assert list(found["versions"]) == ["numpy"]
    reported = found["environments"]["CartPole-v1"]
    ours, theirs = finals(b, "0.01"), finals(a, "1e-05")
    final = reported["metrics"]["final"]
    assert [final["a"], final["b"]] == pytest.approx([iqm(theirs), iqm(ours)])
    assert final["difference"] == pytest.approx(iqm(ours) - iqm(theirs))
    low, high = resampled(ours, theirs, statistic=lambda x, y: iqm(x) - iqm(y))
    assert [final["low"], final["high"]] == pytest.approx([low, high], abs=0.05 * (high - low))
    heights = {}
    for name, folder, rate in (("a", a, "1e-05"), ("b", b, "0.01")):
        lines = list(curves(folder, rate).values())
        areas = [((p[1:, 1] + p[:-1, 1]) / 2 * np.diff(p[:, 0])).sum() / np.ptp(p[:, 0]) for p in lines]
        assert reported["metrics"]["mean_over_steps"][name] == pytest.approx(iqm(areas))
        first = [next((step for step, value in p if value >= 60), np.inf) for p in lines]
        middle = reported["metrics"]["steps_to_threshold"][name]
        assert (np.inf if middle is None else middle) == np.median(first)
        heights[name] = sum(map(np.isfinite, first))
    assert reported["metrics"]["steps_to_threshold"]["reached"] == list(heights.values())
    assert reported["pairs"] == {
        "seeds": [0, 1, 2, 3, 4],
        "b_higher": (ours > theirs).sum(),
        "equal": (ours == theirs).sum(),
    }
    wins = np.mean([(x > y) + 0.5 * (x == y) for x in ours for y in theirs])
    assert reported["verdict"]["improvement"]["value"] == pytest.approx(wins)
    # The exact permutation test: all ways to choose five of the ten.
    pool = np.concatenate([ours, theirs])
    splits = [list(chosen) for chosen in itertools.combinations(range(10), 5)]
    shifts = np.array([iqm(pool[c]) - iqm(np.delete(pool, c)) for c in splits])
    at = iqm(ours) - iqm(theirs)
    p = 2 * min((shifts >= at - 1e-9).mean(), (shifts <= at + 1e-9).mean())
    assert reported["verdict"]["p_value"] == pytest.approx(min(1.0, p))
    apart = p <= 0.05 and not low <= 0 <= high
    assert reported["verdict"]["winner"] == (("b" if at > 0 else "a") if apart else None)
    text = rlox("compare", a, b, cwd=tmp_path).stdout
    assert re.search(r"algo\.learning_rate +1e-05 +→ +0\.01", text)
    assert f"verdict: {reported['verdict']['sentence']}" in text
    assert "seeds: A 0 to 4; B 0 to 4" in text


def test_the_groups_of_one_folder_are_compared_with_the_first(made, sweep):
    def compare(folder, *args, code=0):
        return rlox("compare", folder, *args, cwd=sweep.parent, code=code)

    two = json.loads(compare(sweep, "--json").stdout)["environments"]["CartPole-v1"]
    best, worst = two["groups"]
    assert (two["baseline"], best["group"], worst["group"]) == (SLOW, FAST, SLOW)
    ours, theirs = finals(sweep, "0.01"), finals(sweep, "1e-05")
    pair = to_json_numbers(verdict(theirs, ours))
    assert [best["final"], worst["final"]] == pytest.approx([iqm(ours), iqm(theirs)])
    assert best["difference"] == {key: pair[key] for key in ("difference", "low", "high")}
    assert best["p_adjusted"] == best["p_value"] == pair["p_value"]
    assert best["verdict"] == {"b": "better", "a": "worse", None: None}[pair["winner"]] == "better"
    assert [run["seed"] for run in best["runs"]] == [0, 1, 2, 3, 4]
    # A third group equals the slow one; with two comparisons, p counts twice.
    for run in sorted(sweep.glob("*-s*"))[:5]:
        shutil.copytree(run, sweep / f"third-{run.name}")
        edit(sweep / f"third-{run.name}", "learning_rate: 1.0e-05", "learning_rate: 2.0e-05")
    three = json.loads(compare(sweep, "--json").stdout)["environments"]["CartPole-v1"]
    found = {row["group"]: row for row in three["groups"]}
    assert found[FAST]["p_adjusted"] == pytest.approx(2 * pair["p_value"])
    assert found["ppo learning_rate=2e-05"]["p_adjusted"] == 1.0
    assert found["ppo learning_rate=2e-05"]["verdict"] is None
    text = compare(sweep, "--baseline", FAST).stdout
    assert re.search(rf"{FAST} .* baseline", text)
    assert re.search(rf"{SLOW} .* -\d.* worse", text)
    assert "adjusted for 2 comparisons (Holm)" in text
    # Runs that are not finished are left out; those of a group without others give no verdict.
    for run in sweep.glob("[56]-*-s*"):
        edit(run, '"status":"finished"', '"status":"interrupted"', "metrics.jsonl")
    assert f"left out: 2 runs of {FAST} (interrupted)" in (text := compare(sweep).stdout)
    assert "3 runs in a group cannot show a difference here: train 5 seeds or more" in text
    for run in sweep.glob("[789]-*-s*"):
        edit(run, '"status":"finished"', '"status":"interrupted"', "metrics.jsonl")
    assert f"no run of {FAST} is finished" in (text := compare(sweep).stdout)
    assert re.search(rf"{FAST} .* not shown", text)
    assert (
        "did you mean 'ppo learning_rate=0.01'" in compare(sweep, "--baseline", "ppo learning_rate=0.1", code=2).stderr
    )
    assert "--baseline must be left out with B" in compare(sweep, made / "again", "--baseline", FAST, code=2).stderr
    assert "--threshold needs two sides" in compare(sweep, "--threshold", "3", code=2).stderr
    assert "must contain two groups of runs on one environment, got ppo on" in compare(made / "again", code=2).stderr


def test_verdicts():
    apart = verdict(np.array([10.0, 11, 12, 13, 14]), np.array([20.0, 21, 22, 23, 24]))
    assert apart["winner"] == "b"
    assert re.match(r"B is better: its IQM is 10 higher .* beats a run of A with probability 1\.00", apart["sentence"])
    back = verdict(np.array([20.0, 21, 22, 23, 24]), np.array([10.0, 11, 12, 13, 14]))
    assert back["winner"] == "a"
    assert re.match(r"A is better: its IQM is 10 higher .* beats a run of B with probability 1\.00", back["sentence"])
    # With three runs on each side, such a separation has probability 1/10; a bootstrap alone would report a difference.
    few = verdict(np.array([10.0, 11, 12]), np.array([20.0, 21, 22]))
    assert few["low"] > 0
    assert few["winner"] is None
    assert "3 runs per side do not distinguish A and B" in few["sentence"]
    assert few["runs_needed"] == 4
    same = verdict(np.full(5, 500.0), np.full(5, 500.0))
    assert same["winner"] is None
    assert same["runs_needed"] is None
    noise = verdict(np.array([0.0, 10, 20, 30, 40]), np.array([8.0, 18, 28, 38, 48]))
    assert noise["winner"] is None
    assert noise["runs_needed"] > 5
    assert f"about {noise['runs_needed'] - 5} more per side" in noise["sentence"]


def test_comparisons_without_a_verdict_and_invalid_pairs(made, tmp_path):
    one, other = "sweep/0-ppo-CartPole-v1-s0", "sweep/5-ppo-CartPole-v1-s0"
    text = rlox("compare", one, other, cwd=made).stdout
    assert "verdict: one run per side supports no verdict; train more seeds" in text
    assert "seeds that both have: 1;" in text
    assert "one run on one side supports no verdict" in rlox("compare", "again", "sweep", cwd=made).stdout
    assert "must not contain the same runs" in rlox("compare", "sweep", one, cwd=made, code=2).stderr
    shutil.copytree(made / "again", tmp_path / "elsewhere")
    edit(tmp_path / "elsewhere", "id: CartPole-v1", "id: Acrobot-v1")
    output = rlox("compare", one, tmp_path / "elsewhere", cwd=made, code=2).stderr
    assert "must have an environment in common, got CartPole-v1 and Acrobot-v1" in output
    assert "no runs under nowhere" in rlox("compare", one, "nowhere", cwd=made, code=2).stderr


def test_draw_writes_the_plot_of_a_sweep(made, tmp_path):
    out = tmp_path / "out"
    for run in sorted((made / "sweep").glob("*-s*"))[:3]:
        shutil.copytree(run, out / run.name)
    (out / "job").mkdir()  # a job that never started must not prevent the plot
    draw([out], EVALUATION, "steps", [], [], [])
    assert sorted(out.glob("plot.*")) == [out / "plot.html", out / "plot.png"]
    assert os.path.getsize(out / "plot.png") > 10_000
    assert "3 runs in 1 groups" in (out / "plot.html").read_text()
    with pytest.raises(ValueError, match="no runs under"):
        draw([out / "job"], EVALUATION, "steps", [], [], [tmp_path / "none" / "plot.png"])
    assert not (tmp_path / "none").exists()

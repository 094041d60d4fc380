"""The cells and the figure of benchmarks/few_steps.py."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import few_steps
from rlox.config import SACConfig
from rlox.config.off_policy import BufferConfig
from rlox_cli.config.compose import compose_jobs

NAMES = {
    "top_quantiles_to_drop_per_net": "drop_quantiles",
    "net_arch": "hidden_sizes",
    "activation_fn": "activation",
}
# What the peers' classes do without being told, by our names. They have no other option that ours have.
PEERS_OWN = {
    "train_freq": 1, "gradient_steps": 1, "max_grad_norm": None, "auto_entropy": True, "ent_coef": 1.0,
    "target_entropy": None, "entropy_per_action": -1.0, "n_critics": 2, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "weight_decay": 0.0, "learning_rate_schedule": "constant", "exploration_noise": 0.0, "policy_delay": 1,
    "critic_head": "mean", "policy_value": "min", "critic_norm": "none", "actor_norm": "none", "target_network": True,
}  # fmt: skip
PEERS_OWN_OF = {
    "sac": {},
    "tqc": {"critic_head": "quantile", "policy_value": "mean"},
    "crossq": {
        "critic_norm": "batch_renorm", "actor_norm": "batch_renorm", "norm_after": True, "renorm_warmup": 100_000,
        "target_network": False, "adam_beta1": 0.5,
    },
}  # fmt: skip


def peers_settings(cell):
    """Return the settings of the peer's algorithm and of its memory by our names: those of `few_steps.py`, then the
    peer's own, then our defaults of options that it does not have."""
    arguments = few_steps.their_settings(cell)["kw"]
    arguments |= arguments.pop("policy_kwargs")
    memory = {**asdict(BufferConfig()), "size": arguments.pop("buffer_size")}
    if isinstance(rate := arguments["learning_rate"], dict):
        arguments["learning_rate"] = rate["falls_from"]
        arguments |= {"learning_rate_schedule": "linear", "learning_rate_end": rate["to"] / rate["falls_from"]}
    if isinstance(widths := arguments["net_arch"], dict):
        arguments |= {"net_arch": widths["pi"], "critic_hidden_sizes": widths["qf"]}
    given = {NAMES.get(name, name): value for name, value in arguments.items()}
    return {**asdict(SACConfig()), **PEERS_OWN, **PEERS_OWN_OF[cell.split("-")[0]], **given}, memory


CELLS = [cell for cell in few_steps.CELLS if cell.split("-")[0] in few_steps.PEERS]


@pytest.mark.parametrize("cell", CELLS)
def test_both_sides_have_the_same_settings(cell):
    (job,) = compose_jobs([], few_steps.our_words(cell))
    c, theirs = job.config, few_steps.their_settings(cell)
    assert (theirs["env"], theirs["steps"], theirs["n_envs"]) == (c.env.id, c.total_timesteps, c.env.n_envs)
    assert c.env.kwargs == theirs["env_kwargs"]
    assert (c.env.wrappers, c.env.reward_fn, theirs["normalize"]) == ([], None, None)
    algorithm, memory = peers_settings(cell)
    assert asdict(c.algo) == algorithm
    assert asdict(c.buffer) == memory


def test_settings_of_one_side_alone_are_seen():
    ours = {
        "algo.gradient_steps": 4, "algo.auto_entropy": "false", "algo.ent_coef": 0.7, "algo.adam_beta2": 0.5,
        "algo.weight_decay": 0.3, "algo.target_entropy": -9, "algo.normalize_rewards": "true", "buffer.n_step": 3,
    }  # fmt: skip
    words = [*few_steps.our_words("sac-Hopper-v5"), *(f"{name}={value}" for name, value in ours.items())]
    (job,) = compose_jobs([], words)
    seen = set()
    sections = {"algo": job.config.algo, "buffer": job.config.buffer}
    for (section, config), theirs in zip(sections.items(), peers_settings("sac-Hopper-v5"), strict=True):
        seen |= {f"{section}.{name}" for name, value in asdict(config).items() if value != theirs[name]}
    assert seen == set(ours)


def learned(folder, label, finals, first_seed=100, settings=None):
    """Write the file of `rlox bench learn` of a cell whose seeds end with the returns `finals`; return its path."""
    rows = {
        str(first_seed + i): [
            {"step": step, "mean": final * step / 1e5, "std": 0.0, "cpu_s": step / 1e3} for step in (5e4, 1e5)
        ]
        for i, final in enumerate(finals)
    }
    cell = {"algo": "sac", "env": label.split("-", 1)[1], "settings": settings or {}, "curves": rows}
    path = folder / f"{label}-{first_seed}-{len(settings or {})}.json"
    source = {"command": f"{label} from {first_seed}", "date": "2026-11-27", "machine": "one", "versions": {}}
    path.write_text(json.dumps({**source, "cells": {label: cell}}))
    return path


def test_the_figure_and_the_ratios_to_sac(tmp_path, capsys):
    paths = [
        learned(tmp_path, "sac-Hopper-v5", [0.0, 100.0, 100.0, 100.0, 900.0]),
        learned(tmp_path, "crossq-Hopper-v5", [200.0] * 5),
        learned(tmp_path, "sac-Ant-v5", [100.0] * 5),
        learned(tmp_path, "crossq-Ant-v5", [800.0] * 5),
        learned(tmp_path, "xqc-Walker2d-v5", [1.0]),
    ]
    few_steps.main("figure", str(tmp_path / "all.png"), *map(str, paths))
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"crossq": pytest.approx({"Hopper-v5": 2.0, "Ant-v5": 8.0, "geometric mean": 4.0})}
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"


def test_results_of_single_seeds_become_one_file(tmp_path, capsys):
    first = learned(tmp_path, "crossq-Hopper-v5", [1.0, 2.0])
    theirs = json.loads(first.read_text())
    theirs["cells"]["crossq-Hopper-v5"]["curves_sb3"] = {"100": [{"step": 1, "mean": 5.0, "cpu_s": 1.0}]}
    first.write_text(json.dumps(theirs))
    second = learned(tmp_path, "crossq-Hopper-v5", [6.0], first_seed=102)
    sac = learned(tmp_path, "sac-Hopper-v5", [1.0, 1.0, 1.0])
    some, every = str(tmp_path / "some.json"), str(tmp_path / "every.json")
    few_steps.main("merge", some, str(first), str(sac))
    few_steps.main("merge", every, some, str(second), str(sac))
    merged = json.loads(Path(every).read_text())
    assert list(merged["cells"]["crossq-Hopper-v5"]["curves"]) == ["100", "101", "102"]
    assert merged["cells"]["crossq-Hopper-v5"]["curves_sb3"]["100"][-1]["mean"] == 5.0
    assert [source["command"] for source in merged["sources"]] == [
        "crossq-Hopper-v5 from 100",
        "sac-Hopper-v5 from 100",
        "crossq-Hopper-v5 from 102",
    ]
    few_steps.main("figure", str(tmp_path / "all.png"), every)
    assert json.loads(capsys.readouterr().out)["crossq"]["Hopper-v5"] == pytest.approx(3.0)


def test_trainings_with_the_peer_are_merged_and_drawn(tmp_path, capsys):
    ours, every = learned(tmp_path, "sac-Hopper-v5", [1.0]), str(tmp_path / "every.json")
    rows = [{"step": step, "mean": 2.0 * step, "std": 1.0, "cpu_s": 1.0 * step} for step in (1, 2)]
    paths = []
    for cell in ("sac-Hopper-v5", "tqc-Hopper-v5"):
        settings = few_steps.their_settings(cell)
        record = {"cell": cell, "seed": 100, "settings": settings, "sb3": "2.9.2", "evaluations": rows}
        paths.append(tmp_path / f"{cell}.json")
        paths[-1].write_text(json.dumps(record))
    few_steps.main("merge", every, *map(str, (*paths, ours)))
    merged = json.loads(Path(every).read_text())
    sac = merged["cells"]["sac-Hopper-v5"]
    assert sac["curves_sb3"] == {
        "100": [{"step": 1, "mean": 2.0, "cpu_s": 1.0}, {"step": 2, "mean": 4.0, "cpu_s": 2.0}]
    }
    assert list(sac["curves"]) == ["100"]
    assert merged["sources"][0] == {"cell": "sac-Hopper-v5", "seed": 100, "sb3": "2.9.2"}
    few_steps.main("figure", str(tmp_path / "all.png"), every)
    assert json.loads(capsys.readouterr().out) == {}
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_results_of_other_settings_or_runs_do_not_merge(tmp_path):
    first = learned(tmp_path, "crossq-Hopper-v5", [1.0])
    wider = learned(tmp_path, "crossq-Hopper-v5", [2.0], first_seed=101, settings={"gamma": 0.9})
    with pytest.raises(ValueError, match="other settings"):
        few_steps.merge(tmp_path / "all.json", [first, wider])
    again = tmp_path / "again.json"
    again.write_text(first.read_text().replace('"mean": 1.0', '"mean": 3.0'))
    with pytest.raises(ValueError, match="another curve of seed 100"):
        few_steps.merge(tmp_path / "all.json", [first, again])
    assert not (tmp_path / "all.json").exists()


def test_trainings_of_the_peer_with_other_settings_do_not_merge(tmp_path):
    settings, paths = few_steps.their_settings("sac-Hopper-v5"), []
    for seed, gamma in ((100, 0.99), (101, 0.9)):
        other = {**settings, "kw": {**settings["kw"], "gamma": gamma}}
        record = {"cell": "sac-Hopper-v5", "seed": seed, "settings": other, "sb3": "2.9.2", "evaluations": []}
        paths.append(tmp_path / f"{seed}.json")
        paths[-1].write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"101\.json: sac-Hopper-v5 has other settings"):
        few_steps.merge(tmp_path / "all.json", paths)
    assert not (tmp_path / "all.json").exists()


def test_a_result_that_contains_the_training_of_the_peer_merges_with_its_own_file(tmp_path):
    evaluation = {"step": 100_000, "mean": 1.0, "cpu_s": 2.0}
    record = {"cell": "sac-Hopper-v5", "seed": 100, "settings": few_steps.their_settings("sac-Hopper-v5")}
    (tmp_path / "peer.json").write_text(json.dumps({**record, "evaluations": [evaluation]}))
    curves = {"100": [{**evaluation, "std": 0.5}]}  # `rlox bench learn` also keeps the deviation
    result = {"cells": {"sac-Hopper-v5": {"algo": "sac", "env": "Hopper-v5", "curves": curves, "curves_sb3": curves}}}
    result |= dict.fromkeys(("command", "date", "machine", "versions"), "")
    (tmp_path / "ours.json").write_text(json.dumps(result))
    few_steps.merge(tmp_path / "all.json", [tmp_path / "peer.json", tmp_path / "ours.json"])
    cell = json.loads((tmp_path / "all.json").read_text())["cells"]["sac-Hopper-v5"]
    assert cell["curves_sb3"] == {"100": [evaluation]}
    assert cell["curves"] == curves


def test_trainings_of_the_peer_are_compared_with_if_they_have_one_of_the_seeds(tmp_path, monkeypatch):
    typed = []
    monkeypatch.setattr(few_steps.subprocess, "run", lambda words, cwd: typed.append(words) or done)
    monkeypatch.setattr(few_steps, "HERE", tmp_path)
    done = few_steps.subprocess.CompletedProcess([], 0)
    (tmp_path / "few_steps").mkdir()
    (tmp_path / "few_steps/sac-Hopper-v5-s103.json").write_text("{}")
    few_steps.learn("sac-Hopper-v5", ["--first-seed", "102", "--seeds", "2"])
    few_steps.learn("sac-Hopper-v5", [])  # seeds 100 to 104
    few_steps.learn("sac-Hopper-v5", ["--first-seed", "104", "--seeds=2"])
    few_steps.learn("sac-Hopper-v5", ["--seeds=3"])
    few_steps.learn("sac-Ant-v5", [])
    assert ["--against" in words for words in typed] == [True, True, False, False, False]
    assert typed[0][typed[0].index("--reference") + 1] == str(tmp_path / "few_steps")
    assert typed[2][-3:] == ["--first-seed", "104", "--seeds=2"]

"""Open-loop predictions compared with the truth: errors, films and plots."""

import warnings
from types import SimpleNamespace

import numpy as np
import probes
import pytest
import torch
from counting_agent import Counting, Foreseeing
from PIL import Image

import rlox
from rlox.callbacks import EvalCallback, PredictionsCallback
from rlox.envs import make_vec_env
from rlox.evaluation.pictures import require_kind, save
from rlox.evaluation.predictions import Predictions, open_loop
from rlox.kernels.rng import Rng
from rlox.nn.acting import Inputs, draw_noise


def algorithm(env, agent=Foreseeing):
    vec = make_vec_env(env, 1, 0)
    spec = vec.spec
    actor = agent(spec)

    def arguments(n_episodes, seed, deterministic):
        return {"policy": actor, "env_id": env, "n_episodes": n_episodes, "seed": seed or 0,
                "deterministic": deterministic}  # fmt: skip

    return SimpleNamespace(
        name="fake", actor=actor, spec=spec, _evaluation_arguments=arguments, counters=SimpleNamespace(steps=0),
        callbacks=SimpleNamespace(callbacks=[]),
    )  # fmt: skip


def test_exact_predictions_have_no_error_and_sequences_do_not_cross_episodes():
    # Observations of Countdown increase by 1 per step, as the agent predicts.
    found = open_loop(algorithm(lambda: probes.Countdown(9, True)), 4, context=2, horizon=4)
    assert (found.context, found.horizon) == (2, 4)
    assert found.truth.shape == (4, 6, 1)
    assert found.predicted.shape == (4, 4, 1)
    assert np.array_equal(found.truth[0, :, 0], np.arange(6))
    assert (found.errors() == 0).all()
    assert found.summary() == {"open_loop_mse": 0.0, "open_loop_share": 0.0, "open_loop_last_share": 0.0}
    agent = algorithm(lambda: probes.Countdown(13, True))
    found = open_loop(agent, 4, context=2, horizon=4)
    # The agent's state matches the position in the episode: its step count equals the observation.
    assert agent.actor.carried[:, 0].tolist() == found.truth[:, 0, 0].tolist() == [0, 6] * 4
    # No episode is as long as requested, so the horizon is limited to what is available.
    assert open_loop(algorithm(lambda: probes.Countdown(9, True)), 2, context=5, horizon=15).horizon == 4
    with pytest.raises(ValueError, match="context must be less than the 3 steps of the longest episode, got 3"):
        open_loop(algorithm(lambda: probes.Countdown(3, True)), 2, context=3)


def test_long_episodes_are_cut_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = open_loop(algorithm(lambda: probes.Countdown(2000, True)), 1, context=2, horizon=4)
    assert len(found.truth) == 64


def test_predictions_start_from_the_agents_state():
    agent = rlox.DreamerV3(
        "CartPole-v1", deter_dim=16, hidden_dim=8, stoch_dim=2, stoch_classes=4, learning_starts=8, unimix=0.0
    )
    rng = np.random.default_rng(0)
    obs, actions = (
        rng.normal(size=(3, 9, 4)).astype(np.float32),
        np.eye(2, dtype=np.float32)[rng.integers(2, size=(3, 9))],
    )
    actor, start = agent.actor, np.zeros((3, agent.policy.n_carried), np.float32)
    drawn = Rng(1)
    each = [actor.open_loop(start, obs, actions, 4, drawn, n_futures=1) for _ in range(3)]
    assert each[0].shape == (3, 5, 4)
    assert np.abs(each[0] - each[1]).max() > 1e-3
    np.testing.assert_allclose(
        actor.open_loop(start, obs, actions, 4, Rng(1), n_futures=3), np.mean(each, 0), atol=1e-6
    )
    # With deterministic latents, acting through the first steps and observing them are the same.
    with torch.no_grad():
        for head in (agent.policy.rssm.post_out, agent.policy.rssm.prior.out):
            head.weight *= 1e5
    carry = start
    for t in range(2):
        carry = actor.act(Inputs(obs[:, t], None, carry), draw_noise(actor, 3, Rng(2)))[1]
        carry[:, -2:] = actions[:, t]
    later = actor.open_loop(carry, obs[:, 2:], actions[:, 2:], 2, Rng(3))
    np.testing.assert_allclose(later, actor.open_loop(start, obs, actions, 4, Rng(4)), atol=1e-5)
    assert np.abs(later - actor.open_loop(start, obs[:, 2:], actions[:, 2:], 2, Rng(3))).max() > 1e-3


def test_errors_against_numpy():
    rng = np.random.default_rng(0)
    truth, predicted = rng.normal(size=(7, 8, 3)).astype(np.float32), rng.normal(size=(7, 5, 3)).astype(np.float32)
    found = Predictions(truth, predicted)
    expected = [np.mean((truth[:, 3 + h].astype(float) - predicted[:, h]) ** 2) for h in range(5)]
    np.testing.assert_allclose(found.errors(), expected)
    variance = np.mean([truth[..., i].astype(float).var() for i in range(3)])
    assert found.summary()["open_loop_share"] == pytest.approx(np.mean(expected) / variance)
    assert found.summary()["open_loop_last_share"] == pytest.approx(expected[-1] / variance)


def test_parallel_native_episodes():
    found = open_loop(algorithm("CartPole-v1"), 8, deterministic=False, horizon=3, n_stretches=5)
    assert found.truth.shape == (5, 8, 4)
    assert (found.errors() > 0).all()


def test_an_agent_without_a_model_is_an_error():
    with pytest.raises(ValueError, match="open_loop: the algorithm must have a model of the world, got fake"):
        open_loop(algorithm("CartPole-v1", Counting))


def images(channels=1, n_stacked=1):
    truth = np.zeros((2, 6, channels * n_stacked, 16, 16), np.float32)
    truth[:, :, -channels:, :, 8:] = 200
    truth[:, :, -channels:, 15] = 10 * np.arange(6).reshape(6, 1, 1)
    predicted = truth[:, 2:].copy()
    predicted[:, :, -channels:, :8] += 50
    return Predictions(truth, predicted, n_stacked)


@pytest.mark.parametrize("predictions", [images(), images(3), images(1, 4)], ids=["grey", "colour", "stacked"])
def test_a_film_shows_truth_prediction_and_error(predictions, tmp_path):
    frames = list(predictions.frames())
    assert len(frames) == 6
    side = 96 + 16
    assert {frame.shape for frame in frames} == {(2 * side, 3 * side, 3)}
    seeing, later = frames[1], frames[2]
    inside = slice(8, 8 + 96)
    truth, foreseen, error = (later[inside, k * side + 8 : k * side + 104] for k in range(3))
    assert truth[60, 10].tolist() == [0, 0, 0]
    assert truth[60, 90].tolist() == [200, 200, 200]
    assert foreseen[10, 10].tolist() == [50, 50, 50]
    assert error[10, 10].tolist() == [50, 50, 50]
    assert error[60, 10].tolist() == [0, 0, 0]
    assert np.array_equal(seeing[inside, side + 8 : side + 104], seeing[inside, 8:104])
    assert seeing[6, side + 6].tolist() != later[6, side + 6].tolist()  # the border shows if the model still observes
    save(predictions, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as film:
        assert (film.n_frames, film.size) == (6, (3 * side, 2 * side))
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]


@pytest.mark.slow
def test_a_plot_of_vectors(tmp_path):
    found = open_loop(algorithm("CartPole-v1"), 2, deterministic=False, horizon=3)
    for name in ("a.png", "b.svg"):
        save(found, tmp_path / name)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[1] > picture.size[0]
    assert "steps ahead" in (tmp_path / "b.svg").read_text() or (tmp_path / "b.svg").stat().st_size > 5000
    with pytest.raises(ValueError, match="observations must be images, got vectors"):
        next(found.frames())


@pytest.mark.parametrize(("name", "image"), [("a.png", True), ("a.gif", False), ("a.txt", False), ("a", True)])
def test_the_file_ending_must_fit(name, image, tmp_path):
    with pytest.raises(ValueError, match=rf"predictions: the file must end in .* for {'images' if image else 'vec'}"):
        require_kind(tmp_path / name, image)


@pytest.mark.slow
@pytest.mark.parametrize(("env", "file"), [("CartPole-v1", "predictions.png"), (probes.BrightSide, None)])
def test_the_callback_plots_each_evaluation_once(env, file, tmp_path):
    logged, written = [], []
    callback = PredictionsCallback(
        tmp_path, lambda step, values: logged.append((step, values)), lambda step, name: written.append((step, name)), 2
    )
    found = SimpleNamespace(seed=3, deterministic=False)
    if file is None:
        with pytest.warns(RuntimeWarning, match="no predictions are drawn: open_loop: context must be less than th"):
            callback.on_evaluation(step=10, evaluation=found, algorithm=algorithm(env))
        callback.on_evaluation(step=20, evaluation=found, algorithm=algorithm(env))
        assert written == logged == [*tmp_path.iterdir()] == []
        return
    for step in (10, 10, 20):
        callback.on_evaluation(step=step, evaluation=found, algorithm=algorithm(env))
    # If an evaluation arrives late, the predictions are of the model at the current step.
    late = algorithm(env)
    late.counters.steps = 35
    callback.on_evaluation(step=30, evaluation=found, algorithm=late)
    assert [step for step, _ in logged] == [10, 20, 35]
    assert written == [(10, file), (20, file), (35, file)]
    assert (tmp_path / file).is_file()
    assert set(logged[0][1]) == {"model/open_loop_mse", "model/open_loop_share", "model/open_loop_last_share"}


@pytest.mark.slow
def test_the_callback_cuts_episodes_where_evaluations_do(tmp_path):
    callbacks = [EvalCallback(1, 1, max_steps=4), PredictionsCallback(tmp_path)]
    agent = rlox.DreamerV3("CartPole-v1", learning_starts=80, size="200k", callbacks=callbacks)
    with pytest.warns(RuntimeWarning, match="context must be less than the 4 steps of the longest episode, got 5"):
        agent.train(16)
    assert [*tmp_path.iterdir()] == []

"""Observations with an image and numbers: one vector in the memory, two networks in the model."""

import shutil

import camera_world
import forked
import numpy as np
import pytest
import torch
from PIL import Image

import rlox
from rlox.checkpoint import load_checkpoint

TINY = {
    "deter_dim": 16, "hidden_dim": 8, "stoch_dim": 2, "stoch_classes": 4, "batch_size": 2, "seq_len": 4,
    "replay_ratio": 1.0, "learning_starts": 20, "imagination_horizon": 3, "buffer_size": 500,
}  # fmt: skip
SMALL = [f"algo.{name}={value}" for name, value in TINY.items() if name != "buffer_size"]


@pytest.mark.slow
@pytest.mark.parametrize("env_workers", [0, 2])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, env_workers):
    def made():
        return rlox.DreamerV3(camera_world.CameraWorld, n_envs=2, seed=3, env_workers=env_workers, **TINY)

    straight = made()
    assert (straight.spec.obs_shape, straight.spec.images) == ((66,), ((0, 1, 8, 8),))
    before = [p.detach().clone() for p in (*straight.policy.encoder.parameters(), *straight.heads.decoder.parameters())]
    straight.train(60, schedule_timesteps=120)
    after = [*straight.policy.encoder.parameters(), *straight.heads.decoder.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))  # both networks are trained
    path = tmp_path / "checkpoints" / "a.safetensors"
    path.parent.mkdir()
    straight.save(path, memory=True)
    straight.train(60)
    resumed = rlox.DreamerV3.from_checkpoint(path, env_id=camera_world.CameraWorld)
    resumed.train(60)
    for one, other in zip(straight.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.evaluate(n_episodes=2, seed=0).summary() == straight.evaluate(n_episodes=2, seed=0).summary()


@pytest.mark.slow
def test_a_film_shows_the_image(tmp_path):
    shutil.copy(camera_world.__file__, tmp_path)
    words = ("env=CameraWorld-v0", "imports=[camera_world]", "total_timesteps=80", "output_dir=a", "logger=none")
    done = forked.run("train", "algo=dreamer", *SMALL, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "a" / "predictions.gif") as film:
        assert film.n_frames == 12
    done = forked.run("train", "--check", "algo=dreamer", *SMALL, *words, "output_dir=b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "observations of camera (an image), speed (2 numbers)" in " ".join(done.stdout.split())
    header = load_checkpoint(tmp_path / "a" / "checkpoints" / "last.safetensors").header
    assert header["algorithm"] == "dreamer"
    refused = forked.run("train", "algo=ppo", *words, "output_dir=c", cwd=tmp_path)
    assert refused.returncode != 0
    output = " ".join(refused.stderr.split())
    assert "must not mix images with other parts, got camera (an image), speed (2 numbers)" in output
    assert "or take DREAMER" in output
    # Offline algorithms reject such observations too.
    done = forked.run(
        "collect", "--env", "CameraWorld-v0", "--import", "camera_world", "--steps", "50", "--out", "a.arrow",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused = forked.run("train", "algo=bc", "dataset=a.arrow", *words, "output_dir=d", cwd=tmp_path)
    assert refused.returncode != 0
    assert "env=CameraWorld-v0: the observation space must not mix images" in " ".join(refused.stderr.split())


def test_nan_in_a_mixed_observation_is_named():
    class Broken(camera_world.CameraWorld):
        def seen(self):
            found = super().seen()
            if self.t == 3:
                found["speed"][1] = np.nan
            return found

    agent = rlox.DreamerV3(Broken, **TINY)
    with pytest.raises(FloatingPointError, match="number 1 of 'speed'"):
        agent.train(20)

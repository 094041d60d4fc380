"""What ``render()`` may return: everything with one meaning becomes RGB bytes, and the rest is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from rlox import PPO
from rlox.callbacks import EvalCallback, VideoCallback
from rlox.evaluation.video import VideoWriter

RGB = np.random.default_rng(0).integers(0, 256, (8, 10, 3), dtype=np.uint8)
GREY = RGB[:, :, 0]
AS_RGB = np.stack([GREY] * 3, axis=2)
OPAQUE = np.concatenate([RGB, np.full((8, 10, 1), 255, np.uint8)], axis=2)
CONVERTED = {
    "bytes": (RGB, RGB),
    "int64": (RGB.astype(np.int64), RGB),
    "uint16": (RGB.astype(np.uint16), RGB),
    "nested list": (RGB.tolist(), RGB),
    "list with one picture": ([RGB], RGB),
    "tuple with one picture": ((RGB,), RGB),
    "float64": (RGB / 255, RGB),
    "float32": ((RGB / 255).astype(np.float32), RGB),
    "float16 black": (np.zeros((8, 10, 3), np.float16), np.zeros((8, 10, 3))),
    "bool": (RGB > 99, 255 * (RGB > 99)),
    "one channel": (GREY, AS_RGB),
    "one channel of three axes": (GREY[:, :, None], AS_RGB),
    "one channel of bool": (GREY > 99, 255 * (AS_RGB > 99)),
    "channels first": (RGB.transpose(2, 0, 1), RGB),
    "one channel first": (GREY[None], AS_RGB),
    "opaque RGBA": (OPAQUE, RGB),
    "opaque RGBA of float": (OPAQUE / 255, RGB),
    "opaque RGBA first": (OPAQUE.transpose(2, 0, 1), RGB),
    "three columns": (RGB[:3, :3].transpose(2, 0, 1), RGB[:3, :3].transpose(2, 0, 1)),
}
REFUSED = {
    "None": (None, "got None"),
    "text": ("  o", "got a str"),
    "nothing": ([], "got an empty list"),
    "no pixels": (RGB[:0], "got an empty ndarray"),
    "an object": (np.asarray(None), "got a ndarray"),
    "several pictures": ([RGB, RGB], "got an array (2, 8, 10, 3) of uint8, which are 2 pictures"),
    "pictures of two sizes": ([RGB, RGB[:4]], "got a list of 2 values of type ndarray"),
    "float bytes": (RGB.astype(np.float64), "got an array (8, 10, 3) of float64 with values in [0.0, 255.0]"),
    "negative": (RGB / 127.5 - 1, "got an array (8, 10, 3) of float64 with values in [-1.0,"),
    "NaN": (np.full((8, 10, 3), np.nan), "with values in [nan, nan]"),
    "large integers": (RGB.astype(np.int64) * 2, "of int64 with values in [0, 510]"),
    "transparent": (OPAQUE // 2, "with transparency, and no background"),
    "complex": (RGB.astype(complex), "got a ndarray"),
    "two channels": (RGB[:, :, :2], "got an array (8, 10, 2) of uint8"),
    "one row": (GREY[0], "got an array (10,) of uint8"),
    "five axes": (RGB[None, None], "got an array (1, 1, 8, 10, 3) of uint8"),
}


class Pictures(gym.Env):
    """Renders each of `rendered` in turn; its episodes have as many steps as there are further ones."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, rendered, render_mode=None):
        self.rendered, self.render_mode = rendered, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.zeros(1, np.float32), 0.0, self.at >= len(self.rendered) - 1, False, {}

    def render(self):
        return self.rendered[self.at]


def agent(*rendered, **options):
    # A single picture is rendered twice: an episode has at least one step.
    rendered = list(rendered) * (1 + (len(rendered) == 1))
    return PPO(
        lambda **kwargs: Pictures(rendered, **kwargs), n_envs=1, n_steps=8, hidden_sizes=[8], backend="torch", **options
    )


@pytest.mark.parametrize("kind", CONVERTED)
def test_what_has_one_meaning_is_converted(kind):
    rendered, expected = CONVERTED[kind]
    frames = []
    agent(rendered).evaluate(1, 0, frames=frames.append)
    assert len(frames) == 2
    for frame in frames:
        assert frame.dtype == np.uint8
        np.testing.assert_array_equal(frame, expected)


def test_images_of_pillow_are_pictures_also_with_a_palette():
    image = pytest.importorskip("PIL.Image")
    for picture in (image.fromarray(RGB), image.fromarray(RGB // 128 * 255).convert("P")):
        frames = []
        agent(picture).evaluate(1, 0, frames=frames.append)
        np.testing.assert_array_equal(frames[0], np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("kind", REFUSED)
def test_the_rest_is_named(kind):
    rendered, got = REFUSED[kind]
    with pytest.raises(ValueError, match=re.escape(got)) as error:
        agent(RGB, rendered).evaluate(1, 0, frames=lambda frame: None)
    assert str(error.value).startswith("evaluate: ")
    assert "render() must return one picture, an array (H, W, 3) of uint8" in str(error.value)


class NotDrawn(gym.Env):
    """Draws nothing: what `lacks` names is missing."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, lacks="", render_mode=None):
        self.render_mode = render_mode
        if lacks == "modes":
            self.metadata = {**self.metadata, "render_modes": ["human"]}
        elif lacks == "package":
            self.render = self.miss

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}

    def miss(self):
        raise gym.error.DependencyNotInstalled('pygame is not installed, run `pip install "gymnasium[toy]"`')


gym.register("NotDrawn-v0", NotDrawn)


@pytest.mark.filterwarnings("ignore:.*render_mode")
@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("modes", "metadata['render_modes'] of the environment must contain 'rgb_array' to be drawn, got ['human']"),
        ("method", "the environment must have a method render() to be drawn, got none"),
        ("package", 'render() needs a package that is missing: pygame is not installed, run `pip install "gymnasium['),
    ],
)
def test_what_an_environment_lacks_to_be_drawn_is_named(lacks, says, command, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    PPO("NotDrawn-v0", env_kwargs={"lacks": lacks}, hidden_sizes=[8]).save(tmp_path / "own.safetensors")
    code, _, err = command("eval", "own.safetensors", "--episodes", "1", "--video", "film.gif")
    assert code == (1 if lacks == "package" else 2)
    assert f"rlox eval: NotDrawn-v0: {says}" in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("*.gif"))


def test_frames_per_second_that_are_no_number_are_named(command, tmp_path):
    pytest.importorskip("imageio_ffmpeg")

    class Silent(Pictures):
        metadata = {"render_modes": ["rgb_array"], "render_fps": "fast"}  # noqa: RUF012

    gym.register("Silent-v0", Silent, kwargs={"rendered": [RGB, RGB]})
    PPO("Silent-v0", hidden_sizes=[8]).save(tmp_path / "own.safetensors")
    code, _, err = command("eval", "own.safetensors", "--episodes", "1", "--video", "film.gif")
    assert code == 2
    assert "metadata['render_fps'] of Silent-v0 must be a number >= 1, got 'fast'" in err


def test_a_film_has_a_frame_for_each_picture_or_does_not_exist(tmp_path):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    pictures = [RGB / 255, RGB.transpose(2, 0, 1)[:, ::-1], GREY.astype(int), OPAQUE]
    trained = agent(*pictures, callbacks=[EvalCallback(1, 1), VideoCallback(tmp_path, kind="gif")])
    trained.train(8)
    (film,) = tmp_path.iterdir()
    assert len(imageio.mimread(film)) == len(pictures)
    film.unlink()
    for pictures, says in (([RGB, None], "got None"), ([RGB, RGB[:4]], "the shape of the first, (8, 10, 3), got (4,")):
        with pytest.raises(ValueError, match=re.escape(says)):
            agent(*pictures, callbacks=[EvalCallback(1, 1), VideoCallback(tmp_path, kind="gif")]).train(8)
        assert not list(tmp_path.iterdir())


def test_frames_of_a_loop_of_ones_own_are_converted_too(tmp_path):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    buffer = np.zeros((8, 10))
    with VideoWriter(tmp_path / "a.gif") as film:
        for value in (0.0, 0.5, 1.0):
            buffer[:] = value  # an environment may reuse its array
            film.add(buffer)
    assert [int(frame[0, 0, 0]) for frame in imageio.mimread(tmp_path / "a.gif")] == [0, 128, 255]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there does a missing display show in the environment")
def test_a_video_needs_no_display(tmp_path):
    """CartPole is drawn by SDL, which prints an error to the terminal if it looks for a display and there is none."""
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    program = """
import gymnasium as gym
from rlox.evaluation.video import VideoWriter
with VideoWriter("a.gif") as film:
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    film.add(env.render())
"""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert (tmp_path / "a.gif").exists()

"""Videos: RGB frames are written to an MP4 or GIF file one at a time, so that episodes of any length fit in memory."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlox.envs.rendering import rgb_frame

KINDS = (".mp4", ".gif")


def render_fps(env: str | Callable[..., Any]) -> int:
    """Return the frames per second that a registered environment recommends; 30 if it does not."""
    if not isinstance(env, str):
        return 30
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    from rlox.envs import foreign_id
    from rlox.envs.registry import ZOO, is_native_multi_agent

    if env.startswith(ZOO) or is_native_multi_agent(env):
        return 10  # pace of MPE and the grid; gymnasium does not know these environments
    entry = gymnasium.spec(foreign_id(env.rpartition(":")[2])).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    fps = getattr(creator, "metadata", {}).get("render_fps") or 30
    if not isinstance(fps, (int, float, np.number)) or not 1 <= fps < math.inf:
        raise ValueError(f"render_fps: metadata['render_fps'] of {env} must be a number >= 1, got {fps!r}")
    return int(fps)


class VideoWriter:
    """Writer of frames to `path`, which ends in ``.mp4`` or ``.gif``. Use it as a context manager.

    The file gets its name once it is complete; after an exception there is no file.

    Raises
    ------
    ValueError
        For another extension, a folder that cannot be written to, or `fps` (frames per second) < 1.
    ImportError
        If imageio or its ffmpeg is not installed.
    """

    def __init__(self, path: str | os.PathLike, fps: int = 30):
        self.path = Path(path)
        if self.path.suffix not in KINDS:
            raise ValueError(f"VideoWriter: path must end in {' or '.join(KINDS)}, got {str(path)!r}")
        folder = self.path.parent
        if self.path.is_dir() or (folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK))):
            raise ValueError(f"VideoWriter: path must be a file in a folder that can be written to, got {str(path)!r}")
        if fps < 1:
            raise ValueError(f"VideoWriter: fps must be >= 1, got {fps}")
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401 -- brings its own ffmpeg
        except ImportError as e:
            raise ImportError('VideoWriter: videos need imageio and its ffmpeg; pip install "rlox-cli[video]"') from e
        if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            # Nothing is shown; SDL, with which environments draw, would look for a display and print that it has none.
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        self._imageio = imageio
        self.fps = fps
        self.n_frames = 0
        self._shape: tuple[int, ...] = ()
        self._partial = self.path.with_name(f".{self.path.stem}.{os.getpid()}{self.path.suffix}")
        self._writer: Any = None

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink(missing_ok=True)

    def add(self, frame: Any) -> None:
        """Append one frame, (H, W, 3) uint8 or what `rgb_frame` converts to that, all of one size; else ValueError."""
        frame = rgb_frame(frame, "VideoWriter")
        self._shape = self._shape or frame.shape
        if frame.shape != self._shape:
            raise ValueError(
                f"VideoWriter: frames must all have the shape of the first, {self._shape}, got {frame.shape} for "
                f"number {self.n_frames + 1}"
            )
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Its error names the file, while ffmpeg's would be a broken pipe; and it follows no link.
            self._partial.unlink(missing_ok=True)
            self._partial.touch(exist_ok=False)
            self._writer = self._imageio.get_writer(self._partial, mode="I", **self._options())
        self._writer.append_data(frame)
        self.n_frames += 1

    def _options(self) -> dict[str, Any]:
        if self.path.suffix == ".gif":
            return {"format": "GIF", "duration": 1000 / self.fps, "loop": 0}
        # The format that every player supports (yuv420p) needs even sides. Pad the frames: scaling would blur them.
        even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]
        return {
            "format": "FFMPEG",
            "fps": self.fps,
            "macro_block_size": 1,
            "output_params": even,
            "ffmpeg_log_level": "error",
        }

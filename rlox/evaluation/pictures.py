"""Pictures of a world model's open-loop predictions next to the truth: films of images, plots of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlox.checkpoint import run_files
from rlox.config.packages import import_package
from rlox.evaluation.predictions import Predictions
from rlox.evaluation.video import KINDS, VideoWriter

NAME = "predictions"  # name of the picture in a run's folder, without its suffix
PLOTS = (".png", ".svg", ".pdf")
_FPS = 5
_MOST_PLOTTED = 4  # maximum number of plotted numbers of an observation
_TRUTH, _PREDICTED = "#444444", "#D55E00"


def require_kind(path: Path, image: bool) -> None:
    """Raise a ValueError or an ImportError if predictions of images or vectors cannot be written to `path`."""
    suffixes, what = (KINDS, "images") if image else (PLOTS, "vectors")
    if path.suffix not in suffixes:
        raise ValueError(f"predictions: the file must end in {' or '.join(suffixes)} for {what}, got {path}")
    if path.suffix == ".mp4":
        VideoWriter(path)


def save(predictions: Predictions, path: Path) -> None:
    """Write a film (``.mp4``, ``.gif``) of images, or a plot (``.png``, ``.svg``, ``.pdf``) of vectors.

    The file appears only when it is complete. Raises ValueError for any other suffix of `path`.
    """
    require_kind(path, predictions.image)
    if path.suffix == ".mp4":
        with VideoWriter(path, _FPS) as film:
            for frame in predictions.frames():
                film.add(frame)
        return
    with run_files.replace_file(path.parent, path.name) as file:
        if predictions.image:
            _save_gif(predictions, file)
        else:
            _draw(predictions).savefig(file, dpi=110, format=path.suffix[1:])


def save_in(predictions: Predictions, folder: Path) -> str:
    """Write the picture to a run's folder, and return its file name."""
    file = f"{NAME}{'.gif' if predictions.image else '.png'}"
    save(predictions, folder / file)
    return file


def _save_gif(predictions: Predictions, file: BinaryIO) -> None:
    Image = import_package("PIL.Image", "plot", "predictions")
    first, *others = (Image.fromarray(frame) for frame in predictions.frames())
    first.save(file, format="GIF", save_all=True, append_images=others, duration=1000 // _FPS, loop=0)


def _draw(predictions: Predictions):
    """Plot the error over the horizon, and below it the most variable numbers of an observation in one stretch."""
    figures = import_package("matplotlib.figure", "plot", "predictions")
    truth, context = predictions.truth, predictions.context
    variances = truth.astype(np.float64).var((0, 1))
    plotted = np.sort(np.argsort(-variances, kind="stable")[:_MOST_PLOTTED])
    figure = figures.Figure(figsize=(7, 2.2 * (1 + len(plotted))), layout="constrained")
    top, *axes = figure.subplots(1 + len(plotted), 1)
    steps = np.arange(1, predictions.horizon + 1)
    top.plot(steps, predictions.errors(), color=_PREDICTED, marker="o", markersize=3, label="mean squared error")
    top.axhline(predictions.variance(), color=_TRUTH, linestyle=":", label="variance of the observations")
    top.set(xlabel="steps ahead", ylim=(0, None), title=f"open loop after {context} steps, {len(truth)} stretches")
    top.legend(frameon=False)
    # Show the stretch with the largest variance.
    b = int(np.argmax(truth.reshape(len(truth), truth.shape[1], -1).var(1).sum(1)))
    for axis, i in zip(axes, plotted, strict=True):
        axis.plot(np.arange(truth.shape[1]), truth[b, :, i], color=_TRUTH, label="truth")
        axis.plot(
            np.arange(context, truth.shape[1]), predictions.predicted[b, :, i], color=_PREDICTED, label="prediction"
        )
        axis.axvspan(0, context - 1, color="#EEEEEE")
        axis.set(ylabel=f"obs[{i}]", xlabel="step")
    axes[0].legend(frameon=False)
    return figure

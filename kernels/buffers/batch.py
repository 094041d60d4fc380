"""The batches that sampling returns."""

from __future__ import annotations

_ALIASES = {"observations": "obs", "next_observations": "next_obs"}


class Batch(dict):
    """A dict of arrays whose keys are also attributes: ``batch["obs"]`` is ``batch.obs`` is ``batch.observations``.

    Keys that the buffers use: obs, next_obs (B, D); actions (B, A) float32; rewards (B,) float32; terminated,
    truncated (B,) bool; and, where they apply, discounts, weights (B,) float32 and indices (B,) uint64.
    An absent key raises KeyError and an absent attribute AttributeError; the message gives the reason.
    """

    __slots__ = ()

    def __missing__(self, key):
        if key == "next_obs":
            raise KeyError(
                "Batch: next_obs is absent, because no transition was pushed with one; pass next_obs to every push"
            )
        raise KeyError(f"Batch: {key!r} must be one of {', '.join(map(str, self))}")

    def __getattr__(self, name: str):
        try:
            return self[_ALIASES.get(name, name)]
        except KeyError as e:
            raise AttributeError(e.args[0]) from None

    def __setattr__(self, name: str, value) -> None:
        self[_ALIASES.get(name, name)] = value

    def __dir__(self):
        return [*super().__dir__(), *self]

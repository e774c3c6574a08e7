"""Policy losses, one file each; importing the package registers them."""

from fastrl.algorithms.losses import (
    cispo,
    clip,
    gspo,
)

__all__ = [
    "cispo",
    "clip",
    "gspo",
]

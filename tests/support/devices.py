"""Runs in tests take one of the eight virtual devices, unless their config names a mesh.

A program for one device compiles in two thirds of the time, and can be read from the cache: those
for several CPU devices cannot (fp8jax/device/xla.py).
"""

from typing import Any

import jax

from fp8jax.lm import mesh
from fp8jax.lm.training import build


def _make_mesh(axes: mesh.MeshAxes, devices: Any = None) -> jax.sharding.Mesh:
    """`make_mesh`, with one device where neither the config nor the test names any."""
    if devices is None and axes == mesh.MESHES["data"]:
        devices = jax.devices()[:1]
    return mesh.make_mesh(axes, devices)


def runs_take_one() -> None:
    build.make_mesh = _make_mesh  # type: ignore[assignment]

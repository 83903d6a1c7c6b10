# fp8jax on NVIDIA GPUs; the wheels of jax bring CUDA, the host its driver and container toolkit:
#
#     docker build -t fp8jax .
#     docker run --gpus all -v "$PWD/runs:/runs" fp8jax train --config=smoke --workdir=/runs/smoke
FROM python:3.12-slim

WORKDIR /fp8jax
COPY . .
# The project of this folder, whose pyproject.toml bounds versions.
# hadolint ignore=DL3013
RUN python -m pip install --no-cache-dir '.[gpu,train]'

ENTRYPOINT ["fp8jax"]

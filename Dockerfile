# syntax=docker/dockerfile:1
# rlox in an image without a compiler, for the CPU or for CUDA:
#
#   docker build --target cpu --build-arg TORCH_INDEX=<address of PyTorch's CPU builds> -t rlox .
#   docker build --target cuda -t rlox:cuda .
#   docker run --rm -v "$PWD/outputs:/work/outputs" rlox train algo=ppo env=CartPole-v1
#   docker run --rm --gpus all -v "$PWD/outputs:/work/outputs" rlox:cuda train algo=ppo env=CartPole-v1 device=cuda
#
# Without TORCH_INDEX, the image for the CPU contains the CUDA libraries too, which nothing there uses.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# Every CPU level: the image runs on other machines than this one.
RUN RLOX_CPU_LEVELS=all pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# For .devcontainer: with a compiler, and without rlox, which is installed from the checkout.
FROM python:${PYTHON} AS dev
RUN useradd --create-home --uid 1000 rlox
USER 1000

FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1
# Extras, such as "mujoco,hub".
ARG EXTRAS=""
COPY constraints.txt /tmp/constraints.txt
RUN useradd --create-home --uid 1000 rlox && install -d -o rlox -g rlox /work /work/outputs
WORKDIR /work
ENTRYPOINT ["rlox"]
CMD ["--help"]

FROM base AS cpu
ARG TORCH_INDEX=""
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /tmp/constraints.txt \
        "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}"
USER 1000

FROM base AS cuda
# PyTorch's package brings its CUDA libraries; the driver comes from the host. torch.compile needs a compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}"
USER 1000

# Flows and workers on machines with NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t coresample-gpu:0.1.0 .
# CUDA comes with the wheels of cuda.lock; the host brings the driver (CUDA 13) and NVIDIA's container toolkit.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# gcc and g++: Triton and FlashInfer compile at run time (nvcc is in the wheels); tini: PID 1.
# Debian removes old versions from its mirrors; what to pin is the base image's digest (PYTHON_IMAGE).
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ gcc tini \
 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 coresample \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin coresample \
 && install -d -o coresample -g coresample /models /scratch

# Where pip finds packages is the builder's business; as build arguments these are seen by pip and kept in no layer.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /app
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/cuda.lock requirements/
RUN python -m pip install -qq --no-cache-dir --no-deps --disable-pip-version-check -r requirements/cuda.lock

COPY pyproject.toml README.md LICENSE prefect.yaml ./
COPY extract_core extract_core
COPY flows flows
COPY tasks tasks
COPY kubernetes/base/work-pools kubernetes/base/work-pools
COPY docker/health.py docker/make_bucket.py docker/
RUN python -m pip install -qq --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --editable . \
 && python -m compileall -q extract_core flows tasks

ENV CORESAMPLE_HOME=/app \
    DO_NOT_TRACK=1 \
    VLLM_NO_USAGE_STATS=1 \
    HF_HOME=/models/huggingface \
    VLLM_CACHE_ROOT=/models/vllm \
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30 \
    PREFECT_CLIENT_MAX_RETRIES=9 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PYTHONUNBUFFERED=1 \
    TMPDIR=/scratch \
    CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
# One run at once: one engine per group of GPUs.
# Debian's tini reaps what engine processes leave and passes SIGTERM on.
ENTRYPOINT ["tini", "--"]
CMD ["prefect", "worker", "start", "--pool", "coresample-gpu", "--type", "process", "--limit", "1", "--no-create-pool-if-not-found", "--with-healthcheck"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
  CMD ["python", "/app/docker/health.py", "http://127.0.0.1:8080/health"]

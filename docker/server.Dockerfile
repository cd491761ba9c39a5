# Prefect's server, its services and the workers that start pods: docker build -f docker/server.Dockerfile -t coresample-server:0.1.0 .
# No vLLM, no flows: a few hundred MB. The same Prefect version as the flows' images.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# Debian removes old versions from its mirrors; what to pin is the base image's digest (PYTHON_IMAGE).
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 coresample \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin coresample \
 && install -d -o coresample -g coresample /var/lib/prefect

# Where pip finds packages is the builder's business; as build arguments these are seen by pip and kept in no layer.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /app
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/server.lock requirements/
RUN python -m pip install -qq --no-cache-dir --no-deps --disable-pip-version-check -r requirements/server.lock
COPY docker/health.py docker/

# The UI's files are copied there at the start: the user may not write to the installed package.
ENV DO_NOT_TRACK=1 \
    PREFECT_HOME=/var/lib/prefect \
    PREFECT_UI_STATIC_DIRECTORY=/var/lib/prefect/ui \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PYTHONUNBUFFERED=1
USER 10001:10001
ENTRYPOINT ["tini", "--"]
CMD ["prefect", "server", "start", "--host", "0.0.0.0", "--no-services"]
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 \
  CMD ["python", "/app/docker/health.py", "http://127.0.0.1:4200/api/health"]

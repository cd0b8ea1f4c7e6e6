# Two images without torch and vLLM: the buffer service; and, with NAME=services and REQUIREMENTS that add pyarrow, what
# reads or writes Parquet files: scheduler, evaluator, dashboard and the commands.
ARG PYTHON=python:3.11.13-slim-bookworm

# The packages have no pip among them: that of the base image installs them.
FROM ${PYTHON} AS requirements
RUN python3 -m venv --without-pip /venv
WORKDIR /src
COPY requirements requirements
ARG REQUIREMENTS="-r requirements/buffer.txt"
# Not quoted: these are several arguments.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip --python /venv/bin/python install --no-deps ${REQUIREMENTS}

FROM ${PYTHON} AS code
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir setuptools==78.1.1
WORKDIR /src
COPY pyproject.toml README.md ./
COPY bapo bapo
COPY contrib contrib
COPY buffer_service buffer_service
COPY services services
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${PYTHON}
ARG VERSION=0.1.0
ARG NAME=buffer
LABEL org.opencontainers.image.title="bapo-${NAME}" org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.description="BAPO ${NAME}: no torch, no vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
# Two layers: a change of the code does not write the packages again.
COPY --from=requirements /venv /venv
RUN --mount=from=code,source=/dist,target=/dist \
    python3 -m pip --python /venv/bin/python install --no-cache-dir --no-deps --no-index /dist/*.whl
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
# A new volume takes its owner and mode from the folder that it is mounted on: `volumes` are those of images of others.
RUN install -d -o 10001 -g 10001 /bapo /bapo/outputs /bapo/secrets /bapo/secrets/acl && \
    cd /bapo/secrets && \
    install -d -m 700 -o 10001 -g 10001 accepted worker learner scheduler evaluator agent viewer operator redis && \
    install -d -m 700 -o 10001 -g 10001 /bapo/volumes/redis /bapo/volumes/prometheus /bapo/volumes/grafana
# Last, because every commit has another one: which code this is, for run.json and bapo_build_info.
ARG COMMIT=unknown
ENV BAPO_COMMIT=${COMMIT}
LABEL org.opencontainers.image.revision="${COMMIT}"
USER 10001:10001
WORKDIR /bapo
ENTRYPOINT ["python", "-m"]
CMD ["bapo.cli", "--help"]

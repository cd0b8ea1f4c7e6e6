# The fleet: a Ray node with vLLM engines on the CPU. `wheels` as in learner.Dockerfile.
FROM python:3.11-slim AS build
RUN python3 -m venv /venv
COPY requirements /src/requirements
RUN --mount=type=cache,target=/root/.cache/pip --mount=from=wheels,target=/wheels \
    /venv/bin/pip install --no-deps --find-links /wheels -r /src/requirements/torch-cpu.txt -r /src/requirements/cpu.txt
COPY pyproject.toml README.md /src/
COPY bapo /src/bapo
COPY rollout_server /src/rollout_server
RUN /venv/bin/pip install --no-deps --no-build-isolation /src

FROM python:3.11-slim
LABEL org.opencontainers.image.title="bapo-rollout" org.opencontainers.image.licenses="Apache-2.0"
# vLLM's CPU kernels are linked against libnuma.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
# A new volume takes its owner and mode from the folder that it is mounted on.
RUN install -d -o 10001 -g 10001 /bapo /bapo/outputs /bapo/secrets /bapo/secrets/acl && cd /bapo/secrets && \
    install -d -m 700 -o 10001 -g 10001 accepted worker learner scheduler evaluator viewer operator redis
USER 10001:10001
WORKDIR /bapo
ENTRYPOINT ["python", "-m"]
CMD ["rollout_server", "--help"]

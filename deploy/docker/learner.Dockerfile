# The learner: torch, no vLLM. `wheels` is a folder that may hold a torch wheel of your choice; empty means the index.
FROM python:3.11-slim AS build
RUN python3 -m venv /venv
COPY requirements /src/requirements
RUN --mount=type=cache,target=/root/.cache/pip --mount=from=wheels,target=/wheels \
    /venv/bin/pip install --no-deps --find-links /wheels -r /src/requirements/torch-cpu.txt -r /src/requirements/learner.txt
COPY pyproject.toml README.md /src/
COPY bapo /src/bapo
COPY learner /src/learner
RUN /venv/bin/pip install --no-deps --no-build-isolation /src

FROM python:3.11-slim
LABEL org.opencontainers.image.title="bapo-learner" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/tmp
# A new volume takes its owner and mode from the folder that it is mounted on.
RUN install -d -o 10001 -g 10001 /bapo /bapo/outputs /bapo/secrets /bapo/secrets/acl && cd /bapo/secrets && \
    install -d -m 700 -o 10001 -g 10001 accepted worker learner scheduler evaluator viewer operator redis
USER 10001:10001
WORKDIR /bapo
ENTRYPOINT ["python", "-m"]
CMD ["learner", "--help"]

# The buffer service, the scheduler and the evaluator: no torch, no vLLM.
FROM python:3.11-slim AS build
RUN python3 -m venv /venv
COPY requirements/buffer.txt /src/requirements/
RUN --mount=type=cache,target=/root/.cache/pip /venv/bin/pip install --no-deps -r /src/requirements/buffer.txt setuptools==78.1.1
COPY pyproject.toml README.md /src/
COPY bapo /src/bapo
COPY buffer_service /src/buffer_service
COPY services /src/services
RUN /venv/bin/pip install --no-deps --no-build-isolation /src

FROM python:3.11-slim
LABEL org.opencontainers.image.title="bapo-buffer" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
# A new volume takes its owner and mode from the folder that it is mounted on.
RUN install -d -o 10001 -g 10001 /bapo /bapo/outputs /bapo/secrets /bapo/secrets/acl && cd /bapo/secrets && \
    install -d -m 700 -o 10001 -g 10001 accepted worker learner scheduler evaluator viewer operator redis
USER 10001:10001
WORKDIR /bapo
ENTRYPOINT ["python", "-m"]
CMD ["buffer_service", "--help"]

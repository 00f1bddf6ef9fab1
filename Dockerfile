# An image that trains as any user, with a read-only root file system too.
#   docker build -t mmdevplug .
#   docker run --rm --shm-size=8g -v "$PWD/run:/workspace" mmdevplug train CONFIG --nproc 2
# For an accelerator, name the vendor's image, whose PyTorch stays as it is:
#   docker build --build-arg BASE=VENDOR/PYTORCH:TAG -t mmdevplug .
ARG BASE=python:3.11-slim
FROM ${BASE}

# For a base without PyTorch.
ARG TORCH=torch==2.13.0
# mmcv with its operations compiled needs a wheel for the base's PyTorch: --build-arg MMCV=...
ARG MMCV=mmcv-lite==2.1.0
# A mirror: --build-arg PIP_INDEX_URL=...
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Images of Debian and Ubuntu refuse pip otherwise; an image is an environment of its own.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Not imported: a vendor's PyTorch may need its driver, which no build has.
# hadolint ignore=DL3013
RUN python3 -c "from importlib.util import find_spec; exit(find_spec('torch') is None)" \
    || python3 -m pip install "${TORCH}"
# pip would replace the vendor's releases by newer ones that a package asks for.
RUN python3 -m pip list --format=freeze > /opt/installed.txt \
    && { grep -E '^(torch|torch[-_].*|numpy)==' /opt/installed.txt > /opt/constraints.txt || true; }

COPY . /opt/mmdevplug
# opencv-python, which MMEngine asks for, needs libGL, which servers' images lack.
RUN python3 -m pip install -c /opt/constraints.txt "${MMCV}" "/opt/mmdevplug[mmengine,examples]" \
    && python3 -m pip uninstall -y opencv-python \
    && python3 -m pip install -c /opt/constraints.txt --force-reinstall --no-deps opencv-python-headless

# Any user can work here, as Kubernetes' runAsUser may name one that the image does not know.
RUN mkdir -p /workspace && chmod 1777 /workspace
WORKDIR /workspace
ENV HOME=/workspace
USER 1000

# Start it with `docker run --init`, whose process 1 passes signals on and reaps orphans.
ENTRYPOINT ["mmdevplug"]
CMD ["--help"]

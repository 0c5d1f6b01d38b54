"""Flags of a stranger: those that name code, a file or an address are not asked about."""

from __future__ import annotations

import pytest

from builder.proof.flags import names_code

CODE = (
    "--worker-cls a.b", "--worker_cls a", "--worker-c a", "--worker-cls=a", "--middleware a.b",
    "--log-config-file /x", '--logging-config {"pylogging_config_file": "x"}',
    "--logging-config.pylogging_config_file x", "--logits-processors a:b", "--config=x.yaml",
    '--kv-transfer-config {"kv_connector": "X", "kv_connector_module_path": "a"}',
    "--kv-transfer-config.kv_connector_module_path a", "--kv_transfer_config.kv_connector a.b",
    "--compilation-config.backend a.b", "-O.backend=a.b", '-cc {"backend": "a.b"}',
    '--compilation-config {"inductor_passes": {"x": "a.b"}}', "--tokenizer x/y",
    "--distributed-executor-backend a", "--distributed-executor-b a", "--scheduler-cls a",
    '--hf-overrides {"auto_map": {}}', "--chat-template x.jinja", "--download-dir d",
    '--structured-outputs-config {"reasoning_parser_plugin": "p"}', "--unheard-of /x",
    "--unheard-of ../x", "--unheard-of ~/x", "--unheard-of http://127.0.0.1", "--unheard-of a.b",
    '--unheard-of [{"a": ["file:///x"]}]', "--otlp-traces-endpoint x", "--unheard-of a,/x",
    # a release reads the value of a dotted flag as JSON, and a plus behind its key makes a list
    '--compilation-config.backend "a.b"', '--unheard-of.x="/x"', '--unheard-of.x "\\u002fx"',
    '--unheard-of.x "a:b"', "--unheard-of.plugin+ a", "--unheard-of.plugin+=a",
)  # fmt: skip
PLAIN = (
    "--max-model-len 4096", "-tp 2", "--tool-call-parser hermes", "--enable-auto-tool-choice",
    '--speculative-config {"method": "mtp", "model": "/a/b"}', "--generation-config vllm",
    "--distributed-executor-backend ray", "--served-model-name nvidia/Qwen3.5-122B",
    "--host 0.0.0.0", "--tokenizer-mode mistral", "--config-format hf", "--trust-remote-code",
    '--compilation-config {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["vllm.unified"]}',
    '--kv-transfer-config {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
    '--hf-overrides {"architectures": ["A"], "rope_scaling": {"factor": 2.0}}',
    "--load-format fastsafetensors", "--gpu-memory-utilization 0.85", "--kv-cache-dtype fp8",
    '--limit-mm-per-prompt {"image": 2}', "--moe-backend flashinfer_b12x", "--api-key x",
)  # fmt: skip


@pytest.mark.parametrize("text", CODE)
def test_a_flag_that_names_code_or_a_place(text: str) -> None:
    assert names_code(text.split(" ", 1))


@pytest.mark.parametrize("text", PLAIN)
def test_a_flag_that_names_none(text: str) -> None:
    assert not names_code(text.split(" ", 1))


def test_a_deep_value_ends() -> None:
    assert not names_code(("--hf-overrides", "[" * 100_000))

"""Programs that run inside an image, a container or a virtual environment.

Every module here uses the standard library only and imports only its siblings and
`builder.applier`, so that it can be copied anywhere together with them.
``tests/unit/probes/test_standalone.py`` enforces it.
"""

#: The files of the dispatch probe; the last one is run, and each imports only those before it.
DISPATCH_PROBE = (
    "stub_driver.py",
    "simulated_device.py",
    "dispatch_device.py",
    "dispatch_modules.py",
    "dispatch_prepare.py",
    "dispatch_kinds.py",
    "dispatch_settings.py",
    "dispatch_probe.py",
)
#: The probe that builds a whole model, likewise.
PREFLIGHT_PROBE = (*DISPATCH_PROBE, "preflight_probe.py")
#: The codegen probe, likewise.
CODEGEN_PROBE = (
    "stub_driver.py",
    "simulated_device.py",
    "codegen_device.py",
    "codegen_kernels.py",
    "codegen_child.py",
    "codegen_probe.py",
)
#: The launch probe, likewise.
LAUNCH_PROBE = (
    *CODEGEN_PROBE,
    "call_table.py",
    "launch_host.py",
    "nvfp4_reference.py",
    "device_cases.py",
    "device_experts.py",
    "launch_cases.py",
    "host_triton.py",
    *DISPATCH_PROBE[2:],
    "device_layers.py",
    "device_probe.py",
    "launch_layers.py",
    "launch_package.py",
    "launch_recorder.py",
    "launch_probe.py",
)
#: The files of the verifier inside an image, besides the applier.
IMAGE_VERIFIER = (
    *DISPATCH_PROBE,
    "dispatch_expect.py",
    "spark_verify.py",
    "verify_checks.py",
    "device_environment.py",
    "device_checks.py",
    "device_probe.py",
    "device_layers.py",
    "device_cases.py",
    "device_experts.py",
    "nvfp4_reference.py",
    "serve_checks.py",
    "serve_client.py",
    "serve_bench.py",
    "log_watch.py",
    "tiny_model.py",
)
#: The license terms that images and mods carry beside these programs.
TERMS = ("LICENSE", "NOTICE")

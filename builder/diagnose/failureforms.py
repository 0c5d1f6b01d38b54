"""Messages of programs that failed, other than Python exceptions, in one table.

The forms are those of the C and C++ runtimes, the CUDA libraries, the Linux kernel, compilers,
the dynamic loader, shells, container engines, Kubernetes, systemd, Rust and Go.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Form(NamedTuple):
    """One form: the kind of failure, and the text.  ``weak`` ones are only symptoms."""

    kind: str
    regex: re.Pattern[str]
    weak: bool = False


def _form(kind: str, *patterns: str, weak: bool = False) -> Form:
    return Form(kind, re.compile("|".join(f"(?:{p})" for p in patterns)), weak)


FORMS = (
    _form(
        "the kernel",
        r"NVRM: Xid \(",
        r"NVRM: GPU .{0,60}(?:has fallen off the bus|lost)",
        r"[Oo]ut of memory: Kill(?:ed)? process \d+",
        r"oom-kill:constraint=",
        r"\b(?:segfault at|general protection fault|traps: \S+ trap)",
        r"Kernel panic - not syncing",
        r"AMD-Vi: .*IO_PAGE_FAULT",
        r"task \S+ blocked for more than \d+ seconds",
    ),
    _form(
        "a C++ exception",
        r"terminate called (?:after throwing|without an active exception|recursively)",
        r"libc\+\+abi: terminating",
        r"^\s*what\(\):\s+\S",
    ),
    _form(
        "a signal",
        r"Fatal Python error: ",
        r"\*\*\* (?:Process received signal|SIG[A-Z]+ (?:received|\(@))",
        r"Segmentation fault",
        r"\bSIG(?:SEGV|ABRT|BUS|ILL|FPE)\b(?! handler)",
        r"Caught signal \d+",
        r"(?:Bus error|Illegal instruction|Aborted|Floating point exception) ?\(core dumped\)",
        r"^\*\*\* stack smashing detected|^(?:free|munmap_chunk|malloc|realloc)\(\): "
        r"|^double free or"
        r"|^malloc_consolidate\(\)|^corrupted (?:size|double)",
        r"^!!!!!!! Segfault encountered",
    ),
    _form(
        "a compiler",
        r"^(?:\S+:\d+(?::\d+)?|\S+\(\d+\)|nvcc|cc1plus|cicc|clang|gcc|g\+\+|ld|nvlink|cudafe\+\+)"
        r"\s*:? (?:fatal )?error\s*(?::|#\d|\w\d+:)",
        r"^\s*ptxas .{0,80}\b(?:fatal|error)\b",
        r"^\s*nvcc fatal\b",
        r"^error: (?:static assertion|identifier|no (?:instance|matching)|unrecognized|#error)",
        r"(?:collect2|ld): error: |undefined reference to [`']",
        r"^CMake Error\b",
        r"NVRTC_ERROR_\w+",
        r"\bLLVM ERROR: ",
        r"^error\[E\d{4}\]: ",
    ),
    _form("a compiler", r"^FAILED: ", r"^ninja: (?:build stopped|error|fatal)", weak=True),
    _form("a compiler", r"^g?make(?:\[\d+\])?: \*\*\* ", r"^error: could not compile", weak=True),
    _form(
        "the loader",
        r"error while loading shared libraries:",
        r"symbol lookup error:",
        r"\bundefined symbol: ",
        r"cannot open shared object file",
        r"version `[\w.]+' not found",
        r"exec(?: user process caused:? ?\"?|\s\S+: )?(?:exec )?format error",
    ),
    _form(
        "an assertion",
        r"Assertion [`'].{1,400}['`] failed",
        r"\bGGML_ASSERT\(",
        r"Assertion failed: ",
        r"^Assertion error \(",
    ),
    _form(
        "Rust or Go",
        r"^thread '.{0,80}'(?: \(\d+\))? panicked at",
        r"^panic: ",
        r"^fatal error: (?:all goroutines|unexpected signal|runtime)",
    ),
    _form(
        "the container engine",
        r"[Ee]rror response from daemon:",
        r"OCI runtime (?:create|exec|start) failed",
        r"could not select device driver",
        r"nvidia-container-cli: ",
        r"failed to (?:create|start) (?:shim|containerd) task",
        r"failed to solve: |ERROR: failed to build",
        r"exec: \"[^\"]+\": (?:executable file not found|stat|permission denied)",
    ),
    _form(
        "Kubernetes",
        r"\b(?:CrashLoopBackOff|OOMKilled|ImagePullBackOff|ErrImagePull|CreateContainerConfigError"
        r"|RunContainerError|FailedScheduling|FailedMount|ContainerCannotRun)\b",
        r"\b(?:Liveness|Startup) probe failed",
        r"\bEvicted\b.*\b(?:memory|disk|node)\b|The node was low on resource",
        r"\d+/\d+ nodes are available: .*Insufficient",
    ),
    _form(
        "the command line",
        r"^(?!usage)\S[^:]{0,60}: error: (?:argument|the following|unrecognized|ambiguous|invalid)",
        r"^error: (?:unexpected argument|invalid value|unrecognized|unknown|the following)",
        r"^(?:\S*/)?(?:ba|z|da)?sh:(?: line)?(?: \d+:)? \S.*(?:not found|No such|denied|cannot)",
        r"^\S*(?:entrypoint|start|run|serve)\S*(?:\.sh)?: (?:line \d+|\d+): ",
        r"^exec \S+: (?:no such file|exec format error|permission denied)",
        r"^(?:python3?|/\S+/python3?): (?:can't open file|No module named)",
    ),
    _form(
        "systemd",
        r"Main process exited, code=(?:killed|dumped|exited, status=[1-9])",
        r"killed by the OOM killer|Failed with result 'oom-kill'",
        weak=True,
    ),
    _form(
        "systemd",
        r"Failed to start .{1,80}\.$|Failed to start \S+\.service|Start request repeated"
        r"|Failed with result '(?!oom)",
        weak=True,
    ),
    _form(
        "CUDA",
        r"\bCUDA (?:driver )?error\b(?! checking)",
        r"\bcudaError[A-Z]\w+",
        r"\bCUDA_ERROR_[A-Z_]+",
        r"\bCU(?:BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_(?!SUCCESS)[A-Z_]+",
        r"CUDA failure \d+|Cuda failure",
        r"Failed to initialize NVML",
        r"CUTLASS_?.{0,40}Error Internal|Error Internal\b",
        weak=True,
    ),
    _form(
        "NCCL",
        r"\bNCCL WARN (?!.*(?:NCCL_IB_HCA|deprecated|MNNVL|Missing))",
        r"\bnccl(?:System|Internal|UnhandledCuda|Remote|InvalidUsage|InvalidArgument)Error",
        r"Watchdog caught collective operation timeout",
        r"\bWatchdog timeout \(",
        weak=True,
    ),
    _form(
        "MPI",
        r"MPI_ABORT was invoked",
        r"mpirun noticed that process rank",
        r"Primary job +terminated normally, but",
        r"srun: error: ",
        weak=True,
    ),
    _form(
        "an exit",
        r"\b(?:exited|exit|terminated|died|failed|finished) (?:with|by) "
        r"(?:non-zero )?(?:exit )?(?:code|status|signal):? ?(?!0\b)-?\d+",
        r"\bExited \((?!0\))\d+\)",
        r"died with <Signals\.",
        r"returned (?:a )?non-zero (?:exit )?(?:code|status)",
        r"^(?:\S+: line \d+:\s+\d+ )?Killed\b(?:\s|$)",
        r"\bsignal (?:9|11|6|15)\b|signal: killed|SIGKILL",
        r"died unexpectedly|exited unexpectedly|Container .{0,60} exited|exitCode=(?!0\b)\d+",
        weak=True,
    ),
    _form(
        "an error",
        r"^(?:Error|ERROR|error|fatal|FATAL|Fatal)(?: \w+)?: \S",
        r"^(?:llama_\w+|ggml_\w+|gguf_\w+|common_\w+|srv +\w+|main) ?: .*(?:error|failed|unable)",
        r"^.{0,40}\b(?:No space left on device|Cannot allocate memory|Address already in use)\b",
        r"^[EF] ?\d{0,4}\b.*\bfailed\b",
        r"\b(?:Permission denied|Connection refused|No route to host|Read-only file system)\b",
        weak=True,
    ),
)

#: Consequences of a failure elsewhere: in another process, on another node.
FOLLOWERS = re.compile(
    r"device-side assert triggered|Engine core initialization failed"
    r"|EngineCore failed to start|EngineDead|engine is dead"
    r"|EngineCore encountered (?:an issue|a fatal error)|EngineCore hit an exception"
    r"|WorkerProc (?:initialization failed|hit an exception)|Worker proc \S+ died|Executor failed"
    r"|RPC call to \w+ timed out|shared memory broadcast block|Failed core proc"
    r"|ActorDied|ActorUnavailable|WorkerCrashedError|OwnerDiedError|RayChannelError"
    r"|ChildFailedError|ProcessExitedException|ProcessRaisedException"
    r"|Received sigquit from a child|kill_process_tree|Child process .{0,40}(?:died|failed)"
    r"|BrokenPipeError|EOFError|ConnectionResetError|IncompleteReadError"
    r"|Connection (?:reset|closed) by (?:remote )?peer"
    r"|ncclRemoteError|DistBackendError: NCCL error.{0,200}(?:remote process|peer)"
    r"|Socket (?:recv|send).{0,60}(?:failed|reset)|remote process exited|peer .{0,40}closed"
    r"|CancelledError|SystemExit|KeyboardInterrupt|ZMQError|cancelled due to|Cancelled"
    r"|Watchdog (?:caught|timeout)|AsyncLLM output_handler failed|sched_yield"
    r"|[Pp]rocess group .{0,60}(?:abort|terminat)|To avoid data inconsistency"
    r"|Timed out waiting for engine core|See (?:stack trace|root cause) (?:\(above\)|above)"
    r"|SIGTERM received|Broadcast.{0,40}timed out|Heartbeat monitor"
    r"|mpirun noticed|Primary job|exited with code|died unexpectedly"
)

#: Wrappers without information: the wrapped error is elsewhere in the log, or in their text.
WRAPPERS = re.compile(
    r"^(?:ray::"
    r"|Capture cuda graph failed|Ninja build failed|Error building extension|Command .{0,4000}"
    r"returned non-zero|unhandled errors in a TaskGroup|-- Process \d+ terminated)"
)

#: Lines that look like failures and are not: attempts that the program can do without.
HARMLESS = re.compile(
    r"[Ss]kipping tactic|[Ss]kipp(?:ed|ing)\b.{0,80}(?:due to|because|tactic|unsupported)"
    r"|Ignore import error|[Ee]xception ignored in|ignored exception|[Ff]all(?:ing|s)?[- ]?back"
    r"|destroy_process_group\(\) was not called|Unexpected error during package walk"
    r"|\b(?:0|no) errors?\b|errors?[=:] ?0\b|[Rr]etrying|[Ww]ill retry|retry in|nvCheckOkFailed"
    r"|Dumping (?:input data|scheduler)|leaked (?:shared_memory|semaphore)"
    r"|error_code=None|on_error=|errors='"
)

#: Lines of a server that was stopped on request.
ENDING = re.compile(
    r"shut(?:ting)? ?down|Finished server process|Application shutdown|terminat|clean(?:ing)? ?up"
    r"|exit|kill|abort|stop|clos|dump|SIGTERM|Traceback|rror|xception|ailed",
    re.IGNORECASE,
)

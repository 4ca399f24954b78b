"""The stages of bench.gpu_all: what each runs on GPUs, and what of it can be tried without one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.wrappers import VARIANTS

Command = tuple[str, ...]

GPU_BOUND = "gpt2,resnet50,vit"
HOST_BOUND = "small"
NETWORK_BOUND = "llama_layer"  # few tokens, many gradients
SHAPES = "resnet50,gpt2,llama_layer,small"
TINY = ("--scale", "0.002")
# What compute-sanitizer sees: of each test, cases that reach every kernel, odd sizes and tails.
CHECKED_CASES = (
    (
        *("cuda/pack/chunk", "cuda/unpack/chunk", "cuda/accumulate/chunk"),
        *("cuda/pack/many", "cuda/unpack/many", "cuda/fills", "cuda/scales"),
    ),
    ("cuda/encodes_odd", "cuda/encodes_many", "cuda/decodes_odd", "cuda/reduces"),
    ("cuda/poison",),
)
# Counters of ncu: time, shares of the memory's and the processors' peak, and what is waited for.
COUNTERS = (
    "gpu__time_duration.sum,dram__bytes.sum,"
    "dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread,"
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
)


@dataclass(frozen=True)
class Context:
    """Where and on what the stages run.

    Attributes:
        work: for logs and builds.
        results: for the JSON files that are kept.
        gpus: how many there are; 0 in a rehearsal.
    """

    work: Path
    results: Path
    gpus: int

    def json(self, name: str) -> Command:
        """The option that writes a result."""
        return ("--json", str(self.results / f"{name}.json"))


@dataclass(frozen=True)
class Stage:
    """Commands that belong together, run in order until one fails.

    Attributes:
        name: as on the command line.
        summary: what it shows.
        seconds: after which it is stopped; about twice what it is expected to take.
        commands: on GPUs.
        rehearsal: the same in tiny form, on a CPU; empty: it needs a GPU.
        tools: programs that must be there.
    """

    name: str
    summary: str
    seconds: float
    commands: tuple[Command, ...]
    rehearsal: tuple[Command, ...] = ()
    tools: tuple[str, ...] = ()


def torch_variants() -> str:
    """The names of torch's variants that this torch has, and of FastDDP's default."""
    torchs = [name for name, v in VARIANTS.items() if v.wire is None and v.unavailable() is None]
    exact = [name for name in torchs if not VARIANTS[name].lossy]
    return ",".join([*exact, "fastsync"])


def _bench(module: str, *arguments: str) -> Command:
    return (sys.executable, "-m", f"bench.{module}", *arguments)


def _pytest(*arguments: str) -> Command:
    return (sys.executable, "-m", "pytest", "-q", *arguments)


def stages(context: Context) -> tuple[Stage, ...]:
    """All of them, the most valuable first."""
    return (
        _build(),
        _tests(),
        _kernels(context),
        _overhead(context),
        _network(context),
        _memory(context),
        _trace(context),
        _sanitizer(context),
        _profile(context),
        _codecs(context),
        _ranks(context),
    )


def _build() -> Stage:
    load = (
        "from fastsync.build import extension; c = extension.load(); "
        "print('CUDA kernels:', c.with_cuda)"
    )
    check = f"{load}; assert c.with_cuda"
    commands = (sys.executable, "-c", check), (sys.executable, "-c", load)
    return Stage(
        "build", "the extension compiles with nvcc", 300, commands[:1], commands[1:], ("nvcc",)
    )


def _tests() -> Stage:
    files = tuple(str(path) for path in sorted(Path("tests").glob("test_cuda_*.py")))
    files += ("tests/test_ops.py",)
    return Stage(
        "tests",
        "kernels, streams, graphs, NCCL and Gloo on CUDA tensors do what they should",
        300,
        (_pytest("-m", "gpu", "--durations=10", *files),),
        (_pytest("--collect-only", "-m", "gpu", *files), _pytest("tests/test_ops.py")),
    )


def _kernels(context: Context) -> Stage:
    result = ("--cases", "pack,unpack", *context.json("kernels"))
    return Stage(
        "kernels",
        "pack and unpack against this GPU's own copy and what torch offers",
        150,
        (_bench("kernels", "--device", "cuda", "--models", SHAPES, *result),),
        (_bench("kernels", "--models", SHAPES, "--rounds", "1", *TINY, *result),),
    )


def _codecs(context: Context) -> Stage:
    result = context.json("codecs")
    cases = ("kernels", "--cases", "encode,reduce,decode,select")
    return Stage(
        "codecs",
        "the kernels of the wire formats, likewise",
        120,
        (_bench(*cases, "--device", "cuda", "--models", "gpt2", *result),),
        (_bench(*cases, "--models", "gpt2", "--rounds", "1", *TINY, *result),),
    )


def _overhead(context: Context) -> Stage:
    result = context.json("overhead")
    wrappers = ("--ranks", "1", "--wrappers", torch_variants())
    models = f"{HOST_BOUND},{GPU_BOUND}"
    return Stage(
        "overhead",
        "what a wrapper costs where there is nothing to send: one rank",
        300,
        (_bench("overhead", *wrappers, "--models", models, "--rounds", "9", *result),),
        (_bench("overhead", *wrappers, "--models", models, *TINY, "--rounds", "1", *result),),
    )


def _network(context: Context) -> Stage:
    result = context.json("network")
    job = ("step", "--ranks", "2", "--sockets")
    wrappers = ("--wrappers", "ddp,ddp_view,ddp_fp16,fastsync,fastsync_bf16,fastsync_int8")
    timed = ("--rounds", "7", "--steps", "3", "--seconds", "50", "--check-steps", "2")
    models = ("--models", f"{NETWORK_BOUND},gpt2")
    return Stage(
        "network",
        "steps that wait for the network: NCCL over sockets",
        300,
        (_bench(*job, *wrappers, *models, *timed, *result),),
        (_bench(*job, *wrappers, *models, "--rounds", "1", *TINY, *result),),
    )


def _memory(context: Context) -> Stage:
    alone = ("memory", "--ranks", "1", "--models", "gpt2", "--wrappers", torch_variants())
    peak, live = context.json("memory"), context.json("gradients")
    return Stage(
        "memory",
        "the peak of a step's memory, and what gradients and buckets hold of it",
        120,
        (_bench(*alone, "--peak", *peak), _bench(*alone, *live)),
        (_bench(*alone, "--peak", *TINY, *peak), _bench(*alone, *TINY, *live)),
    )


def _trace(context: Context) -> Stage:
    job = ("trace", "--ranks", "2", "--sockets", "--models", "gpt2")
    wrappers = ("--wrappers", "ddp,fastsync,fastsync_bf16,fastsync_int8")
    traces = ("--traces", str(context.results))
    return Stage(
        "trace",
        "how much of NCCL's time hides behind computation, from a profiler's trace",
        120,
        (_bench(*job, *wrappers, *traces, *context.json("trace")),),
    )


def _sanitizer(context: Context) -> Stage:
    folder = str(context.work / "cmake")
    tests = ("test_pack_device", "test_codec_device", "test_codec_formats_device")
    configure = ("cmake", "-S", ".", "-B", folder, "-G", "Ninja", "-DFASTSYNC_DEVICE_TESTS=ON")
    build = ("cmake", "--build", folder, "--target", *tests)
    plain = tuple((f"{folder}/{test}", "cuda/") for test in tests)
    checked = tuple(
        ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", f"{folder}/{test}", *cases)
        for tool in ("memcheck", "racecheck")
        for test, cases in zip(tests, CHECKED_CASES, strict=True)
    )
    native = (*configure, "-DCMAKE_CUDA_ARCHITECTURES=native")
    return Stage(
        "sanitizer",
        "the kernels' own tests on the GPU, and under compute-sanitizer",
        300,
        (native, build, *plain, *checked),
        (),
        ("cmake", "ninja", "nvcc", "compute-sanitizer"),
    )


def _profile(context: Context) -> Stage:
    log = str(context.results / "profile.csv")
    counted = ("ncu", "--clock-control", "none", "--csv", "--log-file", log, "--metrics", COUNTERS)
    ours = ("--kernel-name", "regex:transfer_kernel|encode_kernel|decode_kernel|reduce_kernel")
    few = ("--launch-count", "60")
    job = _bench("kernels", "--device", "cuda", "--models", "gpt2", "--rounds", "1")
    return Stage(
        "profile",
        "hardware counters of pack and unpack",
        150,
        ((*counted, *ours, *few, *job),),
        (),
        ("ncu",),
    )


def _ranks(context: Context) -> Stage:
    """Only of interest where ranks have GPUs of their own: without --sockets they use NVLink."""
    worlds = ",".join(str(n) for n in (2, 4, 8) if n <= context.gpus)
    result = context.json("ranks")
    settings = ("--models", f"gpt2,{HOST_BOUND}", "--seconds", "40", "--check-steps", "3")
    gpus = (_bench("step", "--ranks", worlds, *settings, *result),) if worlds else ()
    tiny = _bench("step", "--ranks", "2", "--models", HOST_BOUND, "--rounds", "1", *TINY, *result)
    return Stage("ranks", "steps on several GPUs, over NVLink or PCIe", 300, gpus, (tiny,))

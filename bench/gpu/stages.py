"""The stages of `bench gpu_all`: what each runs on GPUs, and what of it can run without one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.models import GPU_BOUND, HOST_BOUND, NETWORK_BOUND
from examples.common.variants import OURS, VARIANTS, available

Command = tuple[str, ...]

SHAPES = "resnet50,block,gpt2,llama_layer,small"
SCALE = "--scale 0.002"
TINY = f"--rounds 1 {SCALE}"
# What compute-sanitizer sees: of each test, cases that reach every kernel, odd sizes and tails.
DEVICE_TESTS = {
    "test_pack_device": (
        "cuda/pack/chunk cuda/unpack/chunk cuda/accumulate/chunk "
        "cuda/pack/many cuda/unpack/many cuda/fills cuda/scales"
    ),
    "test_codec_device": "cuda/encodes_odd cuda/encodes_many cuda/decodes_odd cuda/reduces",
    "test_codec_formats_device": "cuda/poison",
}
# Counters of ncu: time, shares of the memory's and the processors' peak, and what is waited for.
COUNTERS = (
    "gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread,"
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
)
SMOKE_TESTS = ("tests/gpu/test_cuda_smoke.py",)
KERNEL_TESTS = ("tests/ddp/test_ops.py", "tests/gpu/test_cuda_ops.py")
RANK_TESTS = tuple(
    f"tests/gpu/test_cuda_{what}.py" for what in ("ddp", "wire", "graphs", "offload")
)
NETWORKED = "ddp,ddp_view,ddp_fp16,fastsync,fastsync_bf16,fastsync_int8"
TRACED = "ddp,fastsync,fastsync_bf16,fastsync_int8"
CODECS = "kernels --cases encode,reduce,decode,select --models gpt2 --rounds 5"
RANKS = f"--models gpt2,{HOST_BOUND} --seconds 40 --check-steps 3"
KERNELS = "regex:transfer_kernel|encode_kernel|decode_kernel|reduce_kernel"


@dataclass(frozen=True)
class Context:
    """The folders and GPUs that the stages run with.

    Attributes:
        work: for logs and builds.
        results: for the JSON files that are kept.
        gpus: number of GPUs; 0 in a rehearsal.
    """

    work: Path
    results: Path
    gpus: int

    def kept(self, result: str) -> Command:
        """Return the options that keep a command's result."""
        return "--json", str(self.results / f"{result}.json")

    def bench(self, arguments: str, result: str = "") -> Command:
        """Return the command of a benchmark."""
        kept = self.kept(result) if result else ()
        return (sys.executable, "-m", "bench", *arguments.split(), *kept)


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
        quiet: seconds without a word after which a command is taken to hang, and stopped.
        together: its processes may share a GPU, at the same time where that is possible.
        proof: a regular expression that the output of a stage that passed matches.
    """

    name: str
    summary: str
    seconds: float
    commands: tuple[Command, ...]
    rehearsal: tuple[Command, ...] = ()
    tools: tuple[str, ...] = ()
    quiet: float = 90.0
    together: bool = False
    proof: str = ""


def stages(context: Context) -> dict[str, Stage]:
    """All of them by name, the most valuable first."""

    def measured(
        name: str, summary: str, seconds: float, command: str, gpus: str, together: bool = False
    ) -> Stage:
        """Return one benchmark, with what it is given on GPUs and in a rehearsal."""
        on_gpus, rehearsed = (context.bench(f"{command} {how}", name) for how in (gpus, TINY))
        return Stage(name, summary, seconds, (on_gpus,), (rehearsed,), together=together)

    # torch's exact variants that this torch has, and FastDDP's default.
    others = {name: v for name, v in VARIANTS.items() if not name.startswith(OURS)}
    exact = (name for name, v in others.items() if v.wire is None and not v.lossy)
    torchs = f"{available(*exact)},{OURS}"
    overhead, few = f"overhead --ranks 1 --wrappers {torchs} --models", "--rounds 5 --check-steps 1"
    every = (
        _build(),
        _tests("units", "the kernels do what their slow twins do, in one process", KERNEL_TESTS),
        measured(
            "kernels",
            "pack and unpack against this GPU's own copy and what torch offers",
            150,
            f"kernels --models {SHAPES} --cases pack,unpack --rounds 5",
            "--device cuda",
        ),
        _tests("smoke", "each part once, two ranks over NCCL", SMOKE_TESTS, seconds=90),
        measured(
            "overhead",
            "what a wrapper costs where there is nothing to send: one rank",
            150,
            f"{overhead} {GPU_BOUND}",
            few,
        ),
        _graphs(context),
        _memory(context, torchs),
        measured(
            "network",
            "steps that wait for the network: NCCL over sockets",
            300,
            f"step --ranks 2 --sockets --wrappers {NETWORKED} --models {NETWORK_BOUND},gpt2",
            "--rounds 7 --steps 3 --seconds 50 --check-steps 2",
            together=True,
        ),
        _zero(context),
        measured(
            "host",
            "the same where the host holds the GPU up: many small tensors",
            150,
            f"{overhead} {HOST_BOUND}",
            few,
        ),
        _sanitizer(str(context.work / "cmake")),
        _trace(context),
        _profile(context),
        measured(
            "codecs", "the kernels of the wire formats, likewise", 120, CODECS, "--device cuda"
        ),
        _tests("nccl", "streams, graphs, NCCL and Gloo on CUDA tensors", RANK_TESTS, together=True),
        _tests("elastic", "ranks die, and the others go on", ("tests/gpu/test_cuda_elastic.py",)),
        _ranks(context),
    )
    named = {stage.name: stage for stage in every}
    assert len(named) == len(every), "two stages have one name"
    return named


def _graphs(context: Context) -> Stage:
    summary = "a whole step in a CUDA graph, beside the same step without one"
    graphs = f"graphs --models {HOST_BOUND} --rounds 5 --steps 4"
    return Stage("graphs", summary, 90, (context.bench(graphs, "graphs"),))


def _memory(context: Context, wrappers: str) -> Stage:
    memory = f"memory --ranks 1 --models gpt2 --wrappers {wrappers}"

    def both(scale: str) -> tuple[Command, ...]:
        peak = context.bench(f"{memory} --peak {scale}", "memory")
        return peak, context.bench(f"{memory} {scale}", "gradients")

    summary = "the peak of a step's memory, and what gradients and buckets hold of it"
    return Stage("memory", summary, 120, both(""), both(SCALE))


def _zero(context: Context) -> Stage:
    measure = (sys.executable, "-m", "tests.simulated.measure", "--width", "512")
    commands = (
        (*measure, "--device", "cuda", *context.kept("stages")),
        context.bench("zero --stages 3 --models gpt2 --ranks 1 --rounds 7", "zero"),
    )
    summary = "memory, host waits and launches of each ZeRO stage, as on the simulated device"
    return Stage("stages", summary, 180, commands, together=True)


def _trace(context: Context) -> Stage:
    trace = "overhead --ranks 2 --sockets --models gpt2 --rounds 3 --check-steps 0"
    command = context.bench(f"{trace} --wrappers {TRACED}", "trace")
    summary = "how much of NCCL's time hides behind computation, from a profiler's trace"
    traces = ("--traces", str(context.results))
    return Stage("trace", summary, 120, ((*command, *traces),), together=True)


def _ranks(context: Context) -> Stage:
    worlds = ",".join(str(n) for n in (2, 4, 8) if n <= context.gpus)
    commands = (context.bench(f"step --ranks {worlds} {RANKS}", "ranks"),) if worlds else ()
    rehearsal = context.bench(f"step --ranks 2 --models {HOST_BOUND} {TINY}", "ranks")
    return Stage("ranks", "steps on several GPUs, over NVLink or PCIe", 300, commands, (rehearsal,))


def _build() -> Stage:
    load = (
        "from fastsync._build import extension; c = extension.load(); "
        "print('CUDA kernels:', c.with_cuda)"
    )
    commands = (sys.executable, "-c", f"{load}; assert c.with_cuda"), (sys.executable, "-c", load)
    summary = "the extension compiles with nvcc"
    return Stage("build", summary, 300, commands[:1], commands[1:], ("nvcc",))


def _tests(
    name: str, summary: str, files: Command, seconds: float = 600, together: bool = False
) -> Stage:
    """Tests of which at least one passes: where all are skipped, nothing has been shown."""
    pytest = (sys.executable, "-m", "pytest")
    return Stage(
        name,
        summary,
        seconds,
        commands=((*pytest, "-v", "-m", "gpu", "--durations=10", *files),),
        rehearsal=((*pytest, "-q", "--co", *files),),
        together=together,
        proof=r"\b[1-9]\d* passed\b",
    )


def _sanitizer(folder: str) -> Stage:
    configure = ("cmake", "-S", ".", "-B", folder, "-G", "Ninja", "-DFASTSYNC_DEVICE_TESTS=ON")
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
    commands = (
        (*configure, "-DCMAKE_CUDA_ARCHITECTURES=native"),
        ("cmake", "--build", folder, "--target", *DEVICE_TESTS),
        *((f"{folder}/{test}", "cuda/") for test in DEVICE_TESTS),
        *(
            (*sanitizer, tool, f"{folder}/{test}", *cases.split())
            for tool in ("memcheck", "racecheck")
            for test, cases in DEVICE_TESTS.items()
        ),
    )
    summary = "the kernels' own tests on the GPU, and under compute-sanitizer"
    tools = ("cmake", "ninja", "nvcc", "compute-sanitizer")
    return Stage("sanitizer", summary, 300, commands, tools=tools, quiet=300)


def _profile(context: Context) -> Stage:
    kernels = context.bench("kernels --device cuda --models gpt2 --rounds 1")
    log = str(context.results / "profile.csv")
    counted = ("ncu", "--clock-control", "none", "--csv", "--log-file", log, "--metrics", COUNTERS)
    few = ("--kernel-name", KERNELS, "--launch-count", "60")
    summary, commands = "hardware counters of pack and unpack", ((*counted, *few, *kernels),)
    return Stage("profile", summary, 150, commands, tools=("ncu",), quiet=150)

"""Places where the code of a step could make the host wait for a device, and why each may.

On a device no step waits, unless the script asks for a value. `test_simulated_waits.py` counts the
waits; this finds places that no test reaches.
"""

import ast
import re
from pathlib import Path

import fastsync

PYTHON = Path(fastsync.__file__).parent
CSRC = PYTHON.parent / "csrc"
# What a step runs: from the script's forward to the end of `optimizer.step()`.
PACKAGES = ("ddp", "fsdp", "reducer", "zero")
FOLDERS = ("codec", "comm", "fault", "fsdp", "ops", "reducer", "shm", "transport")
METHODS = {"item", "cpu", "nonzero", "tolist", "numpy", "equal", "allclose"}
IN_CPP = re.compile(
    r"\.item(<|\()|\.cpu\(|\.to\((at::)?kCPU|device\(at::kCPU\)|\.nonzero\(|\.equal\(|at::equal\("
    r"|is_nonzero\("
)

ASKED = "the script asks for the value"
PLANS = "between steps, where a plan is made"
CPU = "only what lies on a CPU comes here"
BACK = "between steps, where a rank comes back"
MISSED = "a parameter has no gradient on this rank"
DIFFER = "replicas differ"
ALLOWED = {
    "reducer/agreement.py: _of_first_rank: tolist": PLANS,
    "reducer/agreement.py: agree_on_plan: cpu": PLANS,
    "reducer/agreement.py: agree_on_plan: item": PLANS,
    "reducer/agreement.py: agree_on_plan: tolist": PLANS,
    "reducer/bucket.cpp: Bucket::flags_on_host": "the script asks who used a parameter",
    "reducer/sync_checkpoint.py: _sum: to the CPU": ASKED,
    "reducer/flags.cpp: FlagExchange::counts": f"{MISSED}, with a hook; or replicas",
    "reducer/state_transfer.py: _receive_all: numpy": BACK,
    "reducer/state_transfer.py: give: cpu": BACK,
    "reducer/reducer.cpp: Reducer::read_flags": "nonfinite, once, in step()",
    "reducer/reducer.cpp: Reducer::read_missed": f"{MISSED}; once",
    "reducer/tied_parameters.py: overlaps: bool": "no tensor",
    "fsdp/group_reduce.cpp: uses_of": MISSED,
    "ddp/shares.py: __iter__: tolist": CPU,
    "reducer/mean_weights.py: _is_known_nonzero: bool": CPU,
    "reducer/mean_weights.py: factors_after_skips: tolist": "a step that some ranks have left out",
    "reducer/mean_weights.py: _raise_what_is_seen: tolist": "pinned memory, once it is filled",
    "reducer/mean_weights.py: scale: tolist": CPU,
    "reducer/monitor.py: _gather: numpy": CPU,
    "ddp/replica_check.py: _everyones: tolist": DIFFER,
    "ddp/replica_check.py: _on_host: cpu": DIFFER,
    "ddp/ddp_objects.py: _set_forward_pass_work_handle: item": "join(), as in torch",
    "ops/checks.cpp: no_modes": "replicas, every so many steps",
    "ops/checks.cpp: finite_by_torch": "nonfinite, once a step is left out",
    "zero/optimizer_checkpoint.py: _is_unread: tolist": ASKED,
    "zero/parameter_codes.py: decode: tolist": CPU,
    "zero/parameter_codes.py: differ: equal": CPU,
    "zero/parameter_codes.py: holds: equal": CPU,
    "zero/exchange.py: sum: item": "clip_grad_norm_() of the model, where gradients are on a CPU",
    "zero/state_fetch.py: _memory: numpy": ASKED,
    "zero/gradient_norms.py: _check: item": f"{ASKED}, by error_if_nonfinite",
    "zero/gradient_norms.py: _rounded: item": CPU,
    "zero/gradient_norms.py: clip_norm: item": CPU,
    "zero/slices.py: _alike: allclose": ASKED,
    "zero/flat_buffer.py: _follow: bool": CPU,
    "zero/flat_buffer.py: delivered: equal": ASKED,
    "zero/exchange.py: numpy: numpy": ASKED,
    "zero/exchange.py: tolist: tolist": ASKED,
    "transport/codes.cpp: ShardResidual::load": f"{PLANS}; or {MISSED}",
    "fsdp/sharded_param.py: has_hooks: bool": "no tensor",
    "fsdp/sharded_param.py: is_written: equal": "a script has taken `.data` within forward",
    "fsdp/cpu_offload.py: wait: synchronize": "offloaded shares, which the host reads and writes",
}


def calls_of(function):
    """Yield the calls within a function, but for those of functions within it."""
    below = list(ast.iter_child_nodes(function))
    while below:
        node = below.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        below.extend(ast.iter_child_nodes(node))


def waits_as(call):
    """Return how a call may wait; None: it does not."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if name in METHODS:
        return name
    if name == "to" and any(_is_cpu(value) for value in [*call.args, *_values(call)]):
        return "to the CPU"
    if name == "synchronize":
        return name
    is_bool = isinstance(call.func, ast.Name) and call.func.id == "bool"
    return "bool" if is_bool and call.args and isinstance(call.args[0], ast.Call) else None


def _values(call):
    return [keyword.value for keyword in call.keywords]


def _is_cpu(value):
    return isinstance(value, ast.Constant) and value.value == "cpu"


def python_places():
    for package in PACKAGES:
        root = PYTHON / package
        for file in [root] if root.suffix else sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef):
                    for call in calls_of(node):
                        if how := waits_as(call):
                            yield f"{file.relative_to(PYTHON)}: {node.name}: {how}"


def cpp_places():
    for folder in FOLDERS:
        for file in sorted((CSRC / folder).glob("*.[ch]*")):
            function = ""
            for line in file.read_text().splitlines():
                if begun := re.match(r"(?:  )?[\w:<>,&*~ ]+?\b([\w:~]+)\([^;]*$", line):
                    function = begun[1]
                if IN_CPP.search(line.split("//")[0]):
                    yield f"{file.relative_to(CSRC)}: {function}"


def test_places_where_the_host_waits_are_known():
    found = {*python_places(), *cpp_places()}
    assert found == set(ALLOWED), "a new place where a step may wait, or one that is gone"

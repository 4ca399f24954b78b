"""Checks that compare the facts of all ranks, on rank 0: each takes them and returns findings.

A new check is one more function in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastsync.doctor.facts import Facts, is_loopback
from fastsync.doctor.finding import Finding, fail, ok, warn
from fastsync.faults.wording import name_ranks

Ranks = Mapping[int, Facts]  # by rank
Check = Callable[[Ranks, str], list[Finding]]

# Variables that say where something of one rank is, or what it prints.
_PER_RANK = {
    "CUDA_VISIBLE_DEVICES",
    "FASTSYNC_CACHE_DIR",
    "FASTSYNC_VERBOSE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_HOSTID",
    "UCX_LOG_FILE",
}
# Those that name devices and files of a machine.
_PER_MACHINE = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_CONF_FILE",
    "NCCL_CROSS_NIC",
    "NCCL_GRAPH_FILE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_FILE",
    "OMP_NUM_THREADS",
    "UCX_NET_DEVICES",
}
# Of versions, those that may differ, with a warning.
_MAY_DIFFER = {"python"}
_LEAST_FREE = 1.0  # GiB
# Reasons against shared memory that are meant, or no fault.
_MEANT = ("FASTSYNC_SHM is 0", "the ranks are on several machines")


def check_facts(ranks: Ranks, world: int, backend: str) -> list[Finding]:
    """All findings.

    Args:
        ranks: those that came.
        world: how many there should be.
        backend: that they will use.
    """
    findings = []
    if absent := set(range(world)) - set(ranks):
        remedy = (
            "Look at what they printed; see whether their machines reach MASTER_ADDR:MASTER_PORT"
        )
        findings.append(fail("ranks", f"{name_ranks(absent)} did not come", remedy))
    for check in CHECKS:
        findings += check(ranks, backend)
    return findings


def machines_of(ranks: Ranks) -> list[list[int]]:
    """Return the ranks of each machine, in the order of their first ranks."""
    return list(_by(ranks, lambda facts: facts.machine).values())


def _by(ranks: Ranks, key: Callable[[Facts], str]) -> dict[str, list[int]]:
    """Return the ranks with the same `key`."""
    found: dict[str, list[int]] = {}
    for rank, facts in sorted(ranks.items()):
        found.setdefault(key(facts), []).append(rank)
    return found


def _listed(groups: Mapping[str, Sequence[int]]) -> str:
    """ "2.11 on ranks 0-2; 2.13 on rank 3"."""
    return "; ".join(f"{value} on {name_ranks(its)}" for value, its in groups.items())


def check_versions(ranks: Ranks, backend: str) -> list[Finding]:
    """Check whether all ranks have the same of everything that takes part."""
    found = []
    names = dict.fromkeys(name for facts in ranks.values() for name in facts.versions)
    for name in names:
        groups = _by(ranks, lambda facts: facts.versions.get(name, "none"))  # noqa: B023
        if len(groups) > 1:
            state = warn if name in _MAY_DIFFER else fail
            remedy = "Give all ranks one environment, such as one container image"
            found.append(state("versions", f"{name} is {_listed(groups)}", remedy))
    first = next(iter(ranks.values()), None)
    if found or first is None:
        return found
    versions = ", ".join(f"{k} {v}" for k, v in first.versions.items() if k != "fastsync's sources")
    return [ok("versions", versions + (" on every rank" if len(ranks) > 1 else ""))]


def check_build(ranks: Ranks, backend: str) -> list[Finding]:
    """Check that there is an extension, and report its origin."""
    broken = _by({r: f for r, f in ranks.items() if f.build_error}, lambda f: f.build_error)
    if broken:
        remedy = "Install a compiler, or an extension that fits: pip install --no-build-isolation ."
        return [fail("build", f"{name_ranks(its)}: {why}", remedy) for why, its in broken.items()]
    origins = _by(
        ranks,
        lambda facts: (
            "compiled when fastsync was installed"
            if facts.prebuilt
            else f"compiled at the first import, and is kept under {facts.cache[0]}"
        ),
    )
    findings = [ok("build", f"the extension was {_kinds(origins)}")]
    lacking = _by({r: f for r, f in ranks.items() if f.cuda_error}, lambda f: f.cuda_error)
    if backend == "nccl" and lacking:
        remedy = "FASTSYNC_CUDA=1 insists on CUDA kernels where the extension is compiled"
        findings = [
            fail("build", f"{name_ranks(its)}: {why}", remedy) for why, its in lacking.items()
        ]
    low = [r for r, f in ranks.items() if not f.prebuilt and f.cache[1] < _LEAST_FREE]
    if low:
        text = f"less than {_LEAST_FREE:g} GiB are free for {ranks[low[0]].cache[0]}"
        remedy = "Point FASTSYNC_CACHE_DIR at a folder with room"
        findings.append(warn("build", f"{text} on {name_ranks(low)}", remedy))
    return findings


def _kinds(groups: Mapping[str, Sequence[int]]) -> str:
    """Return one kind by itself, several with their ranks."""
    return next(iter(groups), "") if len(groups) < 2 else _listed(groups)


def check_variables(ranks: Ranks, backend: str) -> list[Finding]:
    """Check whether variables that change what ranks say to each other are the same."""
    names = sorted({name for facts in ranks.values() for name in facts.variables})
    differ = [name for name in names if name not in _PER_RANK | _PER_MACHINE]
    found = [f for name in differ for f in _differing(ranks, name, "Set it alike on every rank")]
    for name in sorted(_PER_MACHINE.intersection(names)):
        for machine in machines_of(ranks):
            its = {rank: ranks[rank] for rank in machine}
            found += _differing(its, name, "Set it alike on the ranks of a machine")
    alike = ", alike on every rank" if len(ranks) > 1 else ""
    return found or [ok("environment", f"{_count(len(names), 'variable')} set{alike}")]


def _differing(ranks: Ranks, name: str, remedy: str) -> list[Finding]:
    groups = _by(ranks, lambda facts: facts.variables.get(name, "not set"))
    if len(groups) < 2:
        return []
    return [warn("environment", f"{name} is {_listed(groups)}", remedy)]


def check_devices(ranks: Ranks, backend: str) -> list[Finding]:
    """Check that each rank has a GPU of its own and all have the same kind, or that none has
    one."""
    kinds = _by(ranks, lambda facts: facts.gpu or ("no GPU left" if facts.gpus else "no GPU"))
    if backend != "nccl":
        return []
    findings = []
    lacking = [rank for rank, facts in ranks.items() if not facts.gpu]
    if lacking:
        remedy = "Start as many ranks per machine as it has GPUs; look at CUDA_VISIBLE_DEVICES"
        findings.append(fail("devices", f"no GPU is left for {name_ranks(lacking)}", remedy))
    elif len(kinds) > 1:
        remedy = "The slowest sets the pace: use one kind, or give the others more work"
        findings.append(warn("devices", f"different GPUs: {_listed(kinds)}", remedy))
    return findings or [ok("devices", f"every rank has a GPU of its own, {next(iter(kinds), '')}")]


def check_backend(ranks: Ranks, backend: str) -> list[Finding]:
    """Check whether every rank's torch has the backend."""
    lacking = [rank for rank, facts in ranks.items() if backend not in facts.backends]
    if lacking:
        remedy = f"Install a build of torch with {backend}, or choose another with --backend"
        return [fail("backend", f"torch on {name_ranks(lacking)} has no {backend}", remedy)]
    have = _kinds(_by(ranks, lambda facts: ", ".join(facts.backends)))
    return [ok("backend", f"{backend} is used; torch has {have}")]


def check_threads(ranks: Ranks, backend: str) -> list[Finding]:
    """Check whether the ranks of a machine have more threads than it has cores."""
    findings = []
    for machine in machines_of(ranks):
        threads = sum(ranks[rank].threads for rank in machine)
        cores = max(ranks[rank].cores for rank in machine)
        if len(machine) > 1 and threads > cores:
            text = f"{name_ranks(machine)} have {threads} threads together on {cores} cores"
            each = cores // len(machine)
            remedy = f"Set OMP_NUM_THREADS={each}" if each else "Start fewer ranks there"
            findings.append(warn("threads", text, remedy))
    return findings


def check_address(ranks: Ranks, backend: str) -> list[Finding]:
    """Check whether the others can reach each rank at the address that it takes."""
    machines = machines_of(ranks)
    addresses = {rank: facts.address(backend) for rank, facts in ranks.items()}
    nowhere = [rank for rank, address in addresses.items() if not address]
    alone = [rank for rank, address in addresses.items() if is_loopback(address)]
    if nowhere and len(ranks) > 1:
        remedy = "Set GLOO_SOCKET_IFNAME to an interface with an address, as `ip address` lists it"
        return [fail("network", f"there is no address for {name_ranks(nowhere)}", remedy)]
    if backend == "gloo" and len(machines) > 1 and alone:
        text = (
            f"Gloo tells other machines to find {name_ranks(alone)} at {addresses[alone[0]]}, "
            "which no other machine can reach; it is what the machine's name stands for"
        )
        candidates = _by({rank: ranks[rank] for rank in alone}, _candidates)
        remedy = f"Set GLOO_SOCKET_IFNAME on all ranks of a machine: {_kinds(candidates)}"
        return [fail("network", text, remedy)]
    names = _kinds(_by(ranks, lambda facts: _interface_text(facts, backend)))
    return [ok("network", f"{_count(len(machines), 'machine')}; {names}")]


def _candidates(facts: Facts) -> str:
    """Return the interfaces that may lead elsewhere, the one towards the store first."""
    every = (facts.interface("nccl"), *facts.interfaces)
    names = [i.name for i in every if i.addresses and not any(map(is_loopback, i.addresses))]
    return " or ".join(dict.fromkeys(names)) or "the one that leads to the others"


def _interface_text(facts: Facts, backend: str) -> str:
    interface = facts.interface(backend)
    if not interface.name:
        return facts.address(backend) or "no network is needed"
    return f"interface {interface.name} (MTU {interface.mtu})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s'[: number != 1]}"


def check_mtu(ranks: Ranks, backend: str) -> list[Finding]:
    """Check whether all machines have packets of one size."""
    known = {rank: facts for rank, facts in ranks.items() if facts.interface(backend).mtu}
    if len(machines_of(ranks)) > 1:  # NCCL may be told the store's address, and take another
        known = {r: f for r, f in known.items() if not is_loopback(f.address(backend))}
    groups = _by(known, lambda facts: str(facts.interface(backend).mtu))
    if len(groups) < 2:
        return []
    remedy = "Set one MTU on all of them and on the switches: ip link set dev NAME mtu 9000"
    return [warn("network", f"the MTU is {_listed(groups)}", remedy)]


def check_shared(refusal: str) -> list[Finding]:
    """Check whether CPU gradients travel in memory where they could.

    Args:
        refusal: why not, as `offer_memory` of fastsync/reducer/shared_memory.py says it; or empty.
    """
    if not refusal:
        return [ok("shared memory", "CPU gradients travel through memory that the ranks share")]
    text = f"CPU gradients travel through the process group: {refusal}"
    if refusal.endswith(_MEANT):
        return [ok("shared memory", text)]
    remedy = "Run the ranks of a machine as one user in one container, which speeds them up"
    return [warn("shared memory", text, remedy)]


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_build,
    check_backend,
    check_devices,
    check_variables,
    check_threads,
    check_address,
    check_mtu,
)

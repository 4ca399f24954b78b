"""The doctor's rules, which are pure: facts, times and outcomes in, findings out."""

from dataclasses import replace

import pytest

from fastsync.doctor import checks, drill, rates, report
from fastsync.doctor.facts import Facts, Interface, find_interface, gloo_address, is_loopback
from fastsync.doctor.finding import Level, warn
from fastsync.doctor.rates import AllReduce, Pairs, PairTime, Slow
from fastsync.faults.wording import name_ranks

LO = Interface("lo", ("127.0.0.1", "::1"), 65536)
ETH = Interface("eth0", ("10.0.0.1",), 1500)
FAST = Interface("eth1", ("10.1.0.1",), 9000)
BASE = Facts(
    host="node1",
    machine="one",
    versions={"python": "3.11.7", "torch": "2.13.0", "fastsync's sources": "abc"},
    prebuilt=True,
    backends=("gloo",),
    variables={"NCCL_ALGO": "Ring"},
    cores=8,
    threads=1,
    gloo="10.0.0.1",
    store="10.0.0.1",
    interfaces=(LO, ETH, FAST),
)


def on(machine, **changes):
    return replace(BASE, machine=machine, host=machine, **changes)


def levels(findings):
    return [finding.level for finding in findings]


def the_bad(findings):
    """The one finding that is not OK."""
    (found,) = [finding for finding in findings if finding.level > Level.OK]
    assert found.remedy, "what is wrong has a remedy"
    return found


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (range(8), "ranks 0-7"),
        ([0, 2, 4, 5, 6], "ranks 0, 2, 4-6"),
    ],
)
def test_ranks_are_listed_in_runs(ranks, text):
    assert name_ranks(ranks) == text


def test_facts_travel_as_text():
    facts = on("one", cache=("/cache", 3.5))
    assert Facts.parse(facts.dump()) == facts


def test_ranks_alike_are_fine():
    findings = checks.check_facts({0: BASE, 1: BASE}, 2, "gloo")
    assert set(levels(findings)) == {Level.OK}
    assert "torch 2.13.0" in findings[0].text
    assert "sources" not in findings[0].text, "a digest tells people nothing"


def test_an_absent_rank_is_named():
    found = the_bad(checks.check_facts({0: BASE, 2: BASE}, 4, "gloo"))
    assert found.level == Level.FAIL
    assert found.text == "ranks 1, 3 did not come"


@pytest.mark.parametrize(
    ("name", "level"),
    [("torch", Level.FAIL), ("fastsync's sources", Level.FAIL), ("python", Level.WARN)],
)
def test_another_version_is_named_with_its_ranks(name, level):
    other = replace(BASE, versions={**BASE.versions, name: "other"})
    found = the_bad(checks.check_versions({0: BASE, 1: other, 2: BASE}, "gloo"))
    assert found.level == level
    assert f"{name} is {BASE.versions[name]} on ranks 0, 2; other on rank 1" == found.text


def test_a_build_that_fails_is_told_with_its_error():
    broken = replace(BASE, build_error="no compiler", prebuilt=False)
    found = the_bad(checks.check_build({0: BASE, 1: broken}, "gloo"))
    assert (found.level, found.text) == (Level.FAIL, "rank 1: no compiler")


def test_a_full_disk_matters_where_something_is_compiled():
    full = replace(BASE, cache=("/cache", 0.1))
    assert levels(checks.check_build({0: full}, "gloo")) == [Level.OK]
    found = the_bad(checks.check_build({0: replace(full, prebuilt=False)}, "gloo"))
    assert found.level == Level.WARN
    assert "/cache on rank 0" in found.text


def test_gpus_need_kernels():
    assert levels(checks.check_build({0: BASE}, "gloo")) == [Level.OK]
    old = replace(BASE, cuda_error="the driver is too old")
    assert levels(checks.check_build({0: old}, "gloo")) == [Level.OK]
    found = the_bad(checks.check_build({0: BASE, 1: old}, "nccl"))
    assert (found.level, found.text) == (Level.FAIL, "rank 1: the driver is too old")
    assert levels(checks.check_build({0: BASE}, "nccl")) == [Level.OK]


DIFFERENT = [
    # name, values by rank, machines by rank, whether it is a fault
    ("NCCL_ALGO", ("Ring", "Tree"), "ab", True),
    ("NCCL_ALGO", ("Ring", None), "aa", True),
    ("FASTSYNC_SHM", (None, "0"), "aa", True),
    ("FASTSYNC_CACHE_DIR", ("/a", "/b"), "aa", False),
    ("CUDA_VISIBLE_DEVICES", ("0", "1"), "aa", False),
    ("NCCL_HOSTID", ("a", "b"), "aa", False),
    ("GLOO_SOCKET_IFNAME", ("eth0", "eth1"), "aa", True),
    ("GLOO_SOCKET_IFNAME", ("eth0", "ens3"), "ab", False),
    ("GLOO_SOCKET_IFNAME", ("eth0", "ens3", "ens4"), "abb", True),
]


@pytest.mark.parametrize(("name", "values", "machines", "bad"), DIFFERENT)
def test_variables_that_differ(name, values, machines, bad):
    ranks = {
        rank: on(machine, variables={} if value is None else {name: value})
        for rank, (value, machine) in enumerate(zip(values, machines, strict=True))
    }
    findings = checks.check_variables(ranks, "gloo")
    if not bad:
        assert levels(findings) == [Level.OK]
        return
    found = the_bad(findings)
    assert found.text.startswith(f"{name} is ")
    last = f"{values[-1] or 'not set'} on rank {len(values) - 1}"
    assert last in found.text


def test_loopback_is_a_fault_between_machines_alone():
    loop = {"gloo": "127.0.1.1"}
    assert levels(checks.check_address({0: on("a", **loop), 1: on("a", **loop)}, "gloo")) == [0]
    found = the_bad(checks.check_address({0: on("a"), 1: on("b", **loop)}, "gloo"))
    assert found.level == Level.FAIL
    assert "find rank 1 at 127.0.1.1" in found.text
    assert "GLOO_SOCKET_IFNAME" in found.remedy
    assert found.remedy.endswith(": eth0 or eth1")
    # NCCL takes another interface by itself.
    assert levels(checks.check_address({0: on("a"), 1: on("b", **loop)}, "nccl")) == [0]


def test_no_address_is_a_fault_between_ranks_alone():
    lost = replace(BASE, gloo="")
    assert levels(checks.check_address({0: lost}, "gloo")) == [Level.OK]
    assert the_bad(checks.check_address({0: BASE, 1: lost}, "gloo")).level == Level.FAIL


def test_sizes_of_packets_are_compared():
    found = the_bad(checks.check_mtu({0: on("a"), 1: on("b", gloo="10.1.0.1"), 2: on("c")}, "gloo"))
    assert found.text == "the MTU is 1500 on ranks 0, 2; 9000 on rank 1"
    assert not checks.check_mtu({0: on("a", store="127.0.0.1"), 1: on("b")}, "nccl")
    assert not checks.check_mtu({0: on("a"), 1: on("b", gloo="10.2.0.1")}, "gloo")


def test_more_threads_than_cores():
    many = replace(BASE, threads=8)
    found = the_bad(checks.check_threads({0: many, 1: many}, "gloo"))
    assert found.remedy == "Set OMP_NUM_THREADS=4"
    crowded = checks.check_threads(dict.fromkeys(range(9), BASE), "gloo")
    assert the_bad(crowded).remedy == "Start fewer ranks there"
    assert not checks.check_threads({0: many}, "gloo"), "one rank may have them all"
    assert not checks.check_threads({0: on("a", threads=8), 1: on("b", threads=8)}, "gloo")


def test_a_gpu_for_each_rank():
    one = on("a", gpus=2, gpu="H100")
    assert levels(checks.check_devices({0: one, 1: one}, "nccl")) == [Level.OK]
    third = on("a", gpus=2, gpu="")
    found = the_bad(checks.check_devices({0: one, 1: one, 2: third}, "nccl"))
    assert (found.level, found.text) == (Level.FAIL, "no GPU is left for rank 2")
    mixed = {0: one, 1: on("b", gpus=1, gpu="A100")}
    assert the_bad(checks.check_devices(mixed, "nccl")).level == Level.WARN
    assert not checks.check_devices({0: BASE}, "gloo")


def test_torch_has_the_backend():
    assert the_bad(checks.check_backend({0: BASE}, "nccl")).level == Level.FAIL


@pytest.mark.parametrize(
    ("refusal", "level"),
    [
        ("", Level.OK),
        ("on rank 1, FASTSYNC_SHM is 0", Level.OK),
        ("the ranks are on several machines", Level.OK),
        ("rank 0 cannot map the others' memory: Permission denied", Level.WARN),
    ],
)
def test_shared_memory_is_missed_where_it_could_be(refusal, level):
    (found,) = checks.check_shared(refusal)
    assert found.level == level
    assert refusal in found.text


def test_interfaces_of_addresses():
    assert find_interface("10.0.0.1", (LO, ETH)) == ETH
    assert find_interface("127.0.1.1", (LO, ETH)) == LO, "Debian gives it to the machine's name"
    assert find_interface("10.9.9.9", (LO, ETH)) is None
    assert is_loopback("::1") and not is_loopback("10.0.0.1") and not is_loopback("")
    assert gloo_address("eth0,eth1", (LO, ETH)) == "10.0.0.1"
    assert gloo_address("eth7", (LO, ETH)) == ""


def drill_of(fault, **changes):
    """How three ranks end of which the second has the fault; the last one as `changes` say."""
    words = {
        "kill": "was killed by SIGKILL",
        "stop": "is stopped (SIGSTOP, SIGTSTP)",
        "raise": "DrillError: a drill",
        "exit": "exited with code 3 without a word",
    }[fault]
    text = f"rank 1 {'raised ' * (fault == 'raise')}{words} in the backward"
    good = drill.Outcome("SyncFault", (1,), words, text, 0.2, "exit code 1")
    ends = {"kill": "SIGKILL", "stop": "SIGSTOP", "raise": "exit code 1", "exit": "exit code 3"}
    faulty = drill.Outcome(ended=ends[fault])
    return [good, faulty, replace(good, **changes)]


@pytest.mark.parametrize("fault", drill.FAULTS)
def test_a_drill_passes_where_all_name_the_rank(fault):
    (found,) = drill.judge(fault, 1, drill_of(fault))
    assert found.level == Level.OK
    assert found.text.startswith("ranks 0, 2 said within 0.20 s that rank 1 ")


@pytest.mark.parametrize("fault", drill.FAULTS)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ended": "hung"}, "did not end by itself"),
        (
            {"error": "", "ended": "exit code 0", "text": ""},
            "did not notice the fault: exit code 0",
        ),
        ({"error": "RuntimeError"}, "raised RuntimeError, which does not name"),
        ({"ranks": (0,)}, "blames ranks [0]"),
        ({"ranks": (0, 1)}, "blames ranks [0, 1]"),
        ({"text": "rank 1 is gone"}, "does not say what happened"),
    ],
)
def test_a_drill_fails_where_one_does_not(fault, changes, why):
    passed, failed = drill.judge(fault, 1, drill_of(fault, **changes))
    assert passed.level == Level.OK and "rank 0 said" in passed.text
    assert failed.level == Level.FAIL
    assert failed.text.startswith(f"rank 2 {why}")


def test_a_drill_without_its_fault_shows_nothing():
    unhurt = [drill_of("kill")[0], drill.Outcome(ended="hung")]
    assert "should have had its fault" in drill.judge("kill", 1, unhurt)[1].text


def test_news_that_come_late_are_a_warning():
    late = drill_of("kill", seconds=9.0)
    assert the_bad(drill.judge("kill", 1, late)).level == Level.WARN
    assert levels(drill.judge("stop", 1, drill_of("stop", seconds=9.0))) == [Level.OK]


# --- The doctor's rules for pairs and ranks: which are measured, which are slow, how that is shown


@pytest.mark.parametrize("world", [2, 3, 5, 16])
def test_few_ranks_meet_all_others_one_pair_at_a_time(world):
    rounds = rates.pair_rounds(world)
    assert all(len(pairs) == 1 for pairs in rounds)
    assert len({pairs[0] for pairs in rounds}) == len(rounds) == world * (world - 1) // 2


@pytest.mark.parametrize("world", [17, 24, 63, 64, 1000])
def test_many_ranks_meet_some_at_once(world):
    rounds = rates.pair_rounds(world)
    pairs = [pair for its in rounds for pair in its]
    assert len(set(pairs)) == len(pairs), "none twice"
    for its in rounds:
        assert len({rank for pair in its for rank in pair}) == 2 * len(its), "none in two pairs"
    for rank in (0, world // 2, world - 1):
        met = {sum(pair) - rank for pair in pairs if rank in pair}
        for distance in (1, 2, 4, 8):
            assert {(rank + distance) % world, (rank - distance) % world} <= met
    assert len(rounds) <= 4 * world.bit_length(), "few rounds"


def pair_times(world, slow_pairs=(), rate=1e9, latency=1e-4):
    """Every pair of `world` ranks; some have a tenth of the rate."""
    return {
        (a, b): PairTime(latency, rate / 10 if (a, b) in slow_pairs else rate)
        for a in range(world)
        for b in range(a + 1, world)
    }


def pairs_with(rank, world):
    return [(min(rank, r), max(rank, r)) for r in range(world) if r != rank]


def test_even_pairs_are_fine():
    assert rates.find_slow(pair_times(4), [range(4)]) == Slow()


def test_one_pair_is_not_compared():
    assert rates.find_slow({(0, 1): PairTime(1, 1)}, [range(2)]) == Slow()


def test_a_slow_pair_is_marked():
    found = rates.find_slow(pair_times(4, [(1, 3)]), [range(4)])
    assert found == Slow((), ((1, 3),))


@pytest.mark.parametrize("world", [3, 4, 5, 9])
def test_a_slow_rank_is_marked_and_its_pairs_are_not(world):
    """Among three ranks two of three pairs are slow then, so that the median pair is."""
    times = pair_times(world, pairs_with(1, world))
    assert rates.find_slow(times, [range(world)]) == Slow((1,), ())


def test_a_slow_rank_and_a_slow_pair_elsewhere():
    times = pair_times(6, [*pairs_with(0, 6), (2, 5)])
    assert rates.find_slow(times, [range(6)]) == Slow((0,), ((2, 5),))


def test_machines_are_compared_apart():
    """A network is slower than memory, which is no fault."""
    machines = [range(3), range(3, 6)]
    between = [(a, b) for a in range(3) for b in range(3, 6)]
    assert rates.find_slow(pair_times(6, between), machines) == Slow()
    times = pair_times(6, between)
    times[1, 4] = PairTime(1e-4, 1e7)
    assert rates.find_slow(times, machines) == Slow((), ((1, 4),))


@pytest.mark.parametrize(
    ("latency", "machines", "bad"),
    [
        (1e-4, [[0], [1], [2], [3]], False),
        (2.9e-4, [[0], [1], [2], [3]], False),
        (3.1e-4, [[0], [1], [2], [3]], True),
        (1e-2, [[0], [1], [2], [3]], True),
        (2e-3, [range(4)], False),
        (2.2e-3, [range(4)], True),
    ],
)
def test_a_late_pair_is_slow(latency, machines, bad):
    """Within a machine threads that wait for a core are later than links."""
    times = pair_times(4)
    times[0, 2] = PairTime(latency, 1e9)
    assert rates.find_slow(times, machines).pairs == (((0, 2),) if bad else ())


def test_microseconds_are_noise():
    times = pair_times(4, latency=2e-6)
    times[0, 2] = PairTime(3e-5, 1e9)
    assert rates.find_slow(times, [range(4)]) == Slow()


@pytest.mark.slow
def test_thousands_of_ranks_are_compared_at_once():
    world = 4096
    pairs = [pair for its in rates.pair_rounds(world) for pair in its]
    slow_ones = {pair for pair in pairs if 77 in pair} | {(5, 6)}
    times = {p: PairTime(1e-4, 1e8 if p in slow_ones else 1e9) for p in pairs}
    assert rates.find_slow(times, [range(world)]) == Slow((77,), ((5, 6),))


def test_slow_pairs_and_ranks_are_named():
    found = rates.check_pairs(Slow((2,), ((0, 1),)), 6)
    assert [f.level for f in found] == [Level.WARN] * 2
    assert "rank 2" in found[0].text and "0-1" in found[1].text
    assert rates.check_pairs(Slow(), 6)[0].text == "no slow pair among 6"


@pytest.mark.parametrize(
    ("seconds", "ranks"),
    [
        ([1.0, 1.0], None),
        ([1.0, 1.25], None),
        ([1.0, 2.0], "rank 1"),
        ([2.0, 1.0, 1.0], "rank 0"),
        ([1.0, 2.0, 2.0, 1.0, 1.0], "ranks 1, 2"),
    ],
)
def test_the_rank_that_computes_slowly(seconds, ranks):
    (found,) = rates.check_compute(seconds)
    assert (found.level == Level.WARN) == (ranks is not None)
    assert ranks is None or found.text.endswith(f"as {ranks}")


def measured(world, slow_pairs=()):
    times = {p: t for its in rates.pair_rounds(world) for p in its for t in [PairTime(1e-4, 1e9)]}
    times |= {pair: PairTime(1e-4, 1e7) for pair in slow_pairs}
    found = rates.find_slow(times, [range(world)])
    return rates.Measured(AllReduce(1 << 26, 0.1, 6e8), Pairs(times, len(times)), found)


@pytest.mark.parametrize("world", [3, 40])
def test_a_report_of_any_size_marks_what_is_slow(world):
    facts = dict.fromkeys(range(world), Facts("node1", "one"))
    findings = [warn("links", "slow", "Mend it")]
    one = report.Report(world, "gloo", facts, findings, measured(world, [(0, 1)]))
    text = report.report_text(one)
    assert "* is slow" in text and "*     0 - 1" in text
    assert "A pair is slow if its rate is below 0.5 of the median" in text
    assert "all-reduce of 64.0 MiB among all ranks: 100 ms, 0.600 GB/s bus bandwidth" in text
    assert "1 WARN" in text and "-> Mend it" in text
    assert max(map(len, text.splitlines())) <= 112
    assert len(text.splitlines()) < 40, "also with many ranks"

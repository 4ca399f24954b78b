"""What docs/planner.md plans for published measurements: networks, messages, and sources."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs import planner_scaling
from docs.planner_networks import IMAGES, NETWORKS
from docs.planner_scaling import CYCLE, FUSED, P100, Fit

DOCS = Path(__file__).parent.parent / "docs"
# Parameters as torchvision has them, of Inception V3 without its auxiliary classifier.
SIZES = {
    "Inception V3": 23_834_568,
    "ResNet-50": 25_557_032,
    "ResNet-101": 44_549_160,
    "VGG-16": 138_357_544,
}


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_have_the_parameters_of_their_papers(network):
    record = planner_scaling.traced(network, 2)
    assert record.numel == SIZES[network]
    assert record.inputs == 2 * 3 * IMAGES.get(network, 224) ** 2 * 4


def rows(network):
    return [row for row in planner_scaling.horovod_rows() if row.network == network]


@pytest.mark.parametrize("network", ["ResNet-101", "VGG-16"])
def test_horovod_sends_what_is_ready_in_each_turn_of_its_loop(network):
    record = planner_scaling.traced(network, 64)
    compute = planner_scaling.computing(record, P100, 64 / rows(network)[0].alone)
    messages = list(planner_scaling.fused(record, compute))
    assert sum(message.nbytes for message in messages) == record.nbytes
    assert all(
        message.ready / CYCLE == pytest.approx(round(message.ready / CYCLE)) for message in messages
    )
    assert messages == sorted(messages, key=lambda message: message.ready)
    for end in {message.ready for message in messages}:
        sent = sum(message.nbytes for message in messages if message.ready <= end)
        ready = (i for i, at in enumerate(compute.ready) if math.ceil(at / CYCLE) * CYCLE <= end)
        assert sent == sum(record.params[index].nbytes for index in ready)
    alone = {param.nbytes for param in record.params}
    assert all(message.nbytes <= FUSED or message.nbytes in alone for message in messages)


def test_a_gpu_by_itself_keeps_all_and_each_constant_costs():
    row = rows("VGG-16")[0]
    best = planner_scaling.horovod_keeps(row, Fit())
    least = 1 - CYCLE * row.alone / 64  # the last gradients wait for their turn
    assert least <= planner_scaling.horovod_keeps(replace(row, gpus=1), Fit()) <= 1
    for worse in (Fit(jitter=0.03), Fit(rdma=0.5)):
        assert planner_scaling.horovod_keeps(row, worse) < best - 0.01
    assert planner_scaling.horovod_keeps(row, Fit(tcp=0.5)) == best
    alone = planner_scaling.ddp_iterations()["ResNet-50", 1]
    kept = [planner_scaling.ddp_keeps("ResNet-50", n, alone, 1e-11) for n in (1, 2, 16)]
    assert kept[0] == pytest.approx(1)
    assert kept[0] > kept[1] > kept[2]


def test_constants_are_fitted_to_few_rows_and_judged_on_the_others():
    assert len(planner_scaling.horovod_errors()) == sum(
        row.gpus > 16 for row in planner_scaling.horovod_rows()
    )
    fitted = {(network, gpus) for network, gpus in planner_scaling.FITTED}
    judged = {case for case in planner_scaling.ddp_iterations() if case[1] > 1} - fitted
    assert len(planner_scaling.ddp_errors()) == len(judged) > len(fitted)


def test_sources_are_linked_where_they_are_shown():
    page = (DOCS / "planner.md").read_text()
    for found in planner_scaling.PUBLISHED.values():
        commits = re.findall(r"\b[0-9a-f]{40}\b", found["source"])
        assert commits
        assert all(f"/blob/{commit}/" in page for commit in commits)
        assert {len(row) for row in found["rows"]} == {len(found["columns"])}

"""docs/measure_price.py: what looking out for faults costs while nothing happens."""

import json

import pytest

from docs.measure_price import FREE, WAYS, Burst, Taken, longer, row
from tests.scripts import run_module


def test_a_row_holds_the_ratios_of_each_round():
    clock = {FREE: [0.1, 0.2], "watch": [0.1, 0.2], "watch and digests": [0.3, 0.6]}
    processor = {FREE: [0.2, 0.2], "watch": [0.4, 0.4], "watch and digests": [0.8, 0.8]}
    watch = {FREE: [0.0, 0.0], "watch": [0.001, 0.003], "watch and digests": [0.5, 0.5]}
    comparing = {FREE: [0.5, 0.5], "watch": [0.5, 0.5], "watch and digests": [0.01, 0.02]}
    found = row("small", 2, Taken(clock, processor, watch, comparing))
    by_clock, by_processor = ["1.000 ± 0.000", "3.000 ± 0.000"], ["2.000 ± 0.000", "4.000 ± 0.000"]
    shares = ["0.200 ± 0.111 %", "1.500 ± 0.555 %"]
    assert found == ["small", "2", "150.00 ms", *by_clock, *by_processor, *shares, "2"]


def test_numbers_of_a_round_are_of_its_ranks():
    """Of the slowest one, of all, or their mean."""
    short, long = Burst([1.0] * 9 + [3.0], 8.0, 0.6), Burst([2.0] * 10, 4.0, 0.0)
    taken = Taken.of({FREE: [(short, long)]})
    assert taken.clock[FREE] == [2.0]
    assert taken.processor[FREE] == [pytest.approx(1.2)]
    assert taken.watch[FREE] == [pytest.approx((0.6 / 12 + 0) / 2)]
    assert taken.comparing[FREE] == [pytest.approx((2 / 12 + 0) / 2)]


def test_the_tenth_steps_are_those_that_compare():
    assert longer([1.0] * 9 + [2.0] + [1.0] * 9 + [4.0]) == pytest.approx(4 / 24)


@pytest.mark.slow
def test_the_command(tmp_path):
    result = tmp_path / "price.json"
    run_module("docs.measure_price", "--models", "small", "--rounds", 3, "--json", result)
    table = json.loads(result.read_text())
    assert set(WAYS) <= set(table["headers"])
    ((name, ranks, *_, rounds),) = table["rows"]
    assert (name, ranks, rounds) == ("small", "2", "3")
    cells = dict(zip(table["headers"], table["rows"][0], strict=True))
    assert 0 < float(cells["watch's thread"].split()[0]) < 100

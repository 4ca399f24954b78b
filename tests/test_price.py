"""docs/measure_price.py: what looking out for faults costs while nothing happens."""

import json

import pytest

from docs.measure_price import FREE, WAYS, Taken, row
from tests.scripts import run_module


def test_a_row_holds_the_ratios_of_each_round():
    clock = {FREE: [0.1, 0.2], "watch": [0.1, 0.2], "watch and digests": [0.3, 0.6]}
    processor = {FREE: [0.2, 0.2], "watch": [0.4, 0.4], "watch and digests": [0.8, 0.8]}
    found = row("small", 2, Taken(clock, processor))
    by_clock, by_processor = ["1.000 ± 0.000", "3.000 ± 0.000"], ["2.000 ± 0.000", "4.000 ± 0.000"]
    assert found == ["small", "2", "150.00 ms", *by_clock, *by_processor, "2"]


@pytest.mark.slow
def test_the_command(tmp_path):
    result = tmp_path / "price.json"
    run_module("docs.measure_price", "--models", "small", "--rounds", 3, "--json", result)
    table = json.loads(result.read_text())
    assert set(WAYS) <= set(table["headers"])
    ((name, ranks, *_, rounds),) = table["rows"]
    assert (name, ranks, rounds) == ("small", "2", "3")

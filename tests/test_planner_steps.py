"""What docs/measure_steps.py measures, as the documents show it."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.measure.netns import LinkName
from bench.report.charts import Labels
from docs import planner_steps
from docs.measure_steps import WAYS, scale_on
from docs.planner_steps import Cell, Constants, fitted, network_of
from docs.scatter import scatter_chart

TRUTH = Constants(sending=4e-10, launching=4e-4, handling=1e-5, coding=3e9, reached=0.85)
PROBES = ((1 << 14, 4e-4), (1 << 20, 9e-3))


def made(model, link="1gbit", truth=TRUTH):
    """A cell whose steps are planned ones."""
    network = network_of(link, 2, {size: [seconds] for size, seconds in PROBES})
    cell = Cell(link, 2, model, 1 / 32, PROBES, 0.02, 0.002, {}, network)
    return replace(cell, steps={way: cell.planned(way, truth) for way in WAYS})


def test_constants_are_found_again():
    slower = replace(TRUTH, reached=0.5)
    cells = [made(model, *other) for model in ("wide", "small") for other in ((), ("veth", slower))]
    cells.append(made("conv", truth=Constants(1e-9, coding=1e9, reached=4.0)))
    found = fitted(cells)
    assert found == {"1gbit": TRUTH, "veth": slower}, "what is judged is not fitted to"


def test_ways_are_planned_apart():
    steps = made("wide").steps
    assert len(set(steps.values())) == len(WAYS)
    assert steps["zero=0, int8"] < steps["zero=0"] < steps["zero=3"]
    assert made("wide", link="loopback").compute.update == 0.002


@pytest.fixture
def document(tmp_path, monkeypatch):
    """Measured steps of two links."""
    off = replace(made("conv"), steps={w: s / 1.1 for w, s in made("conv").steps.items()})
    cells = [made("wide"), made("small"), off, *(made(m, "10gbit") for m in ("wide", "conv"))]
    about = {"device": "cpu", "ranks": "2"}
    path = tmp_path / "steps.json"
    names = [name for name in Cell.__dataclass_fields__ if name not in ("network", "_jobs")]
    found = [{name: getattr(cell, name) for name in names} for cell in cells]
    path.write_text(json.dumps({"cells": found, "environment": about, "command": "measure"}))
    monkeypatch.setattr(planner_steps, "MEASURED", path)
    planner_steps.judged.cache_clear()
    yield
    planner_steps.judged.cache_clear()


def test_the_table_and_the_picture_hold_what_was_judged(document):
    steps = planner_steps.judged()
    assert {(s.cell.link, s.cell.model) for s in steps} == {("1gbit", "conv"), ("10gbit", "conv")}
    assert [s.error for s in steps if s.cell.link == "1gbit"] == pytest.approx([0.1] * len(WAYS))
    assert [s.error for s in steps if s.cell.link == "10gbit"] == pytest.approx([0.0] * len(WAYS))
    rows = planner_steps.rows()
    assert [row[0] for row in rows] == ["1gbit", "10gbit", "all"]
    assert rows[0][-1] == "10.0 %, 10 %"
    assert planner_steps.advised()[-1][0] == "within 3 %: 2 of 2"
    assert planner_steps.scatter().count("<circle") == len(steps) + 2  # and the legend's


def test_wrong_advice_is_counted(document):
    path = planner_steps.MEASURED
    found = json.loads(path.read_text())
    for cell in found["cells"]:
        if cell["link"] == "1gbit" and cell["model"] == "conv":
            cell["steps"]["zero=3"] = 0.5 * min(cell["steps"].values())
    path.write_text(json.dumps(found))
    planner_steps.judged.cache_clear()
    rows = planner_steps.advised()
    assert "(+100.0 %)" in rows[0][2] and rows[-1][0] == "within 3 %: 1 of 2"


def test_nothing_is_shown_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_steps, "MEASURED", tmp_path / "none.json")
    planner_steps.judged.cache_clear()
    assert planner_steps.rows() == planner_steps.advised() == [] and planner_steps.scatter() is None
    planner_steps.judged.cache_clear()


def test_what_is_on_the_diagonal_is_drawn_there():
    drawn = scatter_chart(Labels("title", "x", "y"), {"link": [(1.0, 1.0), (100.0, 100.0)]}, 0.15)
    shapes = ElementTree.fromstring(drawn)
    name = "{http://www.w3.org/2000/svg}"
    lines = [p.get("points") for p in shapes.iter(f"{name}polyline")]
    diagonal = [[float(n) for n in place.split(",")] for place in lines[-3].split()]
    (x0, y0), (x1, y1) = diagonal
    for dot in list(shapes.iter(f"{name}circle"))[:2]:
        x, y = float(dot.get("cx")), float(dot.get("cy"))
        assert (y - y0) / (y1 - y0) == pytest.approx((x - x0) / (x1 - x0), abs=0.01)


def test_slower_links_have_smaller_models():
    scales = [scale_on(LinkName(name)) for name in ("loopback", "10gbit", "1gbit", "100mbit")]
    assert scales == [1.0, 1.0, 1 / 4, 1 / 16]

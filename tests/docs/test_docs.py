"""The documents: links resolve, every variable is described, figures are what their sources say."""

import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import fastsync
import fastsync.testing
from bench.report import documents as report
from docs import make_planner
from fastsync import FastDDP
from fastsync.planner.command import _parser
from fastsync.testing import run_ranks
from fastsync.wire.formats import wire_formats

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*report.documents(ROOT), *sorted(ROOT.glob("examples/*.md"))]
# Before a test registers one of its own.
FORMATS = wire_formats()
VARIABLE = re.compile(r"FASTSYNC_[A-Z_]+")
# Markdown's [text](target) and ![text](target); HTML's src and href.
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
PATH = re.compile(r"`((?:fastsync|csrc|tests|bench|examples|docs|\.ci)/[\w./-]*)`")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors(path):
    """The names by which GitHub lets one link to a document's headings."""
    headings = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(path):
    for match in LINK.finditer(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        yield match[1] or match[2]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_resolve(path):
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(file), (
            f"{path.name} links to {link}: no such heading"
        )


def test_every_document_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        reached.add(path)
        targets = ((path.parent / link.partition("#")[0]).resolve() for link in links(path))
        waiting += [t for t in targets if t.suffix == ".md" and t.exists() and t not in reached]
    assert set(DOCUMENTS) <= reached


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_summary_is_made_of_the_results():
    summary = report.figures("summary")
    rows = [line for line in summary.splitlines() if line.startswith("| ")][2:]
    results = {
        name: json.loads((report.RESULTS / f"{name}.json").read_text())
        for name in ("step-real", "ops")
    }
    step = results["step-real"]["models"]["gpt2"]["variants"]
    assert len(rows) == 5
    assert f"{1e3 * step['ddp']['step']['median']:.0f} ms" in rows[0]
    assert f"{step['fastsync']['ratio']['median']:.2f}x" in rows[0]
    operators = {row[0]: int(row[1]) for row in results["ops"]["rows"]}
    assert str(operators["ddp"] - operators["no_sync"]) in rows[3]
    assert report.figures("summary", ROOT / "nowhere") == report.NOT_MEASURED
    assert summary.count("torch ") == 1, "the rows come from several machines"


# Where a document lists the wire formats, as rows of a table under a heading or in a row.
LISTS_OF_WIRES = {
    "docs/wire.md": "Formats",
    "docs/tuning.md": "Which wire format?",
}


@pytest.mark.parametrize("name", LISTS_OF_WIRES)
def test_every_wire_format_is_listed(name):
    text = (ROOT / name).read_text().split(f"\n## {LISTS_OF_WIRES[name]}\n")[1].split("\n## ")[0]
    first_cells = " ".join(re.findall(r"^\| ([^|]+)", text, re.M))
    listed = set(re.findall(r"`\"?(\w+)\"?`", first_cells))
    missing = set(FORMATS) - listed
    assert not missing, f"{name} lacks {missing}"


@pytest.mark.parametrize("name", ["docs/api.md"])
def test_every_wire_format_is_named(name):
    """A paragraph or a row that lists values of `wire=` lists all of them."""
    paragraphs = re.split(r"\n\n|\n\| ", (ROOT / name).read_text())
    of_wires = [p for p in paragraphs if "fp8_e4m3" in p]
    assert of_wires
    for paragraph in of_wires:
        assert {n for n in FORMATS if n in re.findall(r"\w+", paragraph)} == set(FORMATS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_named_files_exist(path):
    for name in PATH.findall(path.read_text()):
        assert (ROOT / name).exists(), f"{path.name} names {name}, which is not there"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_exist(path):
    """Modules after `python -m`, and targets after `make` where it begins a piece of code."""
    text = path.read_text()
    for module in re.findall(r"-m ((?:bench|docs|examples|fastsync|tests)[\w.]*)", text):
        assert importlib.util.find_spec(module.rstrip(".")), f"{path.name} runs {module}"
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
    known = {target for line in targets for target in line.split()}
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M):
        assert target in known, f"{path.name} says `make {target}`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_names_of_the_package_exist(path):
    """Each name that a page calls fastsync.something can be imported from there."""
    for name in set(
        re.findall(r"\bfastsync(?:\.[A-Za-z_]\w*)+", path.read_text().replace("\\", ""))
    ):
        *parents, last = name.split(".")
        if last in ("sh", "py", "json", "html"):
            continue
        module = importlib.import_module(".".join(parents))
        if not hasattr(module, last):
            assert importlib.util.find_spec(name), name  # not imported: fastsync.mpi starts MPI


def test_every_variable_is_documented():
    """docs/api.md has a row for each variable of env.py and .ci/run, and no other."""
    described = set(re.findall(r"^\| `(\w+)", (ROOT / "docs/api.md").read_text(), re.M))
    sources = [ROOT / "fastsync/_build/env.py", ROOT / ".ci/run"]
    read = {name for source in sources for name in VARIABLE.findall(source.read_text())}
    assert {name for name in described if name.startswith("FASTSYNC_")} == read


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents_name_existing_variables(path):
    sources = [*ROOT.glob("fastsync/**/*.py"), *ROOT.glob("csrc/**/*.*"), ROOT / "CMakeLists.txt"]
    known = {n for s in [*sources, ROOT / ".ci/run"] for n in VARIABLE.findall(s.read_text())}
    assert set(VARIABLE.findall(path.read_text())) <= known


def test_figures_are_what_the_script_draws():
    subprocess.run([sys.executable, str(ROOT / "docs/make_figures.py"), "--check"], check=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_measurements_are_what_the_results_say(path):
    text = path.read_text()
    assert report.filled(text) == text, "run: python -m bench report"
    assert len(report.MARKED.findall(text)) == text.count("<!-- bench:")


def test_charts_are_what_the_results_say():
    for path, wanted in report.renewed().items():
        assert path.exists() and path.read_text() == wanted, "run: python -m bench report"


def test_report_fills_a_table(tmp_path):
    spread = {"median": 0.5, "q1": 0.4, "q3": 0.6}
    timing = {"step": {"median": 0.02, "q1": 0.019, "q3": 0.021}, "ratio": spread}
    few, more = timing | {"rounds": [0.02] * 3}, timing | {"rounds": [0.02] * 5}
    facts = {"gpu": None, "cpu": "a cpu", "cores": 2, "memory_gib": 8.0, "ranks": 2}
    facts |= {"transport": "Gloo", "threads_per_rank": 1, "torch": "2", "python": "3"}
    result = {
        "kind": "step",
        "command": "python -m bench step",
        "environment": facts | {"commit": "abc"},
        "settings": {"baseline": "ddp", "rounds": 9},
        "models": {
            "small": {
                "tensors": 4,
                "gradient_bytes": 2_000_000,
                "variants": {"ddp": few, "fastsync": more},
            }
        },
    }
    (tmp_path / "step.json").write_text(report.json.dumps(result))
    text = "a\n<!-- bench:step -->\nold\n<!-- /bench:step -->\nb\n"
    filled = report.filled(text, tmp_path)
    rows = [" ".join(line.split()) for line in filled.splitlines()]
    assert "| `ddp` | 20.0 ± 1.0 ms |" in rows and "| `fastsync` | 0.50 ± 0.10 |" in rows
    assert "old" not in filled and "median of 3 to 5 rounds" in filled
    assert report.filled(filled, tmp_path) == filled
    assert report.NOT_MEASURED in report.filled(text, tmp_path / "nowhere")


def table_rows(heading, page="docs/drop-in.md"):
    """First and last cells of the tables under a heading of a page."""
    text = (ROOT / page).read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and not cells[-1].startswith("test"):
            yield cells[0], cells[-1]


def test_every_argument_and_method_of_ddp_has_a_row():
    described = {name for first, _ in table_rows("Arguments") for name in re.findall(r"\w+", first)}
    arguments = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"}
    assert arguments <= described <= set(inspect.signature(FastDDP.__init__).parameters)
    rows = [first for first, _ in table_rows("Methods and properties")]
    described = {name for row in rows for name in re.findall(r"\w+", row)}
    assert {name for name in vars(DistributedDataParallel) if not name.startswith("_")} <= described


def test_every_row_names_tests_that_exist():
    named = r"`(test_\w+)::(test_\w+)`"
    headings = ["Arguments", "Methods and properties", "Communication hooks of torch", "Behaviour"]
    tables = [table_rows(heading) for heading in [*headings, "torch.compile", "Libraries"]]
    for rows in map(list, [*tables, table_rows("What a script may do", "docs/zero.md")]):
        assert rows
        for first, last in rows:
            assert re.findall(named, last), f"the row of {first} names no test"
    text = "".join((ROOT / page).read_text() for page in ("docs/drop-in.md", "docs/zero.md"))
    for file, test in re.findall(named, text):
        sources = ROOT.glob(f"tests/**/{file}.py")
        assert any(f"def {test}(" in s.read_text() for s in sources), f"{file}::{test}"


def quoted_errors():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    for cell in re.findall(r"^\| (\".+?) \| ", text, re.MULTILINE):
        yield from re.findall(r'"([^"]+)"', cell)


def test_quoted_errors_exist():
    """Each text in docs/troubleshooting.md is in the sources, where `…` stands for anything."""
    sources = [*ROOT.glob("fastsync/**/*.py"), *ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/*.h")]
    code = "".join(source.read_text() for source in sources)
    code = re.sub(r'"\s+f?"', "", code)  # adjacent literals are one text
    parts = {part.strip(" ,:") for error in quoted_errors() for part in error.split("…")}
    assert len(parts) > 50
    assert not [part for part in parts if part not in code], "no error says so"


# --- docs/api.md says what the code says: names, arguments, defaults, counters


PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()


def section(heading):
    """The text below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/api.md has no heading {heading!r}"
    return found[1]


def rows(heading):
    return [
        [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        for line in section(heading).splitlines()
        if line.startswith("| `")
    ]


def parameters(function):
    """Return the parameters that a caller may name; FastDDP accepts others only to report them."""
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD]


def documented(function, name):
    """Whether a heading shows a function's parameters in their order."""
    shown = [f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters(function)]
    return f"### `{name}({', '.join(shown)})`\n" in PAGE


def test_arguments_and_defaults():
    wanted = [
        [p.name, "required" if p.default is p.empty else repr(p.default)]
        for p in parameters(fastsync.FastDDP.__init__)
        if p.kind is not p.VAR_KEYWORD  # which takes former arguments, for their error
    ]
    assert [row[:2] for row in rows("Arguments")] == wanted
    assert all(len(row) == 3 and row[2] for row in rows("Arguments"))


def another_value(name, group):
    """A layer, and an argument with another value than its default, where there is one."""
    layer = torch.nn.Linear(2, 2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    delayed = layer.bias
    values = {
        "module": {},
        "device_ids": {"device_ids": []},
        "output_device": {"output_device": None},
        "dim": {"dim": 1},
        "process_group": {"process_group": group},
        "bucket_cap_mb": {"bucket_cap_mb": 1},
        "mixed_precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        "device_mesh": {"device_mesh": mesh},
        "bucket_cap_mb_list": {"bucket_cap_mb_list": [1, 2]},
        "delay_all_reduce_named_params": {
            "delay_all_reduce_named_params": [("bias", delayed)],
            "param_to_hook_all_reduce": layer.weight,
        },
        "timeline": {"timeline": True},
        "zero": {"zero": 1},
        "sync": {"sync": fastsync.LocalSGD(2)},
        "groups": {"groups": {"weight": fastsync.Group(group)}},
        "faults": {"faults": fastsync.Faults(nonfinite="raise", on_preemption=lambda: None)},
    }
    values["param_to_hook_all_reduce"] = values["delay_all_reduce_named_params"]
    flag = inspect.signature(fastsync.FastDDP.__init__).parameters[name].default
    return layer, values.get(name, {name: not flag})


def trained(layer, arguments):
    model = fastsync.FastDDP(layer, **arguments)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def accepted(rank, world, names, wires):
    group = torch.distributed.new_group()
    arguments = {name: trained(*another_value(name, group)) for name in names}
    return arguments | {wire: trained(torch.nn.Linear(2, 2), {"wire": wire}) for wire in wires}


def test_what_is_described_is_accepted():
    """Every argument, with another value than its default, and every wire format."""
    described = {row[0]: row[2] for row in rows("Arguments")}
    assert not [name for name, meaning in described.items() if "not supported" in meaning]
    formats = next(row[2] for row in rows("fastsync.Wire") if row[0] == "format")
    assert set(wire_formats()) <= set(re.findall(r"\w+", formats))
    names = [name for name in described if name != "wire"]
    trained_with = run_ranks(accepted, 1, names, wire_formats())[0]
    assert trained_with == dict.fromkeys([*names, *wire_formats()], True)


def test_methods_of_its_own():
    public = {n: f for n, f in vars(fastsync.FastDDP).items() if not n.startswith("_")}
    own = {n: f for n, f in public.items() if inspect.isfunction(f)}
    assert own
    for name, method in own.items():
        assert documented(method, name), f"docs/api.md lacks {name}{inspect.signature(method)}"


def plain_name(name):
    return name.replace("_", r"\_")


@pytest.mark.parametrize("name", fastsync.__all__)
def test_public_names(name):
    section(f"fastsync.{plain_name(name)}")


@pytest.mark.parametrize("name", fastsync.testing.__all__)
def test_names_for_tests(name):
    value = getattr(fastsync.testing, name)
    if inspect.isclass(value):
        section(name)
    else:
        assert documented(value, name), f"docs/api.md lacks {name}{inspect.signature(value)}"


def counters(rank, world):
    model = fastsync.FastDDP(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return list(model.sync_stats())


def test_counters():
    described = [row[0] for row in rows("`sync_stats(one_rank_step)`")]
    assert sorted(described) == sorted(run_ranks(counters, 1)[0])


# --- docs/planner.md: its tables are those that docs/make_planner.py makes, and its commands parse


PLANNER = (Path(__file__).parents[2] / "docs/planner.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", make_planner.TABLES)
def test_tables_are_those_that_are_made(name):
    found = re.search(rf"<!-- planner:{name} -->\n(.*?)\n<!-- /planner:{name} -->", PLANNER, re.S)
    assert found, f"docs/planner.md has no table {name}"
    assert found[1] == make_planner.TABLES[name]()


def test_commands_of_the_page_are_understood():
    block = re.search(r"```sh\n(.*?)```", PLANNER, re.S)[1]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert commands
    for words in commands:
        _parser().parse_args(words[words.index("fastsync.plan") + 1 :])


def test_options_of_the_page_exist():
    options = set(re.findall(r"--[a-z][a-z-]+", _parser().format_help()))
    shown = set(re.findall(r"--[a-z][a-z-]+", PLANNER))
    assert shown - options <= {"--help"}

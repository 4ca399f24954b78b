"""Codecs of users: the worked example in both languages, and libraries that are no good."""

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

import fastsync
from examples.custom_codec import SignCodec, compile_plugin, train
from fastsync import FastDDP, Wire, load_codec
from fastsync.testing import run_ranks
from fastsync.wire.formats import make_codec
from tests.helpers.scripts import run_module
from tests.wire.test_wire import constant_gradients, flat_grads, inputs, model, residual_mass

ROOT = Path(__file__).parents[2]
TABLE = """
#include <codec_plugin.h>
static int64_t size(void*, int64_t numel) { return 4 * numel; }
static const char* fail(void*, float*, int64_t, uint8_t*, int64_t) { return "no ink left"; }
static const char* none(void*, const uint8_t*, int64_t, float*, int64_t) { return nullptr; }
const fastsync_codec* FASTSYNC_CODEC_ENTRY(void) {
  static const fastsync_codec table = {%s};
  return &table;
}
"""
FAILING = 'FASTSYNC_CODEC_VERSION, FASTSYNC_GATHER, 0, 0, 16, "pen", nullptr, size, fail, none'


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return str(compile_plugin(tmp_path_factory.mktemp("plugin")))


def compiled(folder, text):
    source, target = folder / "codec.cpp", folder / "libcodec.so"
    source.write_text(text)
    include = ["-I", str(fastsync.include_dir())]
    subprocess.run(["c++", "-shared", "-fPIC", *include, source, "-o", target], check=True)
    return target


def coded(codec, values):
    wire = torch.zeros(codec.coded_bytes(values.numel()), dtype=torch.uint8)
    found = torch.empty_like(values)
    codec.encode(values.clone(), wire)
    codec.decode(wire, found)
    return found


def test_both_languages_code_alike(library):
    values = torch.randn(640)
    found = coded(load_codec(library), values)
    scales = values.view(-1, 64).abs().mean(1, keepdim=True)
    wanted = (torch.where(values.view(-1, 64) >= 0, 1.0, -1.0) * scales).view(-1)
    assert torch.allclose(found, wanted)
    assert torch.allclose(coded(SignCodec(), values), wanted)


@pytest.mark.slow
def test_the_example_trains_in_both_languages(library):
    """An eighth of a byte and a sixteenth: 1.5 bits per element instead of 32."""
    results = {
        wire: run_ranks(train, 2, wire, library, 120)[0] for wire in ("fp32", "signs", "signs-cpp")
    }
    first, last = results["fp32"][0][0], results["fp32"][0][-1]
    assert last < first / 2
    for wire in ("signs", "signs-cpp"):
        losses, sent = results[wire]
        assert losses[-1] < first / 2
        assert 15 < results["fp32"][1] / sent < 32 / 1.5
    assert results["signs"][0] == pytest.approx(results["signs-cpp"][0], rel=1e-2)


def off_of_constant(rank, world, library, feedback):
    wire = Wire(load_codec(library), error_feedback=feedback)
    return constant_gradients(rank, world, wire, 60)


def test_error_feedback_comes_for_free(library):
    off = [run_ranks(off_of_constant, 2, library, feedback)[0] for feedback in (False, None)]
    assert off[0] < 1
    assert off[1] < off[0] / 3


def owed(rank, world, library):
    return residual_mass(rank, world, load_codec(library))


def test_the_residuals_are_what_the_averages_lack(library):
    for off, _ in run_ranks(owed, 3, library):
        assert off < 1e-4


def mixed(rank, world, library):
    """Return the codec of each bucket, and whether NaN arrives."""
    wire = Wire(load_codec(library), overrides={"*.bias": "fp32", "2.*": SignCodec()})
    wrapped = FastDDP(model(), wire=wire)
    wrapped.module[0].weight.register_hook(lambda g: g * math.nan)
    wrapped(inputs(0, rank)).square().mean().backward()
    finite = flat_grads(wrapped).isfinite().all().item()
    names = [b.coded.codec.name if b.coded else "fp32" for b in wrapped._engine.plan.buckets]
    return sorted(names), finite, wire.describe()


def test_overrides_name_codecs_too(library):
    for names, finite, text in run_ranks(mixed, 2, library):
        assert names == ["fp32", "signs", "signs-cpp"]
        assert not finite
        assert text == "signs-cpp, overrides={'*.bias': 'fp32', '2.*': 'signs'}"


def fails(rank, world, path):
    wrapped = FastDDP(model(), wire=load_codec(path))
    with pytest.raises(RuntimeError, match=r"rank \d.*pen failed to encode: no ink left"):
        wrapped(inputs(0, rank)).sum().backward()


def test_an_error_in_the_library_names_rank_and_codec(tmp_path):
    path = compiled(tmp_path, TABLE % FAILING)
    run_ranks(fails, 2, str(path))
    with pytest.raises(RuntimeError, match="pen failed to encode: no ink left"):
        coded(load_codec(path), torch.ones(16))


@pytest.mark.slow(but=("size, fail-nullptr, nullptr-lacks coded_bytes, encode",))
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("FASTSYNC_CODEC_VERSION", "99", "version 99 of fastsync's codec table"),
        ("FASTSYNC_GATHER", "7", "unknown form 7"),
        (", 16,", ", 0,", "a block of 0"),
        ("size, fail", "nullptr, nullptr", "lacks coded_bytes, encode"),
        ('"pen"', "nullptr", "lacks name"),
        ("FASTSYNC_GATHER, 0, 0", "FASTSYNC_TWO_SHOT, 0, 1", "form must be gather"),
    ],
)
def test_tables_that_make_no_sense_are_refused(tmp_path, old, new, text):
    path = compiled(tmp_path, TABLE % FAILING.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(text)):
        load_codec(path)


def test_what_is_no_library_is_refused(tmp_path):
    with pytest.raises(OSError, match="no codec library at"):
        load_codec(tmp_path / "nowhere.so")
    (tmp_path / "text.so").write_text("hello")
    with pytest.raises(OSError, match=r"text\.so"):
        load_codec(tmp_path / "text.so")
    with pytest.raises(ValueError, match=r"exports no fastsync_codec_entry\(\)"):
        load_codec(compiled(tmp_path, "int nothing;"))


def test_tensors_elsewhere_or_of_other_types_are_refused(library):
    codec = load_codec(library)
    with pytest.raises(ValueError, match="on the CPU"):
        codec.decode(torch.empty(96, dtype=torch.uint8), torch.empty(512, device="meta"))
    with pytest.raises(ValueError, match="fp32 and uint8"):
        codec.encode(torch.ones(64, dtype=torch.float64), torch.empty(12, dtype=torch.uint8))


def test_the_device_is_checked_before_training(library):
    """No rank and no GPU needed: the check asks only where parameters are."""
    from fastsync.ddp.request import Request

    request = Request(torch.nn.Linear(4, 4, device="meta"), None, None, None, None)
    with pytest.raises(ValueError, match=r"'weight' is on meta, but signs-cpp .* CPU only"):
        request._check_wire(Wire(load_codec(library)))


def test_a_registered_library_is_loaded_once(library):
    loaded = []
    fastsync.register_codec("signs-once", lambda: loaded.append(1) or load_codec(library))
    assert make_codec("signs-once") is make_codec("signs-once")
    assert loaded == [1]


@pytest.mark.slow
def test_the_example_runs_as_a_command():
    assert "signs-cpp: " in run_module("examples.custom_codec", "--cpp")
    assert "loss" in run_module("examples.custom_codec", "--steps", 2, code=1)


BLOCK = re.compile(r"<!-- from (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


def test_the_document_shows_what_runs():
    text = (ROOT / "docs/wire.md").read_text()
    shown = BLOCK.findall(text)
    assert {name for name, _ in shown} == {"examples/custom_codec.py"}
    for name, code in shown:
        assert code in (ROOT / name).read_text()

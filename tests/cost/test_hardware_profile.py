"""Hardware profiles: the named ones, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pipegraph.cost.hardware import Hardware, Link, known_peak
from pipegraph.errors import PipegraphError
from pipegraph.package.prediction import MeasuredRatio
from pipegraph.report.text.package_tables import render_hardware
from tests.messages import refused

NAMES = ("a100", "b200", "cpu", "h100", "h200", "mi300x")
PLAIN = {"schema_version", "name", "device", "sources"}


def profile(**changes: Any) -> str:
    """The H100's, with top-level figures changed; None leaves one out."""
    contents = Hardware.load("h100").to_dict() | changes
    return json.dumps({name: value for name, value in contents.items() if value is not None})


def figures(tree: Any, *place: str) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, dict) and "axes" not in tree:
        for name, value in tree.items():
            yield from figures(value, *place, name)
    elif not isinstance(tree, str):
        yield place


def test_names() -> None:
    assert Hardware.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_named_profile_is_whole(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.name == name
    assert Hardware.from_json(hardware.to_json()) == hardware


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    contents = Hardware.load(name).to_dict()
    for place in figures({key: value for key, value in contents.items() if key not in PLAIN}):
        groups = {".".join(place[:end]) for end in range(1, len(place) + 1)}
        assert groups & set(contents["sources"]) or place == ("kernel_overhead",), place


def test_every_source_is_of_a_figure() -> None:
    for name in NAMES:
        contents = Hardware.load(name).to_dict()
        for place in contents["sources"]:
            value: Any = contents
            for key in place.split("."):
                value = value[key]


def test_no_device_attains_more_than_its_peak() -> None:
    for name in NAMES:
        hardware = Hardware.load(name)
        for kind, by_dtype in hardware.attained_flops.items():
            for dtype in by_dtype:
                sizes = dict.fromkeys(("m", "n", "k", "length", "head_dim"), 4096.0)
                rate = hardware.flops_per_second(kind, dtype, **sizes, flops=1e12, footprint=1e6)
                assert 0 < rate <= hardware.peak_flops.get(dtype, max(hardware.peak_flops.values()))


def test_larger_products_are_faster_on_a_gpu() -> None:
    h100 = Hardware.load("h100")
    rates = [h100.flops_per_second("matmul", "bfloat16", flops=flops) for flops in (1e7, 1e9, 1e11, 1e13)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(794.5e12, rel=0.01)


def test_a_kind_without_figures_is_a_product_of_matrices() -> None:
    h100 = Hardware.load("h100")
    sizes = {"flops": 1e12}
    assert h100.flops_per_second("convolution", "float16", **sizes) == h100.flops_per_second(
        "matmul", "float16", **sizes
    )


def test_links_within_and_between_nodes() -> None:
    h100 = Hardware.load("h100")
    assert h100.link(0, 7) == Link(10e-6, 370e9, "NVLink 4")
    assert h100.link(7, 8) == Link(20e-6, 50e9, "InfiniBand NDR")
    assert h100.link(7, 8).seconds(50e9) == pytest.approx(1 + 20e-6)


def test_a_measured_table_goes_before_the_usual_link() -> None:
    links = Hardware.load("h100").to_dict()["links"]
    table = {"name": "gloo", "latency": [[None, 1e-5], [2e-5, None]], "bandwidth": [[None, 1e9], [2e9, None]]}
    hardware = Hardware.from_json(profile(links=links | {"measured": table}))
    assert hardware.link(1, 0) == Link(2e-5, 2e9, "gloo")
    assert hardware.link(1, 2) == hardware.links.intra_node


def test_a_collective_is_that_of_a_ring_unless_it_was_measured() -> None:
    link = Link(1e-5, 1e9)
    assert (
        link.collective_seconds("gather", 4e9, 4)
        == link.collective_seconds("reduce", 4e9, 4)
        == pytest.approx(3 * (1e-5 + 1))
    )
    assert link.collective_seconds("all_reduce", 4e9, 4) == pytest.approx(6 * (1e-5 + 1))
    assert link.collective_seconds("gather", 4e9, 1) == 0
    table = {"axes": {"ranks": [2, 8], "bytes": [1e3, 1e6]}, "values": [[1e6, 1e9], [1e6, 1e8]]}
    ends = {"intra_node": LINKS["intra_node"] | {"gather": table, "reduce": 2e9}, "inter_node": LINKS["inter_node"]}
    measured = Hardware.from_json(profile(links=LINKS | ends))
    assert Hardware.from_json(measured.to_json()) == measured
    inside, across = measured.links.among((0, 1)), measured.links.among((0, 8))
    assert inside.collective_seconds("gather", 1e9, 2) == pytest.approx(1.0)  # beyond the table at the last rate
    assert inside.collective_seconds("gather", 1e6, 8) == pytest.approx(1e-2)
    assert inside.collective_seconds("reduce", 4e9, 8) == pytest.approx(2.0)
    assert across == measured.links.inter_node and across.gather is None
    assert "gather in a node" in render_hardware(measured)


def test_an_unknown_name() -> None:
    with refused(PipegraphError, '"h10"', '"h100"', ", ".join(NAMES), "JSON", advice="pipegraph calibrate"):
        Hardware.load("h10")


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    with refused(PipegraphError, "no hardware profile", "mine.json", advice="pipegraph calibrate"):
        Hardware.load(file)
    with refused(PipegraphError, str(tmp_path), "folder", advice="pipegraph calibrate"):
        Hardware.load(tmp_path)
    file.write_text(profile(name="mine"))
    with refused(PipegraphError, "mime.json", f'"{tmp_path / "mine.json"}"', advice="pipegraph calibrate"):
        Hardware.load(tmp_path / "mime.json")
    assert Hardware.load(file).name == "mine"
    file.write_bytes(b"\xff\xfe\x00")
    with refused(PipegraphError, "mine.json", "not JSON", advice="pipegraph calibrate"):
        Hardware.load(str(file))


def test_a_ratio_is_kept_and_told() -> None:
    h100 = Hardware.load("h100")
    assert "measured_ratio" not in h100.to_dict()
    corrected = replace(h100, measured_ratio=MeasuredRatio(1.25, 0.9, 1.0))
    assert Hardware.from_json(corrected.to_json()) == corrected
    lines = {" ".join(line.split()) for line in render_hardware(corrected).splitlines()}
    assert "measured ÷ predicted F 1.25, I 0.9, W 1" in lines
    assert "measured ÷ predicted" not in render_hardware(h100)


LINKS = Hardware.load("h100").to_dict()["links"]


def matmul(attained: Any) -> dict[str, Any]:
    return {"matmul": {"any": attained}}


OVER_M = {"links": LINKS | {"intra_node": LINKS["intra_node"] | {"gather": {"axes": {"m": [1]}, "values": [1]}}}}
OVER_Q = {"attained_flops": matmul({"axes": {"q": [1]}, "values": [1]})}
TOO_FEW = {"attained_flops": matmul({"axes": {"m": [1, 2]}, "values": [1]})}
RATIOS = ("forward", "input_grad", "weight_grad")


@pytest.mark.parametrize(
    ("changes", "place", "parts"),
    [
        ({"memory_bandwidth": None}, "", ["lacks memory_bandwidth"]),
        ({"memory_bandwidth": -1}, "memory_bandwidth: ", ["-1", "1e+06"]),
        ({"memory_bandwidth": "fast"}, "memory_bandwidth: ", ['"fast"', "a number"]),
        ({"memory_bandwith": 1e9}, "", ['"memory_bandwith"', '"memory_bandwidth"']),
        ({"kernel_floor": 7}, "kernel_floor: ", ["7", "0.1"]),
        ({"peak_flops": {}}, "peak_flops: ", ["1 or more entries"]),
        ({"peak_flops": {"float23": 1e12}}, "peak_flops: ", ['"float23"', "float64, float32"]),
        ({"peak_flops": {"float32": True}}, "peak_flops.float32: ", ["true", "a number"]),
        ({"links": LINKS | {"intra_node": {"name": "x", "latency": 0}}}, "links.intra_node: ", ["lacks bandwidth"]),
        ({"links": LINKS | {"inter_nod": 1}}, "links: ", ['"inter_nod"', '"inter_node"']),
        ({"attained_flops": matmul(1.5)}, "attained_flops.matmul.any: ", ["1.5", "1 or less"]),
        (OVER_M, "links.intra_node.gather.axes: ", ['"m"']),
        (OVER_Q, "attained_flops.matmul.any.axes: ", ['"q"']),
        (TOO_FEW, "attained_flops.matmul.any.values: ", ["1 entries", "2 sizes along m"]),
        ({"measured_ratio": {"forward": 1.1}}, "measured_ratio: ", ["lacks input_grad"]),
        ({"measured_ratio": dict.fromkeys(RATIOS, 0)}, "measured_ratio.forward: ", ["0", "0.01"]),
        ({"schema_version": 2}, "schema_version: ", ["2", "1 to 1"]),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], place: str, parts: list[str]) -> None:
    with refused(PipegraphError, f"here: {place}", *parts, advice="pipegraph calibrate"):
        Hardware.from_json(profile(**changes), where="here")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "not JSON"), ("[]", "a list"), (profile(memory_bandwidth=float("nan")), "not JSON")],
)
def test_what_is_no_profile(text: str, problem: str) -> None:
    with refused(PipegraphError, "here: ", problem, advice="pipegraph calibrate"):
        Hardware.from_json(text, where="here")


@pytest.mark.parametrize(
    ("latency", "parts"),
    [
        ([[None, 1e-5, 1e-5], [1e-5, None, 1e-5]], ["links.measured.latency:", "3 figures for rank 0", "2 rows"]),
        ([[None, None], [1e-5, None]], ["links.measured.latency[0][1]", "None"]),
        ([[1e-5, 1e-5], [1e-5, None]], ["links.measured.latency[0][0]", "1e-05", "null"]),
    ],
)
def test_a_table_of_links_with_holes(latency: Any, parts: list[str]) -> None:
    table = {"name": "", "latency": latency, "bandwidth": [[None, 1e9], [1e9, None]]}
    with refused(PipegraphError, *parts, advice="pipegraph calibrate"):
        Hardware.from_json(profile(links=LINKS | {"measured": table}))


def test_a_profile_of_ones_own_is_not_called_as_one_of_pipegraphs(tmp_path: Path) -> None:
    file, h100 = tmp_path / "mine.json", Hardware.load("h100")
    file.write_text(replace(h100, measured_ratio=MeasuredRatio(2.0, 2.0, 2.0)).to_json())
    assert Hardware.load(file).figures == h100.figures
    file.write_text(replace(h100, memory_bandwidth=1e12).to_json())
    with refused(PipegraphError, "mine.json", '"h100"', advice='"h100-here"'):
        Hardware.load(file)


def test_the_peak_of_a_device_by_the_name_that_torch_has() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", "bfloat16") == Hardware.load("h100").peak_flops["bfloat16"]
    assert known_peak("NVIDIA A100-SXM4-80GB", "tfloat32") == Hardware.load("a100").peak_flops["tfloat32"]
    assert known_peak("AMD Instinct MI300X", "float32") == Hardware.load("mi300x").peak_flops["float32"]
    assert known_peak("AMD EPYC 9554 64-Core CPU", "float32") is None
    assert known_peak("NVIDIA H100 80GB HBM3", "complex64") is None

"""The command: `python -m benchmarks.step`."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ONLY_HELP = "Only contenders whose name contains this; may be given several times."
CUTS_HELP = "Take the cuts from a file that --json wrote, and try no others."


def main(
    vocabulary: int = 16384,
    microbatches: int = 8,
    rounds: int = 8,
    kernels: Annotated[str, typer.Option(help="of pipegraph's pipelines")] = "inductor",
    tries: Annotated[int, typer.Option(help="how many cuts between layers are tried for each contender")] = 3,
    only: Annotated[list[str] | None, typer.Option(help=ONLY_HELP)] = None,
    cuts: Annotated[Path | None, typer.Option(help=CUTS_HELP)] = None,
    cores: Annotated[str, typer.Option(help="for the two processes, such as 2,3; by default the idlest")] = "",
    as_json: Annotated[Path | None, typer.Option("--json", help="Write everything that was measured here.")] = None,
) -> None:
    """Compare steps of two processes with one thread each; ratios are taken within a round; the table shows medians."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    from torch import multiprocessing

    from benchmarks.step.model import StepSetting
    from benchmarks.step.rank import Options
    from benchmarks.step.rank import main as run_rank

    setting = StepSetting(vocabulary, microbatches)
    known = {name: tuple(found) for name, found in json.loads(cuts.read_text())["cuts"].items()} if cuts else {}
    core_numbers = tuple(map(int, cores.split(","))) if cores else _idlest_cores(2)
    with tempfile.TemporaryDirectory(prefix="pipegraph-step-") as folder, socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        server.close()
        options = Options(setting, kernels, rounds, tries, tuple(only or ()), known, core_numbers, Path(folder))
        results = multiprocessing.get_context("spawn").SimpleQueue()
        processes = multiprocessing.start_processes(run_rank, (options, port, results), nprocs=2, join=False)
        while results.empty():
            processes.join(timeout=1)
        measured: dict[str, Any] = results.get()
        while not processes.join():
            pass
    document = {"schema_version": 1, "setting": asdict(setting), "kernels": kernels, **measured, **_figures(measured)}
    if as_json:
        as_json.write_text(json.dumps(document, indent=2) + "\n")
    _show(document)


def _figures(measured: dict[str, Any]) -> dict[str, Any]:
    """Return medians over rounds: seconds, ÷ limit, and torch's best ÷ each contender, for even and for best cuts."""
    rounds = measured["rounds"]
    names = list(measured["cuts"])
    seconds = {name: median(taken[name] for taken in rounds) for name in names}
    ratios = {name: [taken[name] / taken[f"limit of {name}"] for taken in rounds] for name in names}
    over_limit = {name: median(found) for name, found in ratios.items()}
    against = {}
    for split in ("even", "best"):
        peers = [name for name in names if name.startswith("torch") and f"{split} cut" in name]
        if peers:
            best = min(peers, key=over_limit.__getitem__)
            gains = {
                name: median(peer / own for peer, own in zip(ratios[best], ratios[name], strict=True)) for name in names
            }
            against[split] = {"contender": best, "over": gains}
    return {"seconds": seconds, "over_limit": over_limit, "against": against}


def _show(document: dict[str, Any]) -> None:
    setting, against = document["setting"], document["against"]
    title = f"vocabulary {setting['vocabulary']}, {setting['microbatches']} microbatches of {setting['rows']}"
    columns = "contender", "cut at", "seconds", "÷ limit", *(f"{split} ÷ this" for split in against)
    table = Table(*columns, title=title)
    for name, ratio in sorted(document["over_limit"].items(), key=lambda item: item[1]):
        cut = ", ".join(f"{unit / 2:g}" for unit in document["cuts"][name])
        gains = (f"{found['over'][name]:.3f}" for found in against.values())
        table.add_row(name, cut, f"{document['seconds'][name]:.3f}", f"{ratio:.3f}", *gains)
    console = Console(width=120)
    console.print(table)
    for split, found in against.items():
        console.print(f"{split}: {found['contender']} is torch's fastest")
    console.print("A cut at 5.5 lies between attention and MLP of layer 5.")
    if document["accounts"]:
        parts = next(iter(document["accounts"].values()))
        table = Table("pipegraph", *parts, title="time beyond the limit, as parts of it")
        for name, found in document["accounts"].items():
            table.add_row(name, *(f"{part:+.3f}" for part in found.values()))
        console.print(table)
    spread = max(document["losses"].values()) - min(document["losses"].values())
    console.print(f"losses differ by {spread:.1e}")
    imbalance = median(taken["core imbalance"] for taken in document["rounds"])
    console.print(f"for the same work the slower core took {imbalance:.1%} more than the mean of both")


def _idlest_cores(count: int) -> tuple[int, ...]:
    """Return the idlest cores of the last second, of those that this process may use."""

    def idle() -> dict[int, int]:
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        return {int(words[0][3:]): int(words[4]) for words in lines if words[0][:3] == "cpu" and words[0] != "cpu"}

    allowed = os.sched_getaffinity(0)
    before = idle()
    time.sleep(1)
    after = idle()
    return tuple(sorted(allowed, key=lambda core: before[core] - after[core])[:count])


if __name__ == "__main__":
    typer.run(main)

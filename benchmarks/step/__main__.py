"""The command: `python -m benchmarks.step`."""

from __future__ import annotations

import datetime
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

CASES_HELP = "llama or unet"
VOCABULARY_HELP = "of the Llama"
CORES_HELP = "for the processes, such as 2,3; by default the idlest"
EACH_HELP = "On how many cores each process runs: on more than one, transfers run while its one thread computes."
TRIES_HELP = "how many cuts between layers are tried for each contender; for pipegraph the same number inside layers"
FIND_HELP = "Find the cuts again, not those of the run that is kept."
ONLY_HELP = "Only contenders whose name contains this; may be given several times."
DEEPSPEED_HELP = "DeepSpeed as well; it has to be installed."
MEMORY_HELP = "Let torch's and DeepSpeed's processes keep freed memory, which pipegraph's do by themselves."
SHARD_HELP = "How many processes share each stage, by FSDP; there are twice that number in all."
DEFAULTS_HELP = "Measure what a default costs torch's user, in place of the contenders."
ACCOUNT_HELP = "Say where the time of the fastest pipegraph's steps beyond the limit goes."
CHECK_HELP = "Fail if pipegraph's ratios to the limit are worse than those kept, by more than noise."
KEEP_HELP = "Keep the figures in benchmarks/step/kept.json and show them in docs/benchmarks.md."
MARKDOWN_HELP = "Print Markdown."


def main(
    model: Annotated[str, typer.Option(help=CASES_HELP)] = "llama",
    vocabulary: Annotated[int, typer.Option(help=VOCABULARY_HELP)] = 16384,
    microbatches: int = 8,
    rounds: int = 10,
    tries: Annotated[int, typer.Option(help=TRIES_HELP)] = 3,
    find_cuts: Annotated[bool, typer.Option("--find-cuts", help=FIND_HELP)] = False,
    only: Annotated[list[str] | None, typer.Option(help=ONLY_HELP)] = None,
    deepspeed: Annotated[bool, typer.Option("--deepspeed", help=DEEPSPEED_HELP)] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help=DEFAULTS_HELP)] = False,
    keep_memory: Annotated[bool, typer.Option("--keep-memory", help=MEMORY_HELP)] = False,
    dp_shard: Annotated[int, typer.Option(help=SHARD_HELP)] = 1,
    account: Annotated[bool, typer.Option("--account", help=ACCOUNT_HELP)] = False,
    check: Annotated[bool, typer.Option("--check", help=CHECK_HELP)] = False,
    keep: Annotated[bool, typer.Option("--keep", help=KEEP_HELP)] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help=MARKDOWN_HELP)] = False,
    kernels: Annotated[str, typer.Option(help="of pipegraph; eager: nothing is compiled")] = "inductor",
    cores: Annotated[str, typer.Option(help=CORES_HELP)] = "",
    cores_per_process: Annotated[int, typer.Option(min=1, help=EACH_HELP)] = 1,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare steps of two processes, or more, with one thread each; ratios are taken within a round."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    import torch

    from benchmarks.step import results, tables
    from benchmarks.step.entries import Options
    from benchmarks.step.machine import idlest_cores, machine_name
    from benchmarks.step.models import LlamaCase, UNetCase
    from benchmarks.step.shards import check_shards, process_count

    if model not in ("llama", "unet"):
        raise typer.BadParameter(f"{model} is neither llama nor unet.", param_hint="--model")
    case = UNetCase(microbatches) if model == "unet" else LlamaCase(microbatches, vocabulary=vocabulary)
    if problem := check_shards(case, dp_shard):
        raise typer.BadParameter(f"{problem}.", param_hint="--dp-shard")
    if dp_shard > 1 and (deepspeed or defaults or account):
        raise typer.BadParameter("it is for torch's schedules and pipegraph's alone.", param_hint="--dp-shard")
    shards = "" if dp_shard == 1 else f", {dp_shard} shards"
    cores_label = "" if cores_per_process == 1 else f", {cores_per_process} cores for each process"
    run: dict[str, Any] = {
        "case": case.name + shards + cores_label,
        "table": "defaults" if defaults else "peers that keep memory" if keep_memory else "peers",
        "torch": torch.__version__.partition("+")[0],
        "machine": machine_name(),
        "kernels": kernels,
        "date": datetime.date.today().isoformat(),
    }
    last = results.find_kept(run)
    if check and last is None:
        raise typer.BadParameter(
            "no run like this one is kept to compare with. Try: --keep first.", param_hint="--check"
        )
    known_cuts = {} if find_cuts else results.kept_cuts({**run, "case": case.name}) | results.kept_cuts(run)
    total = process_count(dp_shard) * cores_per_process
    core_numbers = tuple(map(int, cores.split(","))) if cores else idlest_cores(total)
    if cores_per_process > 1 and len(core_numbers) < total:
        problem = f"{total} cores are needed, {cores_per_process} for each process, and there are {len(core_numbers)}."
        raise typer.BadParameter(problem, param_hint="--cores-per-process")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="pipegraph-step-") as folder:
        options = Options(
            case,
            core_numbers,
            Path(folder),
            kernels,
            rounds,
            tries,
            tuple(only or ()),
            known_cuts,
            deepspeed,
            defaults,
            account,
            dp_shard,
            keep_memory,
            cores_per_process,
        )
        run |= results.figures(run_ranks(options))
    run["load"] = [load_before, os.getloadavg()[0]]
    if as_json:
        as_json.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    if markdown:
        print(tables.markdown([run]))
    else:
        tables.show(run)
    if keep:
        results.keep(run)
        tables.write_page(results.load_kept())
    slower = results.worse(run, last) if check and last else []
    for line in slower:
        typer.echo(line, err=True)
    if slower or run["wrong"]:
        raise typer.Exit(1)


def run_ranks(options: Any) -> dict[str, Any]:
    """Run the processes; return what they measured."""
    from torch import multiprocessing

    from benchmarks.step.rank import main as run_rank
    from benchmarks.step.shards import process_count

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    count = process_count(options.shards)
    processes = multiprocessing.start_processes(run_rank, (options, port, results), nprocs=count, join=False)
    assert processes is not None
    while results.empty():
        processes.join(timeout=1)
    measured: dict[str, Any] = results.get()
    while not processes.join():
        pass
    return measured


if __name__ == "__main__":
    typer.run(main)

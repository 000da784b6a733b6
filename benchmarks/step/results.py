"""What a run found: figures from its rounds, the file in which the last ones are kept, and the check against them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.step.cuts import Candidate
from pipegraph.schedule import from_csv

RESULTS_FILE = Path(__file__).with_name("kept.json")
KEY_FIELDS = "case", "table", "torch", "machine", "kernels"
"""A run is compared with the kept one that is alike in these."""
FLOOR = 0.01  # a ratio may be worse by this, because runs differ by more than their quartiles


def figures(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the run without its rounds: for each contender seconds, and ratios as (quartile, median, quartile).

    Ratios are taken within a round: to the limit's steps right before and after, and of these to those of the fastest
    of pipegraph's, or of the first contender if none is pipegraph's.
    """
    rounds = measured["rounds"]
    names = [name for name in measured["cuts"] if name in rounds[0]["seconds"]]
    over_limit = {name: [turn["seconds"][name] / turn["limit"][name] for turn in rounds] for name in names}
    pipegraph_names = [name for name in names if name.startswith("pipegraph")] or names[:1]
    best = min(pipegraph_names, key=lambda name: median(over_limit[name]), default="")
    contenders = {
        name: {
            **measured["cuts"][name],
            "seconds": median(turn["seconds"][name] for turn in rounds),
            "over_limit": quartiles(over_limit[name]),
            "over_best": quartiles([a / b for a, b in zip(over_limit[name], over_limit[best], strict=True)]),
        }
        for name in sorted(names, key=lambda name: median(over_limit[name]))
    }
    return {
        "rounds": len(rounds),
        "best": best,
        "others": quartiles([turn["others"] for turn in rounds]),
        "contenders": contenders,
        "wrong": measured["wrong"],
        "accounts": measured["accounts"],
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def load_kept(file: Path = RESULTS_FILE) -> list[dict[str, Any]]:
    """Return the runs that were kept."""
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    return runs


def keep(run: dict[str, Any], file: Path = RESULTS_FILE) -> None:
    """Keep a run in place of the last one like it. An account stays if the new run has none."""
    last = find_kept(run, file)
    if last and not run["accounts"]:
        run = {**run, "accounts": last["accounts"]}
    runs = [kept_run for kept_run in load_kept(file) if _key(kept_run) != _key(run)] + [run]
    runs.sort(key=_key)
    file.write_text(json.dumps({"schema_version": 1, "runs": runs}, indent=1, ensure_ascii=False) + "\n")


def find_kept(run: dict[str, Any], file: Path = RESULTS_FILE) -> dict[str, Any] | None:
    """Return the last run like this one."""
    return next((kept_run for kept_run in load_kept(file) if _key(kept_run) == _key(run)), None)


def kept_cuts(like: dict[str, Any], file: Path = RESULTS_FILE) -> dict[str, Candidate]:
    """Return the cuts that a kept run of the same case found, on whatever torch; this one's before others."""
    runs = [run for run in load_kept(file) if run["case"] == like["case"] and run["kernels"] == like["kernels"]]
    runs.sort(key=lambda run: (run["torch"] == like["torch"], run["machine"] == like["machine"]))
    candidates = {}
    for name, contender in (pair for run in runs for pair in run["contenders"].items()):
        if contender["found"]:
            order = contender["schedule"]
            schedule = from_csv(order) if "\n" in order else order
            candidates[name] = Candidate(schedule, tuple(contender["at"]), found=contender["found"])
    return candidates


def worse(run: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Return a line for each ratio of pipegraph to the limit that is worse than the kept one by more than noise.

    It is if the middle halves of both lie apart by more than a hundredth.
    """
    lines = []
    for name in run["contenders"].keys() & last["contenders"].keys():
        now, previous = (document["contenders"][name]["over_limit"] for document in (run, last))
        if name.startswith("pipegraph") and now[0] > previous[2] + FLOOR:
            lines.append(
                f"{name}: {now[1]:.3f} ({now[0]:.3f} – {now[2]:.3f}) of the limit, "
                f"before {previous[1]:.3f} ({previous[0]:.3f} – {previous[2]:.3f})"
            )
    return sorted(lines)


def _key(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(run[name] for name in KEY_FIELDS)

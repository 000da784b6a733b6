"""Python imports this at its start where this folder is on its path: a rank then sends itself a signal at a moment.

The moment is PIPEGRAPH_FAULT: a fault as JSON, with the fields of `benchmarks.faults.fault_try.Fault`.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time

PLACES = {
    "compilation": ("pipegraph.runtime.executor", "Executor", ("_prepare_for",)),
    "forward": ("pipegraph.runtime.executor", "Executor", ("_forward",)),
    "backward": ("pipegraph.runtime.executor", "Executor", ("_backward", "_input_backward")),
    "optimizer": ("torch.optim.adamw", "AdamW", ("step",)),
    "checkpoint": ("pipegraph.runtime.checkpoint.checkpointer", "Checkpointer", ("save",)),
    "saving": ("pipegraph.tracing.recording.profiler", "LoopProfiler", ("_write",)),
}
fault = json.loads(os.environ.get("PIPEGRAPH_FAULT", "null"))
calls = 0


def strike():
    time.sleep(fault["delay"])
    with open(fault["file"], "w") as file:
        file.write(f"{os.getpid()} {time.time()}")
    os.kill(os.getpid(), fault["signal"])


def watched(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == fault["call"]:
            threading.Thread(target=strike, daemon=True).start()
        return function(*args, **kwargs)

    return call


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module of the place once, and wraps its methods when it has run."""

    def __init__(self, module, cls, methods):
        self.module, self.cls, self.methods = module, cls, methods

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            owner = getattr(module, self.cls)
            for method in self.methods:
                setattr(owner, method, watched(getattr(owner, method)))

        spec.loader.exec_module = exec_module
        return spec


if fault is not None and os.environ.get("RANK") == str(fault["rank"]) and not os.path.exists(fault["claimed"]):
    with open(fault["claimed"], "w"):  # the rank's own children strike nobody
        pass
    if fault["moment"] in PLACES:
        sys.meta_path.insert(0, Finder(*PLACES[fault["moment"]]))
    else:
        threading.Thread(target=strike, daemon=True).start()

"""What ``import pipegraph`` gives, and what it leaves alone."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import pipegraph
from pipegraph import errors


def test_all_names_everything_public() -> None:
    names = {*vars(pipegraph), *pipegraph.__all__}
    public = {name for name in names if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(pipegraph, name))}
    imported = {"TYPE_CHECKING", "annotations"}
    assert public - (modules - {"schedule"}) - imported | {"__version__"} == set(pipegraph.__all__)


def test_dir_has_the_public_names_alone() -> None:
    assert dir(pipegraph) == sorted(pipegraph.__all__)


@pytest.mark.parametrize("name", pipegraph.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(pipegraph, name) is not None


def test_every_error_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(pipegraph.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pipegraph' has no attribute 'nope'"):
        pipegraph.nope  # noqa: B018


def test_import_loads_no_torch() -> None:
    assert _modules_after("import pipegraph") & {"torch", "numpy", "jinja2", "typer", "rich"} == set()


def test_schedules_load_no_torch() -> None:
    code = "from pipegraph import schedule; schedule.check(schedule.lower(schedule.build('1f1b', 4, 8)))"
    assert "torch" not in _modules_after(code)


def test_the_command_line_is_parsed_without_torch() -> None:
    assert "torch" not in _modules_after("import pipegraph.cli")


def test_capture_and_plan_are_functions_whichever_way_they_are_imported() -> None:
    code = "import pipegraph.graph.capture, pipegraph.planner.plan; import pipegraph; print(pipegraph.capture.__name__)"
    _modules_after(f"{code}; assert callable(pipegraph.capture); assert callable(pipegraph.plan)")


def test_import_is_quick() -> None:
    """In a fraction of the time of torch, which is loaded when something needs it."""
    clock = "from time import process_time as clock; times = [clock()]"
    imports = "import pipegraph; times.append(clock()); import torch; times.append(clock())"
    _modules_after(f"{clock}; {imports}; assert times[1] - times[0] < (times[2] - times[1]) / 4")


def _modules_after(code: str) -> set[str]:
    """The modules that are loaded once ``code`` has run in a fresh interpreter."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())

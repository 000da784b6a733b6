"""Libraries outside torch whose operations a model uses."""

from __future__ import annotations

from importlib.util import find_spec

from pipegraph.codegen.internals import defining_module
from pipegraph.errors import CaptureError
from pipegraph.graph.captured import Captured
from pipegraph.graph.internals import OpOverload

_BUILT_IN = frozenset({"aten", "prim", "prims"})


def libraries(captured: Captured) -> dict[str, str]:
    """Namespace of operations → the module that defines them when it is imported.

    Raises:
        CaptureError: no importable module does, as for an operation that is defined in the model's own file.
    """
    found: dict[str, str] = {}
    for node in captured.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace in (_BUILT_IN | found.keys()):
            continue
        module = defining_module(target) or target.namespace
        try:
            importable = find_spec(module) is not None
        except (ImportError, ValueError):
            importable = False
        if not importable:
            raise CaptureError(
                f"The model uses {target}, which is defined in {module}: a package could not import it.\n"
                f"Try: move the definition of the operation into a module that is installed."
            )
        found[target.namespace] = module
    return dict(sorted(found.items()))

"""The expressions of the model's dtype in a ``forward``: ``x.dtype``, ``torch.finfo(x.dtype).min``."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.codegen.forward.items import ClassContents
from pipegraph.codegen.forward.local_variables import LocalVariables
from pipegraph.codegen.syntax.expressions import Attribute, Expression, Name, call, literal
from pipegraph.graph.captured import model_dtype, model_number
from pipegraph.graph.nodes import OTHER_DTYPE

OF_MODEL_DTYPE = (model_dtype, model_number)
"""What such a node of a graph calls."""


class UnknownDtypeError(Exception):
    """No value of a class has the dtype of the model."""


class ModelDtypes:
    """Where a ``forward`` reads the dtype of the model.

    Args:
        values: the variables of the ``forward``.
        contents: the class.
    """

    def __init__(self, values: LocalVariables, contents: ClassContents) -> None:
        self._values = values
        self._contents = contents

    def expression(self, node: fx.Node) -> Expression:
        """``x.dtype`` or ``torch.finfo(x.dtype).min``, of the first variable or parameter that has the model's dtype.

        A stage without such a variable asks its modules: ``next(self.parameters()).dtype``.

        Raises:
            UnknownDtypeError: a module has none; the code around it does. A stage without parameters of that dtype
                keeps what was captured.
        """
        values = self._values
        own, other, *limit = node.args
        places = (*values.variables.values(), *self._contents.state_names, *values.deferred)
        found = next((each for each in places if _dtypes(each) == (own, other)), None)
        if found is not None:
            values.write(found)
            variable = next((Name(name) for name, each in values.variables.items() if each is found), None)
            holder: Expression = variable or values.written[found]
        elif self._contents.prefix:
            raise UnknownDtypeError
        elif {each.dtype for each in self._contents.state.values() if each.kind == "parameter"} == {own}:
            holder = call("next", call("self.parameters"))
        else:
            return literal(node.meta["val"])
        dtype = Attribute(holder, "dtype")
        return Attribute(call("torch.finfo", dtype), str(limit[0])) if limit else dtype


def _dtypes(node: fx.Node) -> tuple[object, object]:
    """The dtype of a value, and the one that it has if the model is converted."""
    value = node.meta.get("val")
    return (value.dtype, node.meta.get(OTHER_DTYPE)) if isinstance(value, torch.Tensor) else (None, None)

"""The kernels of a pipeline's stages on this process: traced again, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.runtime.step_runner import StepRunner

if TYPE_CHECKING:
    from pipegraph.kernels.kernel_report import KernelCount


class PipelineKernels:
    """What a pipeline says of its kernels."""

    _runner: StepRunner

    def retrace(self) -> None:
        """Trace the stages of this process, and the loss, again at their next call. Not collective.

        For changes that are not noticed: an attribute of a module, a number or a function that `loss_fn` reads. Kernels
        that were compiled are used again for graphs that come out equal.
        """
        for kernels in self._runner.kernels.values():
            kernels.retrace()

    def kernels_report(self) -> list[KernelCount]:
        """How often the stages of this process, and the blocks in them, have been traced and compiled. Not collective.

        for count in pipe.kernels_report():
            print(count)  # TransformerEncoderLayer (stage 0, 3): 2 static, 1 symbolic
        """
        from pipegraph.kernels.kernel_report import kernels_report

        return kernels_report(self._runner.kernels)

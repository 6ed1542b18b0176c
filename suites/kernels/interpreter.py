"""Triton's interpreter for a whole test session: without a CUDA device kernels run under it.

Triton looks at the variable when it is imported, and at the knob of the same meaning when a kernel file is. Only the
knob stays set: child processes, and an engine's own choice of a backend, go by the variable.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

INSTALLED = importlib.util.find_spec("triton") is not None


def use_interpreter() -> None:
    """To be called before the first kernel file is imported. Nothing to do with a CUDA device, or without Triton."""
    if not INSTALLED or torch.cuda.is_available():
        return
    asked = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language

    # Setting the knob sets the variable too, so this comes before it is put back.
    triton.knobs.runtime.interpret = True
    if asked is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = asked
    from triton.runtime.interpreter import InterpretedFunction

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What Triton does here, less patching its language anew: the kernel that calls has patched it already, and
        at each call that takes longer than most functions."""
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call_device_function

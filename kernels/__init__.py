"""Device-side steps of speculative decoding: a Triton kernel each, with its torch reference. One file per kernel.

`KERNELS[name]` is the `KERNEL` of file `name`; a new kernel is registered by its line here.
"""

from __future__ import annotations

from kernels.base import Registry

KERNELS = Registry(
    # verification and sampling
    "verify_chain_greedy",
    "verify_chain_sampled",
    # trees and draft inputs
    # bookkeeping
    # output and attention
)

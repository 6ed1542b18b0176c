"""The contract: what an engine is asked, what it must deliver, and all that an invariant may look at.

An adapter in `harness/engines` turns a real engine into an `Engine`: it takes `Request`s and returns a `Run`.
Invariants are pure functions over `Run`s. Nothing here imports an engine.

Terms follow the field: `num_steps`, `topk` and `num_draft_tokens` as in SGLang; accept length = correct drafts
+ 1 bonus token; hidden states are one prefill block and one decode row per token that was an input.
"""

from harness.contract.completion import Completion, FinishReason, HiddenStates, LogprobRow, Usage
from harness.contract.engine import (
    Capabilities,
    DrafterSetup,
    DType,
    Engine,
    EngineFactory,
    EngineSetup,
    OnStep,
    Run,
    Script,
    Session,
    SteppedEngine,
    ask,
)
from harness.contract.json_schema import json_expression
from harness.contract.language import Reading, reading_of
from harness.contract.regex import regex_expression
from harness.contract.request import Action, ActionName, Refused, Request, SamplingParams
from harness.contract.trace import (
    PLACEHOLDER,
    Delta,
    PageLedger,
    ProposeTrace,
    SpecCounters,
    StateSnapshot,
    StepTrace,
    TensorFacts,
    VerifyTrace,
)

__all__ = [
    "PLACEHOLDER",
    "Action",
    "ActionName",
    "Capabilities",
    "Completion",
    "DType",
    "Delta",
    "DrafterSetup",
    "Engine",
    "EngineFactory",
    "EngineSetup",
    "FinishReason",
    "HiddenStates",
    "LogprobRow",
    "OnStep",
    "PageLedger",
    "ProposeTrace",
    "Reading",
    "Refused",
    "Request",
    "Run",
    "SamplingParams",
    "Script",
    "Session",
    "SpecCounters",
    "StateSnapshot",
    "StepTrace",
    "SteppedEngine",
    "TensorFacts",
    "Usage",
    "VerifyTrace",
    "ask",
    "json_expression",
    "reading_of",
    "regex_expression",
]

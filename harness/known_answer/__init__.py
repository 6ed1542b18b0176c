"""Known-answer checkpoints: checkpoints with hand-set weights, and the closed forms of all that they say."""

from harness.known_answer.base import Drafter, Reading, Target
from harness.known_answer.family import FAMILIES, Family, build, family

__all__ = ["FAMILIES", "Drafter", "Family", "Reading", "Target", "build", "family"]

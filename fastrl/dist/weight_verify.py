"""When a delivery of weights is checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastrl.errors import WeightError

PATTERN = r"always|first|off|every [1-9][0-9]*"


@dataclass
class VerifySchedule:
    """Which updates are checked: `always`, `first` (to each engine process), `every k`, or `off`.

    `count` counts the updates asked about since the engine process was started; `restart` begins anew.
    """

    when: str = "always"
    count: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(PATTERN, self.when):
            raise WeightError(f"rollout.verify_weights = {self.when}: use always, first, every K or off")

    def due(self) -> bool:
        """Whether the update that comes now is checked; call it once per update."""
        self.count += 1
        if self.when in ("always", "off"):
            return self.when == "always"
        if self.when == "first":
            return self.count == 1
        return (self.count - 1) % int(self.when.split()[1]) == 0

    def restart(self) -> None:
        """The engine process is a new one."""
        self.count = 0

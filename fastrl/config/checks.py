"""Rules between keys: each looks at the whole configuration and names the keys it is about.

A rule is a generator function in one of the `rules_*` modules. It is only asked when every single value has the right
type, and what it finds is dropped when one of its keys is already known to be wrong.
"""

from __future__ import annotations

from fastrl.config import rules_algorithm, rules_data, rules_rollout, rules_run, rules_weights
from fastrl.config.findings import Finding, Rule, Subject
from fastrl.config.schema import Config

RULES: tuple[Rule, ...] = (
    *rules_run.RULES,
    *rules_rollout.RULES,
    *rules_data.RULES,
    *rules_algorithm.RULES,
    *rules_weights.RULES,
)


def check(config: Config, set_keys: frozenset[str]) -> list[Finding]:
    """Everything that the rules find in a configuration whose single values are right.

    Args:
        config: the configuration.
        set_keys: dotted keys that somebody wrote down (the others have their defaults).
    """
    subject = Subject(config, set_keys)
    return [finding for rule in RULES for finding in rule(subject)]

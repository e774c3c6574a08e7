"""Reports without numbers that concern sampling and validation, with a scripted generator in the engine's place."""

from __future__ import annotations

import pytest
from reported_loop import ScriptedGenerator, prompt_of

from fastrl.config.schema import Config
from fastrl.data.prompts import PromptSet
from fastrl.errors import TrainingError
from fastrl.rollout.engine import SamplingParams
from fastrl.trainer.generation import RefillSettings, ScoredSample, fill_batch
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.setup import make_validator


class Groups(ScriptedGenerator):
    """Two samples for each prompt; `scores` holds, by prompt, whether they differ."""

    def run(self, prompts, *, step, first_group=0):
        out = []
        for one in super().run(prompts, step=step, first_group=first_group):
            differ = self.scores[one.prompt.prompt_id]
            out += [ScoredSample(**(vars(one) | {"score": score})) for score in (0.0, float(differ))]
        return out


def endless():
    """Prompts 0, 1, 2, ... as the cursor hands them out."""
    taken = 0

    def take(number):
        nonlocal taken
        taken += number
        return [prompt_of([1], k) for k in range(taken - number, taken)]

    return take


@pytest.mark.parametrize("on_exhausted", ["train", "stop"])
def test_constant_rewards_end_the_refills(on_exhausted):
    generator, metrics = Groups([0] * 100), Metrics()
    refill = RefillSettings(max_refills=3, on_exhausted=on_exhausted)
    if on_exhausted == "stop":
        with pytest.raises(TrainingError, match=r"only 0 of 4 groups.*max_refills"):
            fill_batch(generator, endless(), 4, step=1, refill=refill, metrics=metrics)
        return
    assert fill_batch(generator, endless(), 4, step=1, refill=refill, metrics=metrics) == []
    assert generator.calls == [4, 4, 4, 4]
    values = metrics.reduce()
    assert (values["data/refills"], values["data/dropped_groups"], values["data/exhausted"]) == (3, 16, 1)


def test_refills_complete_the_batch_and_no_more():
    generator, metrics = Groups([1, 0, 0, 1, 0, 1, 1, 1, 1]), Metrics()
    samples = fill_batch(generator, endless(), 4, step=1, refill=RefillSettings(), metrics=metrics)
    # prompts 0 and 3 of the first four, one of 4 and 5, then 6: whole groups, in the order of their ids
    assert [s.prompt.prompt_id for s in samples] == [0, 0, 3, 3, 5, 5, 6, 6]
    assert generator.calls == [4, 2, 1]
    values = metrics.reduce()
    assert (values["data/refills"], values["data/dropped_groups"], values["data/exhausted"]) == (2, 3, 0)


def test_validation_samples_with_its_own_settings():
    config = Config(
        rollout={"temperature": 1.3, "top_p": 0.9, "num_samples_per_prompt": 8, "max_response_tokens": 7},
        run={"validation_temperature": 0.2, "validation_top_p": 0.5, "validation_num_samples": 3},
    )
    seen = []

    class Recorder(ScriptedGenerator):
        def run(self, prompts, *, step, first_group=0):
            seen.append((self.params, self.num_samples))
            return super().run(prompts, step=step, first_group=first_group)

    generator = Recorder([1.0], params=SamplingParams(temperature=1.3, top_p=0.9, max_tokens=7), num_samples=8)
    validator = make_validator(config, generator, PromptSet([prompt_of([1])], name="held out"))
    validator.run(Metrics())
    ((params, number),) = seen
    assert (params.temperature, params.top_p, params.max_tokens, number) == (0.2, 0.5, 7, 3)

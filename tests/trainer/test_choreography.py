"""Who holds the memory when, with recorded calls; budgets and key/value spaces against numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.errors import TrainingError
from fastrl.models.load import load_model
from fastrl.rollout.kv_space import free_memory, kv_bytes, kv_bytes_per_token, wanted_kv_tokens
from fastrl.trainer.choreography import Choreography, OptimizerState, Parameters, movable_parts
from fastrl.trainer.engine_memory import Beside, MemoryBudget, budget, layers, rounded_down, sleep_level
from fastrl.trainer.engines import models_beside
from fastrl.trainer.reference import Reference, WithoutAdapters
from fastrl.trainer.reward_model import RewardModel


class Recorder:
    """An engine and a movable part that write down what is asked of them."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake(self, what):
        self.calls.append("wake " + "+".join(what))

    def update_weights(self, model, version):
        self.calls.append(f"update {model} {version}")

    def to_host(self):
        self.calls.append(f"{self.name} to host")

    def to_device(self):
        self.calls.append(f"{self.name} to device")


def choreography(level):
    calls = []
    movable = (Recorder(calls, "optimizer"), Recorder(calls, "parameters"))
    return Choreography(Recorder(calls, "engine"), level, movable), calls


def test_the_order_of_a_step():
    """Keys and values come last, after the trainer has made room; what left last comes back first."""
    memory, calls = choreography(2)
    memory.train()
    memory.generate("model", 3, changed=True)
    assert calls == [
        "sleep 2",
        "parameters to device",
        "optimizer to device",
        "wake weights",
        "update model 3",
        "optimizer to host",
        "parameters to host",
        "wake kv",
    ]


@pytest.mark.parametrize(("level", "changed", "delivers"), [(1, False, False), (2, False, True), (0, True, True)])
def test_unchanged_weights_are_delivered_only_where_they_were_lost(level, changed, delivers):
    memory, calls = choreography(level)
    memory.train()
    memory.generate("model", 1, changed=changed)
    assert ("update model 1" in calls) == delivers


def test_no_phase_can_be_skipped():
    memory, _ = choreography(1)
    with pytest.raises(TrainingError, match="goes to generate from train, it is in generate"):
        memory.generate("model", 1, changed=True)
    memory.train()
    with pytest.raises(TrainingError, match="goes to train from generate, it is in train"):
        memory.train()


def test_a_checkpoint_sees_the_whole_trainer():
    memory, calls = choreography(1)
    with memory.trainer_present():
        calls.append("save")
    moves = ["parameters to device", "optimizer to device", "save", "optimizer to host", "parameters to host"]
    assert calls == moves
    memory.train()
    calls.clear()
    with memory.trainer_present():
        calls.append("save")
    assert calls == ["save"]


def test_the_beginning_on_a_shared_device():
    """The trainer makes room before the engine measures it; the first weights come before keys and values."""
    memory, calls = choreography(2)
    memory.engine.start = lambda: calls.append("start")
    memory.engine.ready = lambda: calls.append("ready")
    memory.begin(wait=True)
    memory.renew("model", 4)  # a checkpoint: delivered with the first weights
    memory.open("model", 4)
    memory.open("model", 4)
    assert calls == [
        *("optimizer to host", "parameters to host", "start", "ready", "sleep 2"),
        *("parameters to device", "optimizer to device"),
        *("wake weights", "update model 4", "optimizer to host", "parameters to host", "wake kv"),
    ]
    calls.clear()
    memory.renew("model", 5)
    wanted = [
        "parameters to device",
        "optimizer to device",
        "update model 5",
        "optimizer to host",
        "parameters to host",
    ]
    assert calls == wanted


def test_restarts_are_counted_once():
    memory, _ = choreography(1)
    memory.engine.health = lambda: SimpleNamespace(restarts=2)
    assert (memory.new_restarts(), memory.new_restarts()) == (2, 0)


def test_moving_keeps_parameters_and_moments():
    """On one device a move changes nothing: identity of parameters, values of moments, type of step counts."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weight, moment = model.weight, optimizer.state[model.weight]["exp_avg"].clone()
    for part in (OptimizerState(optimizer, torch.device("cpu")), Parameters(model, torch.device("cpu"))):
        part.to_host()
        part.to_device()
    assert model.weight is weight and torch.equal(optimizer.state[weight]["exp_avg"], moment)
    assert movable_parts("all", [(model, optimizer)], torch.device("cpu")) == ()
    assert len(movable_parts("all", [(model, optimizer)], torch.device("cuda"))) == 2
    assert len(movable_parts("optimizer", [(model, optimizer)], torch.device("cuda"))) == 1


SMOLLM2 = SimpleNamespace(
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576
)


def test_key_value_space():
    """2 x 30 layers x 3 heads x 64 numbers x 4 bytes = 46,080 bytes a token; blocks of 32 and one more."""
    assert kv_bytes_per_token(SMOLLM2, 4) == 46_080
    assert kv_bytes_per_token(SMOLLM2, 2, 3) == 7_680
    assert kv_bytes(33, SMOLLM2, 4) == 3 * 32 * 46_080
    assert wanted_kv_tokens(32, 256, 76) == 32 * 96
    assert wanted_kv_tokens(1000, 256, 64) == 256 * 64
    assert free_memory() > 1 << 20


def test_budget_by_hand():
    """1.5e9 parameters on one 80 GiB device, GRPO: 6 + 6 + 12 GB of trainer, 3 GB of bf16 engine."""
    sizes = MemoryBudget(6.0, 6.0, 12.0, 0.0, 1.0, 3.0, 20.0, 80.0, sleep_level=2, offload="none")
    assert sizes.phases() == {"train": 24.0, "deliver": 22.0, "generate": 42.0}
    assert sizes.fraction() == pytest.approx((80 - 18 - 1 - 2) / 80)
    moved = MemoryBudget(6.0, 6.0, 12.0, 0.0, 1.0, 3.0, None, 80.0, sleep_level=1, offload="all")
    assert moved.phases()["generate"] == 4.0 and moved.fraction() == 0.92
    apart = MemoryBudget(6.0, 6.0, 12.0, 0.0, 1.0, 3.0, None, 80.0, sleep_level=0, offload="none", shared=False)
    assert apart.phases() == {"train": 24.0, "deliver": 19.0, "generate": 1.0} and apart.fraction() == 0.92
    asleep = MemoryBudget(6.0, 6.0, 12.0, 0.0, 1.0, 3.0, 20.0, 80.0, sleep_level=0, offload="none")
    assert asleep.phases()["train"] == 27.0
    crowded = MemoryBudget(
        6.0, 6.0, 12.0, 0.0, 1.0, 3.0, 20.0, 80.0, sleep_level=2, offload="optimizer", frozen=3.0, scoring=5.0
    )
    assert crowded.phases() == {"train": 27.0, "deliver": 25.0, "generate": 38.0}
    assert crowded.fraction() == (80 - 14 - 1 - 2) / 80
    assert "of 80.0" in sizes.lines()[0] and "generate 42.00" in sizes.lines()[0]
    assert rounded_down(0.7375) == 0.73


def test_budget_of_a_model(tmp_path):
    folder = write_tiny_folder(tmp_path)
    model = load_model(folder)
    config = load_config([], [*short_run(folder, tmp_path), "rollout.engine=native"]).config
    numbers = sum(p.numel() for p in model.parameters())
    sizes = budget(config, model, kv_bytes=1 << 30, sleep_level=0, total_bytes=8 << 30)
    assert sizes.parameters * 2**30 == 4 * numbers and sizes.optimizer * 2**30 == 8 * numbers
    assert sizes.kv == 1.0 and sizes.total == 8.0 and sizes.engine_weights == sizes.parameters
    assert len(layers(model)) == 3

    critic, scorer = torch.nn.Linear(10, 7, bias=False), torch.nn.Linear(10, 3, bias=False, dtype=torch.bfloat16)
    for p in list(model.parameters())[1:]:
        p.requires_grad_(False)
    trained = next(model.parameters()).numel()
    beside = Beside(trained=(critic,), frozen=(scorer,), scoring=(scorer, scorer))
    more = budget(config, model, kv_bytes=None, sleep_level=0, beside=beside)
    assert more.parameters * 2**30 == 4 * (numbers + 70) and more.gradients * 2**30 == 4 * (trained + 70)
    assert more.optimizer * 2**30 == 8 * (trained + 70)
    assert more.frozen * 2**30 == 60 and more.scoring * 2**30 == 120


def test_models_beside_the_policy():
    critic, kept, waiting = (SimpleNamespace(model=torch.nn.Linear(1, n)) for n in (1, 2, 3))
    judge, model = object.__new__(RewardModel), torch.nn.Linear(1, 4)
    judge.model = model
    references = [object.__new__(kind) for kind in (Reference, Reference, WithoutAdapters)]
    for reference, source, offload in zip(references, (kept, waiting, critic), (False, True, False)):
        reference.model, reference.offload = source.model, offload
    found = models_beside(critic, references[0], [judge])
    assert (found.trained, found.frozen, found.scoring) == ((critic.model,), (kept.model,), (model,))
    assert models_beside(None, references[1], []) == models_beside(None, references[2], []) == Beside()


def test_sleep_level_is_derived(tmp_path):
    base = short_run("builtin:tiny", tmp_path)
    cases = [
        ([], "cuda", 2),
        ([], "cpu", 0),
        (["rollout.sleep_level=1"], "cuda", 1),
        (["rollout.devices=[1]"], "cuda", 0),
    ]
    for more, device, wanted in cases:
        config = load_config([], [*base, *more]).config
        assert sleep_level(config, torch.device(device)) == wanted

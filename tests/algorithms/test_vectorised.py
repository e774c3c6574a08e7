"""No loop over tokens, samples or groups: a batch hundreds of times larger takes no more tensor operations."""

import pytest
import ragged_data
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl.algorithms import (
    get_advantage,
    get_correction,
    get_policy_loss,
    list_advantages,
    list_corrections,
    list_policy_losses,
)
from fastrl.algorithms.entropy import top_entropy_mask
from fastrl.algorithms.evaluation import evaluate
from fastrl.algorithms.filters import informative_groups
from fastrl.algorithms.pf_ppo import resample

OPTIONS = {"dro": {"beta": 0.1}, "kimi": {"beta": 0.1}}
# a scan doubles its stride until it spans the batch: some operations for each of the nine doublings more
DOUBLINGS = 9 * 8


class Count(TorchDispatchMode):
    """Counts the tensor operations inside."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def data_of(groups, samples, tokens):
    count = groups * samples
    lengths = [1 + (7 * i) % (2 * tokens) for i in range(count)]
    data = ragged_data.batch(0, lengths, [i // samples for i in range(count)])
    data["selection"] = data["entropy"] > 1.0
    return data


SMALL, LARGE = data_of(3, 2, 3), data_of(64, 8, 40)


def growth(call, small=SMALL):
    counts = []
    for data in (small, LARGE):
        call(dict(data))  # what is made once only
        with Count() as count:
            call(dict(data))
        counts.append(count.operations)
    return counts[1] - counts[0]


def loss(name):
    def call(data):
        data["log_prob"] = data["log_prob"].clone().requires_grad_()
        get_policy_loss(name).call(data, OPTIONS.get(name)).loss.sum().backward()

    return call


CALLS = {f"advantage {n}": lambda d, n=n: get_advantage(n).call(d) for n in list_advantages()}
CALLS |= {f"loss {n}": loss(n) for n in list_policy_losses()}
CALLS |= {f"correction {n}": lambda d, n=n: get_correction(n).call(d) for n in list_corrections()}
CALLS |= {
    f"selection {n}": lambda d, n=n: get_policy_loss(n).make_selection(d)
    for n in list_policy_losses()
    if get_policy_loss(n).select is not None
}
CALLS |= {
    "entropy quantile": lambda d: top_entropy_mask(d["entropy"], d["loss_mask"], 0.2),
    "informative groups": lambda d: informative_groups(d["scores"], d["group_id"], d["valid"]),
    "resample": lambda d: resample(d["scores"], d["valid"], seed=0, update=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_operations_do_not_grow_with_the_batch(name):
    assert LARGE["log_prob"].numel() > 500 * 8 * 4 and growth(CALLS[name]) <= DOUBLINGS


def test_a_loop_over_groups_would_be_seen():
    def loop(data):
        for group in data["group_id"].unique():
            data["scores"][data["group_id"] == group].mean()

    assert growth(loop) > DOUBLINGS


def test_evaluation_grows_with_the_figures_only():
    figures = evaluate(LARGE["scores"], LARGE["group_id"], num_draws=10)
    assert figures.keys() >= {"pass@8", "best@8", "worst@8"}
    few = data_of(3, 8, 3)  # as many samples a prompt, so as many figures
    assert growth(lambda d: evaluate(d["scores"], d["group_id"], num_draws=10), few) <= DOUBLINGS

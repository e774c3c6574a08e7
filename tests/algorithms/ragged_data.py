"""Random ragged batches for the tests of the algorithms."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch


def batch(seed=0, lengths=(3, 0, 5, 1, 4, 2, 6, 4), groups=(7, 7, 3, 3, 7, 9, 3, 5), dtype=torch.float64):
    """A dict of fields: masks with holes, an empty response, unequal groups out of order, one group of one."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    t, s = int(cu[-1]), len(lengths)
    mask = torch.rand(t, generator=g) > 0.25
    mask[:1] = True
    old = -normal(t).abs() - 0.05
    data = {
        "cu_seqlens": cu,
        "group_id": torch.tensor(groups, dtype=torch.int64),
        "sample_id": torch.arange(s) * 3 + 1,
        "scores": (normal(s) * 2).round() / 2,
        "valid": torch.rand(s, generator=g) > 0.15,
        "lengths": torch.tensor([int(mask[a:b].sum()) for a, b in pairwise(cu.tolist())], dtype=torch.int64),
        "greedy_scores": normal(s),
        "response_mask": mask,
        "loss_mask": mask,
        "token_level_rewards": normal(t),
        "values": normal(t),
        "bootstrap_values": normal(s),
        "old_log_prob": old,
        "log_prob": torch.minimum(old + 0.4 * normal(t), torch.tensor(-1e-3, dtype=dtype)),
        "rollout_log_prob": torch.minimum(old + 0.3 * normal(t), torch.tensor(-1e-3, dtype=dtype)),
        "ref_log_prob": old + 0.5 * normal(t),
        "advantages": normal(t),
        "sum_sq": torch.rand(t, generator=g, dtype=torch.float64).to(dtype),
        "rollout_weight": torch.rand(t, generator=g, dtype=torch.float64).to(dtype) * 2,
        "entropy": normal(t).abs(),
        "staleness": torch.randint(0, 4, (t,), generator=g),
        "components": {"right": normal(s), "format": (normal(s) > 0).to(dtype)},
    }
    data["components"]["format"][2:3] = torch.nan
    return data


def numpy(data):
    """The same fields as NumPy float64 (ints and bools stay)."""
    out = {}
    for name, value in data.items():
        if isinstance(value, dict):
            out[name] = numpy(value)
        elif isinstance(value, torch.Tensor):
            out[name] = value.double().numpy() if value.is_floating_point() else value.numpy()
        else:
            out[name] = value
    return out


def on_ranks(work):
    """Run work[r](reduce) on one thread for each rank; reduce sums a tensor over them. Results in rank order."""
    n = len(work)
    barrier = threading.Barrier(n)
    slots, results, errors = [None] * n, [None] * n, []

    def rank(r):
        def reduce(tensor):
            slots[r] = tensor
            barrier.wait()
            total = torch.stack(list(slots)).sum(0)
            barrier.wait()
            return total

        try:
            results[r] = work[r](reduce)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results

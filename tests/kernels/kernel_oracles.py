"""Every batch-level op once more as float64 NumPy loops, straight from the equation: what the tests compare to."""

from __future__ import annotations

import math

import numpy as np


def gae(rewards, values, mask, offsets, gamma, lam, bootstrap=None):
    """lam and bootstrap: one value per sequence (lam may be a number)."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for s in range(len(offsets) - 1):
        lam_s = lam if np.isscalar(lam) else lam[s]
        next_value, carry = (0.0 if bootstrap is None else float(bootstrap[s])), 0.0
        for t in range(offsets[s + 1] - 1, offsets[s] - 1, -1):
            if not mask[t]:
                continue
            delta = rewards[t] + gamma * next_value - values[t]
            carry = delta + gamma * lam_s * carry
            next_value = values[t]
            advantages[t], returns[t] = carry, carry + values[t]
    return advantages, returns


def discounted_returns(rewards, mask, offsets, gamma):
    rewards = np.asarray(rewards, np.float64)
    out = np.zeros(len(rewards))
    for s in range(len(offsets) - 1):
        carry = 0.0
        for t in range(offsets[s + 1] - 1, offsets[s] - 1, -1):
            if mask[t]:
                carry = rewards[t] + gamma * carry
                out[t] = carry
    return out


def group_normalize(scores, ids, valid, *, scale, baseline, ddof, eps):
    out = np.zeros(len(scores))
    for g in {int(i) for i in ids}:
        rows = [i for i in range(len(scores)) if ids[i] == g and valid[i]]
        s = [float(scores[i]) for i in rows]
        n = len(s)
        if n < 2 or max(s) - min(s) <= 1e-6 * max(1.0, max(abs(x) for x in s)):
            continue
        mean = math.fsum(s) / n
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in s) / (n - ddof))
        for i, x in zip(rows, s, strict=True):
            others = (math.fsum(s) - x) / (n - 1)
            a = x - (mean if baseline == "mean" else others)
            out[i] = a / (std + eps) if scale == "std" else a
    return out


def whiten(x, mask, *, ddof=1, eps=1e-8, mean=None, var=None):
    inside = [float(v) for v, m in zip(x, mask, strict=True) if m]
    if mean is None:
        mean = math.fsum(inside) / max(len(inside), 1)
        var = math.fsum((v - mean) ** 2 for v in inside) / max(len(inside) - ddof, 1)
        scale = 1.0 if len(inside) < 2 else 1 / math.sqrt(var + eps)
    else:
        scale = 1 / math.sqrt(var + eps)
    return np.array([(float(v) - mean) * scale if m else 0.0 for v, m in zip(x, mask, strict=True)])


def stats(x, mask, ddof=1):
    """(sum, count, mean, var, min, max)"""
    inside = [float(v) for v, m in zip(x, mask, strict=True) if m]
    if not inside:
        return 0.0, 0, 0.0, 0.0, math.inf, -math.inf
    mean = math.fsum(inside) / len(inside)
    var = math.fsum((v - mean) ** 2 for v in inside) / max(len(inside) - ddof, 1)
    return math.fsum(inside), len(inside), mean, var, min(inside), max(inside)


def policy_token(lp, old, adv, clip_low, clip_high, dual_clip=None, max_ratio=None):
    """(loss, slope, clip_high, clip_low, clip_dual, k1, k3, ratio) of one token."""
    raw = lp - old
    d = min(max(raw, -20.0), 20.0)
    ratio = math.exp(d)
    capped = ratio if max_ratio is None else min(ratio, max_ratio)
    first = -adv * capped
    second = -adv * min(max(ratio, 1 - clip_low), 1 + clip_high)
    loss = max(first, second)
    cut = second > first
    slope = 0.0 if cut or raw != d or capped != ratio else -adv * ratio
    dual = dual_clip is not None and adv < 0 and loss > -adv * dual_clip
    if dual:
        loss, slope = -adv * dual_clip, 0.0
    return loss, slope, float(cut and adv > 0), float(cut and adv < 0), float(dual), -d, ratio - 1 - d, ratio


def value_token(v, old, ret, value_clip=None, huber_delta=None):
    """(loss, slope, clip, abs_error) of one token."""

    def penalty(e):
        if huber_delta is not None and abs(e) > huber_delta:
            return huber_delta * (abs(e) - huber_delta / 2)
        return e * e / 2

    held = v if value_clip is None else min(max(v, old - value_clip), old + value_clip)
    first, second = penalty(v - ret), penalty(held - ret)
    slope = v - ret if huber_delta is None else min(max(v - ret, -huber_delta), huber_delta)
    return max(first, second), 0.0 if second > first else slope, float(second > first), abs(v - ret)


def kl_token(x, kind):
    """(value, slope) at log ratio x."""
    y = min(max(-x, -20.0), 20.0)
    raw = math.exp(y) - y - 1
    table = {
        "k1": (x, 1.0),
        "abs": (abs(x), math.copysign(1.0, x) if x else 0.0),
        "k2": (x * x / 2, x),
        "k3": (min(max(raw, -10.0), 10.0), 1 - math.exp(y) if y == -x and raw <= 10 else 0.0),
    }
    alias = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    plain = kind.removesuffix("+")
    value, slope = table[alias.get(plain, plain)]
    return value, (x if kind.endswith("+") else slope)


def scale(mode, lengths, *, num_tokens=None, num_sequences=None, num_prompts=None, ids=None, factor=None):
    lengths = [int(n) for n in lengths]
    n_tok = sum(lengths) if num_tokens is None else num_tokens
    n_seq = sum(n > 0 for n in lengths) if num_sequences is None else num_sequences
    div = lambda n: 1 / n if n else 0.0  # noqa: E731
    if mode == "prompt-mean":
        per = {}
        for n, g in zip(lengths, ids, strict=True):
            per[int(g)] = per.get(int(g), 0) + n
        n_prompt = sum(n > 0 for n in per.values()) if num_prompts is None else num_prompts
        return np.array([div(n_prompt) * div(per[int(g)]) for g in ids])
    return np.array(
        {
            "token-mean": [div(n_tok)] * len(lengths),
            "token-sum": [1.0] * len(lengths),
            "seq-mean-token-sum": [div(n_seq)] * len(lengths),
            "seq-mean-token-sum-norm": [div(n_seq) / (factor or 1)] * len(lengths),
            "seq-mean-token-mean": [div(n_seq) * div(n) for n in lengths],
        }[mode]
    )


def mismatch(new, old, mask, offsets):
    """The metrics of `mismatch_stats` by name; offsets None: no sequences."""
    rows = [(float(a), float(b)) for a, b, m in zip(new, old, mask, strict=True) if m]
    log_w = [min(max(a - b, -20.0), 20.0) for a, b in rows]
    w = [math.exp(x) for x in log_w]
    p, q = [math.exp(a) for a, _ in rows], [math.exp(b) for _, b in rows]
    n = len(rows)
    k3 = [a - 1 - b for a, b in zip(w, log_w, strict=True)]
    diff = [abs(a - b) for a, b in zip(p, q, strict=True)]
    out = {
        "num_tokens": n,
        "k1_mean": math.fsum(log_w) / n,
        "k1_max": max(map(abs, log_w)),
        "k3_mean": math.fsum(k3) / n,
        "k3_max": max(k3),
        "ppl_ratio": math.exp(-math.fsum(log_w) / n),
        "chi2": math.fsum(x * x for x in w) / n - 1,
        "ess": math.fsum(w) ** 2 / (n * math.fsum(x * x for x in w)),
        "pearson": float(np.corrcoef(p, q)[0, 1]),
        "prob_diff_mean": math.fsum(diff) / n,
        "prob_diff_max": max(diff),
    }
    if offsets is not None:
        chi, largest, count = 0.0, 0.0, 0
        for s in range(len(offsets) - 1):
            part = [min(max(float(new[t] - old[t]), -20.0), 20.0) for t in range(offsets[s], offsets[s + 1]) if mask[t]]
            if part:
                count += 1
                chi += math.exp(2 * min(max(math.fsum(part), -20.0), 20.0))
                largest = max(largest, abs(math.fsum(part) / len(part)))
        out |= {"sequence_chi2": chi / count - 1, "sequence_k1_max": largest}
    return out

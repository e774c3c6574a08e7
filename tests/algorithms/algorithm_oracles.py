"""Independent float64 NumPy versions of the algorithms, written from their formulas with plain loops."""

from __future__ import annotations

import math

import numpy as np


def rows(cu):
    """(start, end) of every sequence."""
    return [(int(cu[i]), int(cu[i + 1])) for i in range(len(cu) - 1)]


def members(group, valid):
    """group -> indices of its samples that count."""
    out = {}
    for i, g in enumerate(group):
        out.setdefault(int(g), [])
        if valid[i]:
            out[int(g)].append(i)
    return out


def flat(scores):
    """True for a group without spread."""
    return len(scores) < 2 or max(scores) - min(scores) <= 1e-6 * max(1.0, max(abs(s) for s in scores))


def per_group(scores, group, valid, formula):
    """formula(list of scores, list of indices) -> advantages of a group that has spread; 0 for the others."""
    out = np.zeros(len(scores))
    for index in members(group, valid).values():
        s = [float(scores[i]) for i in index]
        if not flat(s):
            for i, a in zip(index, formula(s, index)):
                out[i] = a
    return out


def std(s, ddof):
    m = sum(s) / len(s)
    return math.sqrt(sum((x - m) ** 2 for x in s) / (len(s) - ddof))


def grpo(scores, group, valid, *, std_normalize=True, leave_one_out=False, ddof=1, eps=1e-6):
    def formula(s, index):
        m, n = sum(s) / len(s), len(s)
        d = std(s, ddof) + eps if std_normalize else 1.0
        return [(x - ((m * n - x) / (n - 1) if leave_one_out else m)) / d for x in s]

    return per_group(scores, group, valid, formula)


def rloo(scores, group, valid):
    return per_group(scores, group, valid, lambda s, _: [x - (sum(s) - x) / (len(s) - 1) for x in s])


def opo(scores, group, valid, lengths):
    def formula(s, index):
        w = [float(lengths[i]) for i in index]
        b = sum(a * x for a, x in zip(w, s)) / sum(w) if sum(w) else sum(s) / len(s)
        return [x - b for x in s]

    return per_group(scores, group, valid, formula)


def gpg(scores, group, valid, f_norm=1.0):
    counted = [float(s) for s, v in zip(scores, valid) if v]
    alpha = len(counted) / max(sum(s != 0 for s in counted), 1)
    return per_group(scores, group, valid, lambda s, _: [alpha * (x - sum(s) / len(s)) / f_norm for x in s])


def pass_at_k(scores, group, valid, *, std_normalize=True, eps=1e-6):
    def formula(s, _):
        order = sorted(s, reverse=True)
        lead = order[0] - order[1]
        if std_normalize:
            lead /= std(s, 1) + eps
        return [lead if x == order[0] and order[0] != order[1] else 0.0 for x in s]

    return per_group(scores, group, valid, formula)


def gdpo(components, group, valid, weights, eps=1e-6):
    total = np.zeros(len(group))
    for name, w in weights.items():
        column = components[name]
        ok = [bool(v) and not math.isnan(c) for v, c in zip(valid, column)]
        total += w * grpo(column, group, ok, eps=eps)
    return total


def max_rl(scores, group, valid):
    def formula(s, _):
        m = sum(s) / len(s)
        return [(x - m) / m if m > 0 else 0.0 for x in s]

    return per_group(scores, group, valid, formula)


def normalize(scores, group, valid, *, mean_level, std_level, leave_one_out, ddof, eps):
    everyone = [i for i, v in enumerate(valid) if v]
    groups = members(group, valid)
    out = np.zeros(len(scores))
    for i in everyone:
        levels = {"group": groups[int(group[i])], "batch": everyone}
        a, dead = float(scores[i]), False
        if mean_level != "none":
            s = [float(scores[j]) for j in levels[mean_level]]
            dead |= flat(s)
            if not dead:
                others = [float(scores[j]) for j in levels[mean_level] if j != i] if leave_one_out else s
                a -= sum(others) / len(others)
        if std_level != "none":
            s = [float(scores[j]) for j in levels[std_level]]
            dead |= flat(s)
            if not dead:
                a /= std(s, ddof) + eps
        out[i] = 0.0 if dead else a
    return out


def gae(rewards, values, mask, cu, *, gamma, lam, value_lam=None, alpha=None, bootstrap=None):
    def one(lam_of):
        adv, ret = np.zeros(len(rewards)), np.zeros(len(rewards))
        for s, (a, b) in enumerate(rows(cu)):
            nxt, carry = (0.0 if bootstrap is None else float(bootstrap[s])), 0.0
            for t in range(b - 1, a - 1, -1):
                if not mask[t]:
                    continue
                carry = rewards[t] + gamma * nxt - values[t] + gamma * lam_of(s) * carry
                nxt = values[t]
                adv[t], ret[t] = carry, carry + values[t]
        return adv, ret

    def length(s):
        a, b = rows(cu)[s]
        return max(sum(bool(m) for m in mask[a:b]), 1)

    adv, ret = one(lambda s: lam if alpha is None else max(0.0, 1 - 1 / (alpha * length(s))))
    if value_lam is not None:
        ret = one(lambda s: value_lam)[1]
    return adv, ret


def reward_to_go(rewards, mask, cu, gamma=1.0):
    out = np.zeros(len(rewards))
    for a, b in rows(cu):
        carry = 0.0
        for t in range(b - 1, a - 1, -1):
            if mask[t]:
                carry = rewards[t] + gamma * carry
                out[t] = carry
    return out


def remax(rewards, mask, cu, greedy):
    ret = reward_to_go(rewards, mask, cu)
    adv = ret.copy()
    for s, (a, b) in enumerate(rows(cu)):
        for t in range(a, b):
            adv[t] = ret[t] - greedy[s] if mask[t] else 0.0
    return adv, ret


def optimal_token_baseline(rewards, mask, cu, group, old_log_prob, sum_sq, weight, valid, eps=1e-8):
    ret = reward_to_go(rewards, mask, cu)
    adv = np.zeros(len(rewards))
    places, energies = [], []
    for a, b in rows(cu):
        trained = [t for t in range(a, b) if mask[t]]
        total, w = 0.0, []
        for t in trained:
            e = 1 - 2 * math.exp(old_log_prob[t]) + sum_sq[t]
            total += e if weight is None else e * weight[t] ** 2
            w.append(total)
        places.append(trained)
        energies.append(w)
    for index in members(group, valid).values():
        index = [i for i in index if places[i]]
        if len(index) < 2:
            continue
        lengths = sorted((len(places[i]) for i in index), reverse=True)
        for i in index:
            for k, t in enumerate(places[i]):
                company = [j for j in index if len(places[j]) > k]
                num = sum(ret[places[j][k]] * energies[j][k] for j in company)
                den = sum(energies[j][k] for j in company) + eps
                base = num / den
                if lengths[0] > lengths[1] and len(places[i]) == lengths[0] and k >= lengths[1]:
                    base = 0.0
                adv[t] = ret[t] - base
    return adv, ret


def whiten(x, mask):
    v = [float(a) for a, m in zip(x, mask) if m]
    if not v:
        return np.zeros(len(x))
    m = sum(v) / len(v)
    d = math.sqrt(sum((a - m) ** 2 for a in v) / (len(v) - 1) + 1e-8) if len(v) > 1 else 1.0
    return np.array([(a - m) / d if k else 0.0 for a, k in zip(x, mask)])


# ---- policy losses: x is the log-prob that carries the gradient, c the same log-prob under a stop gradient ----


def limit(x, low, high):
    return min(max(x, low), high)


def rho(x, old):
    return math.exp(limit(x - old, -20.0, 20.0))


def surrogate(r, a, low, high):
    return max(-a * r, -a * limit(r, 1 - low, 1 + high))


def clip(x, c, old, a, *, low=0.2, high=0.2, dual=3.0, delta=None):
    out = []
    for xi, oi, ai in zip(x, old, a):
        r = rho(xi, oi)
        plain = -ai * (r if delta is None else min(r, delta))
        loss = max(plain, -ai * limit(r, 1 - low, 1 + high))
        out.append(min(loss, -ai * dual) if ai < 0 and dual is not None else loss)
    return np.array(out)


def seq_mean(x, mask, cu):
    out = []
    for a, b in rows(cu):
        v = [x[t] for t in range(a, b) if mask[t]]
        out.append(sum(v) / max(len(v), 1))
    return out


def by_token(cu, fn):
    """fn(sequence, token) over all tokens."""
    return np.array([fn(s, t) for s, (a, b) in enumerate(rows(cu)) for t in range(a, b)])


def gspo(x, c, old, a, mask, cu, *, low=3e-4, high=4e-4, token=False):
    s = seq_mean([limit(ci - oi, -20, 20) for ci, oi in zip(c, old)], mask, cu)
    mean_a = seq_mean(a, mask, cu)

    def one(i, t):
        r = math.exp(min(x[t] - c[t] + s[i], 10.0))
        return surrogate(r, a[t] if token else mean_a[i], low, high)

    return by_token(cu, one)


def clip_sequence(x, c, old, a, mask, cu, *, low=3e-4, high=4e-4):
    s = seq_mean([limit(xi - oi, -20, 20) for xi, oi in zip(x, old)], mask, cu)
    mean_a = seq_mean(a, mask, cu)
    return by_token(cu, lambda i, t: surrogate(math.exp(min(s[i], 10.0)), mean_a[i], low, high))


def gmpo(x, c, old, a, mask, cu, *, low=0.2, high=0.2, weight=None):
    def lowest(t):
        d, s = limit(x[t] - old[t], -20, 20), float(np.sign(a[t]))
        return s * min(s * d, s * limit(d, -low, high))

    m = seq_mean([lowest(t) for t in range(len(x))], mask, cu)
    mean_a = seq_mean(a, mask, cu)
    w = [0.0] * len(m) if weight is None else seq_mean([math.log(max(v, 1e-10)) for v in weight], mask, cu)
    return by_token(cu, lambda i, t: -mean_a[i] * math.exp(m[i]) * math.exp(w[i]))


def vespo(x, c, old, a, mask, cu, *, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0):
    sums = [sum(limit(c[t] - old[t], -20, 20) for t in range(b, e) if mask[t]) for b, e in rows(cu)]

    def one(i, t):
        log_w = limit(sums[i], math.log(1e-8), 20.0)
        k, lam = (k_pos, lam_pos) if a[t] >= 0 else (k_neg, lam_neg)
        return -math.exp(lam + k * log_w - lam * math.exp(log_w)) * a[t] * x[t]

    return by_token(cu, one)


def each(fn):
    return lambda x, c, old, a, **k: np.array([fn(xi, ci, oi, ai, **k) for xi, ci, oi, ai in zip(x, c, old, a)])


@each
def cispo(x, c, old, a, *, low=0.2, high=0.2, cap=None):
    r = rho(c, old)
    return -(limit(r, 1 - low, 1 + high) if cap is None else min(r, cap)) * a * x


@each
def sapo(x, c, old, a, *, tau_pos=1.0, tau_neg=1.05):
    tau = tau_pos if a > 0 else tau_neg
    return -a * (1 / (1 + math.exp(-tau * (rho(x, old) - 1)))) * 4 / tau


@each
def dppo_tv(x, c, old, a, *, low=0.2, high=0.2, cap=20.0):
    moved = math.exp(c) - math.exp(old)
    keep = moved <= high if a > 0 else moved >= -low
    return -a * min(rho(c, old), cap) * x * keep


@each
def dppo_kl(x, c, old, a, *, low=0.2, high=0.2, cap=20.0):
    p, q = math.exp(c), math.exp(old)
    kappa = q * (old - c) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    keep = (kappa <= high or p <= q) if a > 0 else (kappa <= low or p >= q)
    return -a * min(rho(c, old), cap) * x * keep


@each
def reinforce(x, c, old, a):
    return -x * a


@each
def dro(x, c, old, a, *, beta):
    return -(x * a - beta / 2 * (x - old) ** 2)


@each
def topr(x, c, old, a):
    return -a * x if a >= 0 else -a * limit(rho(c, old), 0, 1) * x


@each
def cross_entropy(x, c, old, a, *, mu=1.0):
    return -mu * x if a > 0 else 0.0


def ipo_mask(x, c, old, a, rollout, *, limit_p=0.1):
    out = []
    for xi, ci, oi, ai, ri in zip(x, c, old, a, rollout):
        keep = abs(math.exp(ci) - math.exp(ri)) <= limit_p
        out.append(-ai * rho(xi, oi) * keep)
    return np.array(out)


def decoupled(x, c, old, a, rollout, *, low=0.2, high=0.2, cap=2.0, stale=None):
    out = []
    for t in range(len(x)):
        prox = old[t]
        if stale is not None:
            alpha = (stale[t] - 1) / stale[t] if stale[t] >= 1 else 0.0
            prox = rollout[t] + alpha * (c[t] - rollout[t])
        w = min(rho(prox, rollout[t]), cap)
        out.append(w * surrogate(rho(x[t], prox), a[t], low, high))
    return np.array(out)


def selected_clip(x, c, old, a, dropped, *, low=0.2, high=0.2):
    return np.array([0.0 if d else surrogate(rho(xi, oi), ai, low, high) for xi, oi, ai, d in zip(x, old, a, dropped)])


def kl_cov(x, c, old, a, chosen, *, coef=0.1):
    return np.array(
        [-ai * rho(xi, oi) + (coef * abs(xi - oi) if s else 0.0) for xi, oi, ai, s in zip(x, old, a, chosen)]
    )


def covariance(a, x, mask):
    va = [float(v) for v, m in zip(a, mask) if m]
    vx = [float(v) for v, m in zip(x, mask) if m]
    ma, mx = sum(va) / len(va), sum(vx) / len(vx)
    return np.array([(float(ai) - ma) * (float(xi) - mx) if m else 0.0 for ai, xi, m in zip(a, x, mask)])


# ---- corrections ----


def log_weight(old, rollout, mask):
    return [limit(o - r, -20, 20) if m and math.isfinite(r) else 0.0 for o, r, m in zip(old, rollout, mask)]


def correction_weight(old, rollout, mask, cu, *, level, form, cap, low, high):
    lw = log_weight(old, rollout, mask)
    known = [bool(m) and math.isfinite(r) for m, r in zip(mask, rollout)]
    out = np.ones(len(old))
    for a, b in rows(cu):
        inside = [lw[t] for t in range(a, b) if known[t]]
        for t in range(a, b):
            if not mask[t]:
                continue
            x = {"token": lw[t], "sequence": sum(inside), "geometric": sum(inside) / max(len(inside), 1)}[level]
            w = math.exp(limit(x, -20, 20))
            out[t] = min(w, cap) if form == "truncate" else (w if low <= w <= high else 0.0)
    return out


def rejection(old, rollout, mask, cu, *, statistic, level, lower=None, upper=None):
    lw = log_weight(old, rollout, mask)
    k = {"k1": lambda v: v, "k2": lambda v: v * v / 2, "k3": lambda v: math.exp(v) - 1 - v}[statistic]
    lo = -math.inf if lower is None else math.log(lower)
    hi = math.inf if upper is None else (math.log(upper) if statistic == "k1" else upper)
    keep = np.zeros(len(old), dtype=bool)
    for a, b in rows(cu):
        inside = [k(lw[t]) for t in range(a, b) if mask[t]]
        for t in range(a, b):
            if not mask[t]:
                continue
            if level == "token":
                keep[t] = lo <= k(lw[t]) <= hi
            elif level == "seq_max":
                keep[t] = max(inside) <= hi and min(inside) >= lo
            else:
                v = sum(inside) / (1 if level == "seq_sum" else len(inside))
                keep[t] = lo <= v <= hi
    return keep


def kl(x, kind):
    """Value and derivative with respect to log_prob of a KL estimator at x = log_prob - ref_log_prob."""
    base = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.rstrip("+"), kind.rstrip("+"))
    y = limit(-x, -20, 20)
    k3 = math.exp(y) - y - 1
    value = {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": limit(k3, -10, 10)}[base]
    inside = abs(x) < 20 and k3 < 10
    slope = {"k1": 1.0, "abs": float(np.sign(x)), "k2": x, "k3": (1 - math.exp(-x)) if inside else 0.0}[base]
    return value, (x if kind.endswith("+") else slope)

"""The one division: loss = sum_i scale_i sum_t m l_t, with scale [S] from counts of the whole optimizer batch.

    token-mean               1 / N_tok                  seq-mean-token-mean      1 / (N_seq L_i)
    token-sum                1                          seq-mean-token-sum-norm  1 / (N_seq C)
    seq-mean-token-sum       1 / N_seq                  prompt-mean              1 / (N_prompt x tokens of the group)

Counts are over all ranks, after every filter and rejection; N_seq and N_prompt count what has a token left.
"""

from __future__ import annotations

from fastrl.kernels import aggregate, aggregation_scale

__all__ = ["MODES", "aggregate", "aggregation_scale"]

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "prompt-mean",
)

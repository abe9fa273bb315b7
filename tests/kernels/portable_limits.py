"""How far the portable engine may be from float64: what its roundings come to, and a fifth for the sample.

A rounding to ``bits`` significant bits errs by up to half a unit in the last place, evenly: 2**(1 - bits) / sqrt(12)
in [1, 2), where numbers have a root mean square of 1.47 (log-uniform) to 1.53 (uniform). The output is rounded to
BF16's 8 bits. Weights are rounded to BF16's 8 bits with a BF16 cache and to FP16's 11 with an FP8 cache; a weighted sum
of independent values errs by as much, relatively, as one weight. Q, K, V and the sums add nothing that would show.
"""

import math

import torch


def rounding(bits: int) -> float:
    """NRMS of numbers rounded to ``bits`` significant bits."""
    return 2.0 ** (1 - bits) / math.sqrt(12) / 1.47


MOST_NRMS = {
    torch.float8_e4m3fn: 1.2 * math.hypot(rounding(8), rounding(11)),
    torch.bfloat16: 1.2 * math.hypot(rounding(8), rounding(8)),
}
"""By the cache's dtype: 0.19 % and 0.26 %."""

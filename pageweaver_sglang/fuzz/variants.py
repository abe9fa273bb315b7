"""What is tried: engines, the calls that each takes, and how each rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Arithmetic:
    """How an engine rounds, as far as a bound on its error must know; all relative, at most.

    Attributes:
        weights: error of a softmax weight.
        exact_weights: the same where every weight is a number that the engine holds exactly.
        logits: error of a weight that adding up its logit makes, per unit of a logit's standard deviation.
        q: error of a weight that rounding Q makes, likewise.
        output: error of a row that rounding its elements makes.
        sums: error of a row that adding up the values makes, per page that it sees.
    """

    weights: float
    exact_weights: float
    logits: float
    q: float
    output: float
    sums: float


# E4M3 has 3 bits behind the point: a weight is off by 1/17 of itself at most. Rows of V are not quite orthogonal, so
# that errors of two weights can add up to a little more than the root of their squares: a third is added. Q is off by
# 2.6 % (root of the mean square), a logit of deviation 1 by as much, here times 6. Tensor cores cut products and sums
# some 13 bits behind the leading one, four times a page and more; V has no mean here, so that little is lost.
FP8 = Arithmetic(weights=0.08, exact_weights=0.004, logits=0.002, q=0.15, output=0.006, sums=8e-4)
# Weights in FP16, their first four bits and the rest (rounded) as two E4M3 numbers; Q's eight bits in two, too, but for
# elements far below a row's largest; a page's sum is added in FP32.
HIGH = Arithmetic(weights=0.012, exact_weights=0.004, logits=0.002, q=0.01, output=0.006, sums=2e-4)
# FP16 or BF16 weights (half a unit of 8 bits at worst), BF16 queries as they are, sums in FP32.
SIXTEEN_BITS = Arithmetic(weights=0.006, exact_weights=0.002, logits=2e-4, q=0.0, output=0.006, sums=1e-4)
# The reference engine: float64, rounded to BF16 at the end (half a unit of 8 bits).
FLOAT64 = Arithmetic(weights=1e-9, exact_weights=1e-9, logits=0.0, q=0.0, output=0.004, sums=0.0)


@dataclass(frozen=True)
class Shape:
    """What an engine is compiled for, or what its calls have in common."""

    k: int | None = None
    """Picks of a query; None: any number up to 16."""
    ratio: int = 16
    """Query heads per KV head."""
    page_size: int = 128
    head_dim: int = 128
    cache_dtype: torch.dtype = E4M3


@dataclass(frozen=True)
class Variant:
    """An engine to try.

    Attributes:
        config: settings that select it.
        arithmetic: how it rounds.
        twin: the variant that gives the same bits, if any.
        shapes: of its calls; few, where each is compiled apart.
        hopper: whether it needs a Hopper GPU.
        value_tiles: whether it reads V from tiles.
    """

    config: dict[str, str]
    arithmetic: Arithmetic
    twin: str | None = None
    shapes: tuple[Shape, ...] = (Shape(),)
    hopper: bool = True
    value_tiles: bool = False
    compiled_apart: bool = field(default=False)
    """Whether every shape, and scales in tensors or not, are compiled apart."""


_HOPPER_SHAPES = (Shape(), Shape(ratio=8), Shape(ratio=4), Shape(ratio=13))

_HOPPER_BF16_SHAPES = tuple(replace(shape, cache_dtype=BF16) for shape in _HOPPER_SHAPES)

_PORTABLE_SHAPES = (
    Shape(k=16),
    Shape(k=16, page_size=64, cache_dtype=BF16),
    Shape(k=16, ratio=8, cache_dtype=BF16),
    Shape(k=7, ratio=4, page_size=64),
    Shape(k=16, ratio=1, head_dim=64),
    Shape(k=3, ratio=12, page_size=64, head_dim=64, cache_dtype=BF16),
)

VARIANTS = {
    "stream": Variant({"engine": "stream"}, FP8, twin="union8", shapes=_HOPPER_SHAPES, value_tiles=True),
    "union8": Variant({"engine": "union8"}, FP8, twin="stream", shapes=_HOPPER_SHAPES),
    "high": Variant({"engine": "stream", "precision": "high"}, HIGH, shapes=_HOPPER_SHAPES, value_tiles=True),
    "bf16": Variant({"engine": "stream"}, SIXTEEN_BITS, shapes=_HOPPER_BF16_SHAPES),
    "portable": Variant(
        {"engine": "portable"}, SIXTEEN_BITS, shapes=_PORTABLE_SHAPES, hopper=False, compiled_apart=True
    ),
}


def available(device: torch.device) -> tuple[str, ...]:
    """The variants that run on a device; on the CPU all of them, served by the reference engine."""
    if device.type != "cuda":
        return tuple(VARIANTS)
    from ..cuda.support import COMPUTE_CAPABILITY

    hopper = torch.cuda.get_device_capability(device) == COMPUTE_CAPABILITY
    return tuple(name for name, one in VARIANTS.items() if hopper or not one.hopper)

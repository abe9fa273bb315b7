"""Settings: defaults, then a YAML profile, then ``PAGEWEAVER_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ._paths import configs_dir

ENV_PREFIX = "PAGEWEAVER_"
# Variables with the prefix that are not settings: the profile to read, where built kernels are kept, which nvcc to use.
RESERVED_ENV = ("PAGEWEAVER_CONFIG", "PAGEWEAVER_CACHE_DIR", "PAGEWEAVER_NVCC")


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of range; the message names it and what is allowed."""


def _numbers(value: Any) -> Any:
    """Accept 3, ``3,7`` (as a variable has it) and [3, 7] for a tuple of integers >= 0; leave None as it is."""
    if isinstance(value, str):
        try:
            value = [int(part) for part in value.split(",")]
        except ValueError:
            raise ValueError("not a list of integers") from None
    if isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple) and value and all(type(number) is int and number >= 0 for number in value):
        return tuple(value)
    if value is None:
        return None
    raise ValueError("not a list of integers")


Numbers = Annotated[tuple[int, ...] | None, BeforeValidator(_numbers)]


class Config(BaseModel):
    """Settings of the attention function and of the SGLang backend; frozen.

    The ``description`` of a field says what is allowed, in the words of the error messages.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mode: Literal["native", "union8", "pageweaver", "auto"] = Field(
        "auto", description="native, union8, pageweaver or auto"
    )
    """SGLang's own Step 3 (plugin only), unions in the original order, unions of regrouped queries, or whichever of
    these two costs less by what earlier calls saved."""
    engine: Literal["stream", "union8", "portable"] = Field("stream", description="stream, union8 or portable")
    """Attention kernel: pages streamed to independent warpgroups, the paper's two-CTA cluster (the same bits, for FP8
    caches only; both are Hopper's and mean ``portable`` elsewhere), or the one in Triton, for any CUDA GPU. ``stream``
    leaves to ``portable`` what it does not cover: heads of 64, and from Python pages of 64."""
    precision: Literal["fp8", "high"] = Field("fp8", description="fp8 or high")
    """Of an FP8 cache: Q and the softmax weights as one E4M3 value each, or as the sum of two; two in the engine
    ``stream``. ``union8`` has one precision. ``portable`` computes in 16 bits in either, and so does ``stream`` with a
    BF16 cache."""
    window: Literal[64, 128] = Field(64, description="64 or 128")
    """Consecutive queries of one request among which one regroup chooses."""
    guard: Literal["none", "window"] = Field("window", description="none or window")
    """``window`` keeps a window's original order unless regrouping lowers its page visits, counted in
    the order's own groups (of 8 on Hopper)."""
    capacity: int = Field(512, ge=1, le=512, description="an integer in 1..512")
    """Logical pages that regrouping's direct bitmap holds."""
    overflow: Literal["rename", "original"] = Field("rename", description="rename or original")
    """Past ``capacity``: rename pages inside each window, or keep the request's original order as the paper does."""
    dense_backend: str | None = Field(None, min_length=1, description="the name of an SGLang backend, or null")
    """SGLang's backend for the dense layers; ``None`` is what SGLang would choose on this GPU."""
    verify_every: int = Field(0, ge=0, description="an integer >= 0 (0 = off)")
    """Every n-th Step 3 call is also computed by SGLang's own path and the difference logged; 0 = never."""
    on_error: Literal["native", "raise"] = Field("native", description="native or raise")
    """An exception inside PageWeaver: SGLang's own Step 3 serves from then on, or (for tests) it is raised."""
    fallback_engine: Literal["native", "flashinfer-xqa"] = Field("native", description="native or flashinfer-xqa")
    """Who serves the calls that the kernels don't cover: SGLang's own Step 3, or FlashInfer's XQA where it does."""
    control_dir: str | None = Field(None, min_length=1, description="a folder, or null (one of the user's)")
    """Where ``pageweaver switch`` and a running server meet; ``None`` is a folder of the user in the temporary one."""
    timing: bool = Field(False, description="true or false")
    """Log how long Step 3 takes on the GPU, in every mode; ``pageweaver ab`` switches it on where it needs it."""
    capture_dir: str | None = Field(None, min_length=1, description="a folder, or null (off)")
    """Where Step 3 calls are recorded; ``None`` records nothing, whatever the other ``capture_*`` settings say."""
    capture_layers: Numbers = Field(None, description="layer ids such as 3,7, or null (all)")
    """Layers whose calls are recorded."""
    capture_chunks: Numbers = Field(None, description="chunk numbers such as 0,3, or null (all)")
    """Prefill chunks to record: a request's prefix divided by SGLang's chunk size, rounded down."""
    capture_every: int = Field(1, ge=1, description="an integer >= 1")
    """Every n-th call of a layer that fits the other conditions is recorded."""
    capture_activations: bool = Field(False, description="true or false")
    """Also record Q, the output and the K/V pages that were picked."""
    capture_max_mb: int = Field(1024, ge=1, description="an integer >= 1")
    """Recording ends when a process has written this many MB (10**6 bytes)."""
    capture_max_calls: int = Field(1000, ge=1, description="an integer >= 1")
    """Recording ends when a process has written this many calls."""
    capture_max_seconds: int = Field(600, ge=1, description="an integer >= 1")
    """Recording ends this many seconds after a process has recorded its first call."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_message("Config", error)) from error

    @model_validator(mode="after")
    def _precision_fits_the_engine(self) -> Config:
        if self.precision == "high" and self.engine == "union8":
            raise ValueError(
                "precision: got 'high' with engine 'union8'; allowed: fp8, or high with another engine (union8 is the "
                "paper's kernel and rounds Q and the weights to FP8)"
            )
        return self

    @property
    def regroup_capacity(self) -> int | None:
        """The ``capacity`` argument of ``regroup`` that these settings mean: None when pages get renamed past it."""
        return self.capacity if self.overflow == "original" else None


def load_config(path_or_profile: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Read the settings: defaults, then a YAML profile, then the environment.

    Args:
        path_or_profile: a YAML file (anything with a path separator or the suffix ``.yaml`` or ``.yml``), or the name
            of a profile in ``configs/``. ``None`` takes ``PAGEWEAVER_CONFIG``, or no profile where that is not set.
        env: the environment, by default ``os.environ``. ``PAGEWEAVER_<FIELD>`` overrides a field, its value read as
            YAML; an empty value counts as not set.

    Raises:
        ConfigError: no such profile, a file that is not a mapping, or a setting that is unknown, of the wrong type or
            out of range (the message names the key, the value and what is allowed).
    """
    env = os.environ if env is None else env
    chosen = path_or_profile if path_or_profile is not None else env.get("PAGEWEAVER_CONFIG") or None
    values: dict[str, Any] = {}
    if chosen is not None:
        path = _profile_path(chosen)
        values = _read_profile(path)
        # The file on its own first, so that a message names the file or the variable that is wrong.
        _validate(str(path), values)
    overrides = _env_values(env)
    for name, value in overrides.items():
        _validate(None, {name: value})
    return Config(**(values | overrides))


def _profile_path(chosen: str | os.PathLike[str]) -> Path:
    text = os.fspath(chosen)
    if os.sep in text or text.endswith((".yaml", ".yml")):
        try:
            return Path(text).expanduser()
        except RuntimeError as error:  # a user who does not exist
            raise ConfigError(f"{text}: cannot be read: {error}") from error
    path = configs_dir() / f"{text}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(entry.stem for entry in configs_dir().glob("*.yaml")))
        raise ConfigError(f"load_config: no profile named {text!r}; allowed: {names}, or a path to a YAML file")
    return path


def _read_profile(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # also wrong UTF-8, and YAML nested without end
        raise ConfigError(f"{path}: not a YAML file: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: must be a mapping of settings, got {type(content).__name__}")
    return content


def _env_values(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    allowed = {ENV_PREFIX + name.upper(): name for name in Config.model_fields}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_ENV:
            continue
        if variable not in allowed:
            names = ", ".join([*allowed, *RESERVED_ENV])
            raise ConfigError(f"{variable}: unknown variable; allowed: {names}")
        if env[variable]:
            try:
                values[allowed[variable]] = yaml.safe_load(env[variable])
            except (ValueError, RecursionError, yaml.YAMLError):
                values[allowed[variable]] = env[variable]
    return values


def _validate(source: str | None, values: dict[str, Any]) -> None:
    """Raise ConfigError that names ``source`` (None: the environment variable itself) for every problem."""
    try:
        Config(**values)
    except ConfigError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        raise ConfigError(_message(source, error.__cause__)) from None


def _message(source: str | None, error: ValidationError) -> str:
    fields = Config.model_fields
    problems = []
    for detail in error.errors(include_url=False):
        if not detail["loc"]:  # settings that do not go together
            problems.append(f"{source}: {detail['ctx']['error']}")
            continue
        key = str(detail["loc"][0])
        if key not in fields:
            problems.append(f"{source}: unknown key {key!r}; allowed: {', '.join(fields)}")
            continue
        place = f"{ENV_PREFIX}{key.upper()}" if source is None else f"{source}: {key}"
        problems.append(f"{place}: got {detail['input']!r}; allowed: {fields[key].description}")
    return "; ".join(problems)

"""Settings of any type and value, from Python, a profile or the environment: taken as allowed, or refused by name."""

from __future__ import annotations

import typing

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pageweaver_sglang as pw

FIELDS = tuple(pw.Config.model_fields)
SCALARS = st.none() | st.booleans() | st.integers(-5, 600) | st.floats(allow_nan=False) | st.text(max_size=8)
# Words that settings know, for keys that may not know them.
WORDS = sorted(
    {
        word
        for field in pw.Config.model_fields.values()
        for word in typing.get_args(field.annotation)
        if isinstance(word, str)
    }
)
VALUES = (
    SCALARS | st.sampled_from(WORDS) | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS)
)
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def allowed(key: str, value: object) -> bool:
    """Whether a setting may have a value, read from its description."""
    words = pw.Config.model_fields[key].description
    if words.startswith("an integer in "):
        low, _, high = words.removeprefix("an integer in ").partition("..")
        return type(value) is int and int(low) <= value <= int(high)
    if words.startswith("an integer >= "):
        return type(value) is int and value >= int(words.removeprefix("an integer >= ").split()[0])
    if words == "true or false":
        return type(value) is bool
    if words == "64 or 128":
        return not isinstance(value, bool) and isinstance(value, int | float) and value in (64, 128)
    if " such as " in words:
        return value is None or is_numbers(value)
    if value is None:
        return "null" in words
    if words.startswith(("a folder", "the name of")):
        return isinstance(value, str) and value != ""
    return isinstance(value, str) and value in words.replace(" or ", ", ").split(", ")


def is_numbers(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = [int(part) for part in value.split(",")]
        except ValueError:
            return False
    if type(value) is int:
        value = [value]
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def check(key: str, value: object, read) -> None:
    """``read()`` gives the setting that ``value`` means, or refuses it and says what is allowed."""
    if allowed(key, value):
        config = read()
        kept = getattr(config, key)
        assert kept == value or (isinstance(kept, tuple) and is_numbers(value))
    else:
        with pytest.raises(pw.ConfigError, match="allowed: ") as caught:
            read()
        assert pw.Config.model_fields[key].description in str(caught.value)


@given(key=st.sampled_from(FIELDS), value=VALUES)
@QUICK
def test_a_value_in_python(key, value):
    check(key, value, lambda: pw.Config(**{key: value}))


@given(key=st.sampled_from(FIELDS), value=VALUES)
@QUICK
def test_a_value_in_a_profile(key, value, tmp_path):
    path = tmp_path / "drawn.yaml"
    text = yaml.safe_dump({key: value})
    path.write_text(text, encoding="utf-8")
    check(key, yaml.safe_load(text)[key], lambda: pw.load_config(path, env={}))


@given(key=st.sampled_from(FIELDS), text=st.text(max_size=12) | st.sampled_from([*WORDS, "64", "3,7", "true", "null"]))
@QUICK
def test_a_variable(key, text):
    """Whatever a variable holds, it is read as YAML, and as plain text where it is none."""
    try:
        value = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        value = text
    if text == "":
        assert pw.load_config(env={f"PAGEWEAVER_{key.upper()}": text}) == pw.Config()
        return
    check(key, value, lambda: pw.load_config(env={f"PAGEWEAVER_{key.upper()}": text}))


@given(
    name=st.text(st.sampled_from("abcdefgmnoptuwx_"), min_size=1, max_size=12).filter(lambda name: name not in FIELDS)
)
@QUICK
def test_an_unknown_name(name):
    with pytest.raises(pw.ConfigError, match=f"unknown key '{name}'"):
        pw.Config(**{name: 1})

"""Settings: defaults, profiles, environment, and errors that name the key, the value and what is allowed."""

from __future__ import annotations

import pytest
import yaml

import pageweaver_sglang as pw
from pageweaver_sglang._paths import configs_dir

FIELDS = {
    "mode": "auto",
    "engine": "stream",
    "precision": "fp8",
    "window": 64,
    "guard": "window",
    "capacity": 512,
    "overflow": "rename",
    "dense_backend": None,
    "verify_every": 0,
    "on_error": "native",
    "fallback_engine": "native",
    "control_dir": None,
    "timing": False,
    "capture_dir": None,
    "capture_layers": None,
    "capture_chunks": None,
    "capture_every": 1,
    "capture_activations": False,
    "capture_max_mb": 1024,
    "capture_max_calls": 1000,
    "capture_max_seconds": 600,
}


@pytest.fixture
def profile(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults():
    assert pw.load_config(env={}).model_dump() == pw.Config().model_dump() == FIELDS
    assert pw.load_config("default", env={}) == pw.Config()


def test_the_default_profile_spells_every_setting_out():
    assert yaml.safe_load((configs_dir() / "default.yaml").read_text()) == FIELDS


def test_profiles():
    assert sorted(path.stem for path in configs_dir().glob("*.yaml")) == ["default", "native", "paper", "union8"]
    paper = pw.load_config("paper", env={})
    assert paper == pw.Config(
        mode="pageweaver", engine="union8", window=128, capacity=512, overflow="original", guard="none"
    )
    assert pw.load_config("union8", env={}) == pw.Config(mode="union8")
    assert pw.load_config("native", env={}) == pw.Config(mode="native")


def test_capacity_as_an_argument_of_regroup():
    assert pw.Config(capacity=100).regroup_capacity is None
    assert pw.Config(capacity=100, overflow="original").regroup_capacity == 100


def test_environment_overrides_the_profile(profile):
    path = profile("window: 128\nguard: none\n")
    env = {"PAGEWEAVER_CONFIG": str(path), "PAGEWEAVER_GUARD": "window", "HOME": "/", "PAGEWEAVERX": "1"}
    assert pw.load_config(env=env) == pw.Config(window=128, guard="window")


def test_every_setting_has_a_variable():
    env = {
        "PAGEWEAVER_MODE": "union8",
        "PAGEWEAVER_ENGINE": "stream",
        "PAGEWEAVER_PRECISION": "high",
        "PAGEWEAVER_WINDOW": "64",
        "PAGEWEAVER_GUARD": "none",
        "PAGEWEAVER_CAPACITY": "77",
        "PAGEWEAVER_OVERFLOW": "original",
        "PAGEWEAVER_DENSE_BACKEND": "fa3",
        "PAGEWEAVER_VERIFY_EVERY": "10",
        "PAGEWEAVER_ON_ERROR": "raise",
        "PAGEWEAVER_FALLBACK_ENGINE": "flashinfer-xqa",
        "PAGEWEAVER_CONTROL_DIR": "/tmp/control",
        "PAGEWEAVER_TIMING": "true",
        "PAGEWEAVER_CAPTURE_DIR": "/tmp/calls",
        "PAGEWEAVER_CAPTURE_LAYERS": "3,7",
        "PAGEWEAVER_CAPTURE_CHUNKS": "2",
        "PAGEWEAVER_CAPTURE_EVERY": "5",
        "PAGEWEAVER_CAPTURE_ACTIVATIONS": "true",
        "PAGEWEAVER_CAPTURE_MAX_MB": "64",
        "PAGEWEAVER_CAPTURE_MAX_CALLS": "9",
        "PAGEWEAVER_CAPTURE_MAX_SECONDS": "60",
    }
    values = ["union8", "stream", "high", 64, "none", 77, "original", "fa3", 10, "raise", "flashinfer-xqa"]
    values += ["/tmp/control", True, "/tmp/calls", (3, 7), (2,), 5, True, 64, 9, 60]
    expected = dict(zip(FIELDS, values, strict=True))
    assert pw.load_config(env=env).model_dump() == expected
    assert len(env) == len(FIELDS)


@pytest.mark.parametrize("value", [(3, 7), [3, 7], "3,7", "3, 7"])
def test_lists_of_numbers(value):
    assert pw.Config(capture_layers=value).capture_layers == (3, 7)


def test_a_list_of_numbers_in_a_profile(profile):
    assert pw.load_config(profile("capture_layers: [3, 7]\ncapture_chunks: 2"), env={}) == pw.Config(
        capture_layers=(3, 7), capture_chunks=(2,)
    )
    with pytest.raises(pw.ConfigError, match=r"capture_layers: got \[\]; allowed: layer ids"):
        pw.load_config(profile("capture_layers: []"), env={})


def test_an_argument_goes_before_the_variable_that_names_a_profile(profile):
    env = {"PAGEWEAVER_CONFIG": "union8"}
    assert pw.load_config(env=env).mode == "union8"
    assert pw.load_config("paper", env=env).mode == "pageweaver"
    assert pw.load_config(profile("window: 128"), env=env) == pw.Config(window=128)


def test_an_empty_variable_is_not_set():
    assert pw.load_config(env={"PAGEWEAVER_WINDOW": "", "PAGEWEAVER_CONFIG": ""}) == pw.Config()


def test_the_process_environment_is_read_when_called(monkeypatch):
    monkeypatch.setenv("PAGEWEAVER_WINDOW", "128")
    assert pw.load_config().window == 128


def test_variables_that_are_no_settings():
    env = {"PAGEWEAVER_CACHE_DIR": "/tmp/x", "PAGEWEAVER_NVCC": "/usr/bin/nvcc"}
    assert pw.load_config(env=env) == pw.Config()


BAD_VALUES = [
    ("mode", "fast", "native, union8, pageweaver or auto"),
    ("mode", None, "native, union8, pageweaver or auto"),
    ("precision", "bf16", "fp8 or high"),
    ("window", 32, "64 or 128"),
    ("window", "64", "64 or 128"),
    ("window", 64.5, "64 or 128"),
    ("guard", "group", "none or window"),
    ("guard", False, "none or window"),
    ("capacity", 0, r"an integer in 1\.\.512"),
    ("capacity", 513, r"an integer in 1\.\.512"),
    ("capacity", True, r"an integer in 1\.\.512"),
    ("capacity", 2.0, r"an integer in 1\.\.512"),
    ("overflow", "drop", "rename or original"),
    ("dense_backend", 3, "the name of an SGLang backend, or null"),
    ("dense_backend", "", "the name of an SGLang backend, or null"),
    ("verify_every", -1, r"an integer >= 0"),
    ("verify_every", "often", r"an integer >= 0"),
    ("on_error", "ignore", "native or raise"),
    ("fallback_engine", "xqa", "native or flashinfer-xqa"),
    ("control_dir", "", r"a folder, or null"),
    ("timing", 1, "true or false"),
    ("capture_dir", "", "a folder, or null"),
    ("capture_layers", "3,x", "layer ids such as 3,7, or null"),
    ("capture_layers", -1, "layer ids such as 3,7, or null"),
    ("capture_chunks", True, "chunk numbers such as 0,3, or null"),
    ("capture_chunks", 1.5, "chunk numbers such as 0,3, or null"),
    ("capture_every", 0, "an integer >= 1"),
    ("capture_activations", 1, "true or false"),
    ("capture_max_mb", 0, "an integer >= 1"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), BAD_VALUES)
def test_bad_value_in_python(key, value, allowed):
    with pytest.raises(pw.ConfigError, match=rf"^Config: {key}: got {value!r}; allowed: {allowed}"):
        pw.Config(**{key: value})


@pytest.mark.parametrize(("key", "value", "allowed"), BAD_VALUES)
def test_bad_value_in_a_profile(profile, key, value, allowed):
    path = profile(yaml.safe_dump({key: value}))
    with pytest.raises(pw.ConfigError, match=rf"mine\.yaml: {key}: got {value!r}; allowed: {allowed}"):
        pw.load_config(path, env={})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PAGEWEAVER_WINDOW", "32", "got 32; allowed: 64 or 128"),
        ("PAGEWEAVER_WINDOW", "wide", "got 'wide'; allowed: 64 or 128"),
        ("PAGEWEAVER_MODE", "Union8", "got 'Union8'; allowed: native, union8, pageweaver or auto"),
        ("PAGEWEAVER_CAPACITY", "1e3", r"allowed: an integer in 1\.\.512"),
        ("PAGEWEAVER_VERIFY_EVERY", "true", "got True; allowed: an integer >= 0"),
        ("PAGEWEAVER_GUARD", "{", "got '{'; allowed: none or window"),
        ("PAGEWEAVER_GUARD", "[" * 5000, r"got '\[\["),
        ("PAGEWEAVER_CAPACITY", "1" + "0" * 5000, "got '1000"),
    ],
)
def test_bad_variable(variable, value, message):
    with pytest.raises(pw.ConfigError, match=f"^{variable}: .*{message}"):
        pw.load_config(env={variable: value})


def test_high_precision_is_not_the_paper_kernels(profile):
    assert pw.Config(precision="high").engine == "stream"
    assert pw.Config(precision="high", engine="portable").precision == "high"
    assert pw.Config(precision="high", mode="union8").precision == "high"
    message = "precision: got 'high' with engine 'union8'; allowed: fp8, or high with another engine"
    with pytest.raises(pw.ConfigError, match=f"^Config: {message}"):
        pw.Config(engine="union8", precision="high")
    with pytest.raises(pw.ConfigError, match=rf"mine\.yaml: {message}"):
        pw.load_config(profile("engine: union8\nprecision: high"), env={})
    with pytest.raises(pw.ConfigError, match=f"^Config: {message}"):
        pw.load_config("paper", env={"PAGEWEAVER_PRECISION": "high"})


def test_unknown_names_list_the_known_ones(profile):
    known = ", ".join(FIELDS)
    with pytest.raises(pw.ConfigError, match=f"^Config: unknown key 'windows'; allowed: {known}"):
        pw.Config(windows=64)
    with pytest.raises(pw.ConfigError, match=rf"mine\.yaml: unknown key 'windows'; allowed: {known}"):
        pw.load_config(profile("windows: 64"), env={})
    with pytest.raises(pw.ConfigError, match=r"^PAGEWEAVER_WINDOWS: unknown variable; allowed: .*PAGEWEAVER_WINDOW, "):
        pw.load_config(env={"PAGEWEAVER_WINDOWS": "64"})


def test_a_bad_profile_is_an_error_even_where_the_environment_overrides_it(profile):
    with pytest.raises(pw.ConfigError, match=r"mine\.yaml: window: got 5"):
        pw.load_config(profile("window: 5"), env={"PAGEWEAVER_WINDOW": "64"})


def test_all_problems_are_named_at_once():
    with pytest.raises(pw.ConfigError, match=r"window: got 1; .*capacity: got 0; .*unknown key 'x'"):
        pw.Config(window=1, capacity=0, x=1)


def test_profiles_that_cannot_be_read(profile, tmp_path):
    with pytest.raises(pw.ConfigError, match="no profile named 'papers'; allowed: default, native, paper, union8"):
        pw.load_config("papers", env={})
    with pytest.raises(pw.ConfigError, match=r"none\.yaml: cannot be read"):
        pw.load_config(tmp_path / "none.yaml", env={})
    with pytest.raises(pw.ConfigError, match="must be a mapping of settings, got list"):
        pw.load_config(profile("[1, 2]"), env={})
    with pytest.raises(pw.ConfigError, match="not a YAML file"):
        pw.load_config(profile("window: [64"), env={})
    with pytest.raises(pw.ConfigError, match="must be a mapping"):
        pw.load_config(profile("1: 2"), env={})
    assert pw.load_config(profile("# nothing\n"), env={}) == pw.Config()
    with pytest.raises(pw.ConfigError, match=r"^~no-such-user/x\.yaml: cannot be read"):
        pw.load_config("~no-such-user/x.yaml", env={})
    with pytest.raises(pw.ConfigError, match="not a YAML file"):
        pw.load_config(profile("[" * 5000), env={})
    with pytest.raises(pw.ConfigError, match="not a YAML file"):
        pw.load_config(profile("window: 1" + "0" * 5000), env={})
    with pytest.raises(pw.ConfigError, match="not a YAML file: embedded null byte"):
        pw.load_config("a\0.yaml", env={})


def test_a_profile_cannot_run_code(profile):
    with pytest.raises(pw.ConfigError, match="not a YAML file"):
        pw.load_config(profile("mode: !!python/object/apply:os.getcwd []"), env={})


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        pw.Config().window = 64


def test_config_error_is_a_value_error():
    assert issubclass(pw.ConfigError, ValueError)

"""What holds for all tests."""

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # some GPU tests run without it
    pass
else:
    # Nothing depends on how fast the machine is.
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("pageweaver", settings.default, **slow)
    settings.load_profile("pageweaver")

"""How the tests run: few examples and the same ones every time; `--hypothesis-profile=explore` looks for new ones."""

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores already
    torch.set_num_threads(1)

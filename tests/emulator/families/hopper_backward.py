"""The Hopper backward for a broadcast query, held to float64 by the cases of its test; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/hopper_backward.py
"""

from pathlib import Path

from jaggedtensor.testing.mutants import load_module

FAMILY = load_module(str(Path(__file__).parents[1] / "test_hopper_backward.py")).FAMILY

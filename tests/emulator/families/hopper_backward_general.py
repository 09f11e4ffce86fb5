"""The general Hopper backward, held to float64 by the cases of its test; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/hopper_backward_general.py
"""

from pathlib import Path

from jaggedtensor.testing.mutants import load_module

FAMILY = load_module(str(Path(__file__).parents[1] / "test_hopper_backward_general.py")).FAMILY

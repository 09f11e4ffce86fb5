"""Runs Gluon's warp-specialised kernels on a CPU, under many interleavings, and judges them. docs/emulator.md explains.

report = emulate(kernel, grid, *arguments, num_warps=4, target="sm90", order="random", seed=3, BLOCK=128)
report.raise_if_bad()
"""

from jaggedtensor.kernels.emulator.errors import KINDS as KINDS
from jaggedtensor.kernels.emulator.errors import EmulationError as EmulationError
from jaggedtensor.kernels.emulator.errors import Finding as Finding
from jaggedtensor.kernels.emulator.errors import UnknownBuiltin as UnknownBuiltin
from jaggedtensor.kernels.emulator.language.control import teach_assembly as teach_assembly
from jaggedtensor.kernels.emulator.report import Report as Report
from jaggedtensor.kernels.emulator.roles import ORDERS as ORDERS
from jaggedtensor.kernels.emulator.run import emulate as emulate

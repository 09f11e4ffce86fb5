"""Sequences of different lengths without padding, and attention that is fast on them."""

from jaggedtensor import interop as interop  # register with torch
from jaggedtensor import torch_functions as torch_functions
from jaggedtensor.interop import collate as collate
from jaggedtensor.layout import JaggedLayout as JaggedLayout
from jaggedtensor.ops.attention import attend as attend
from jaggedtensor.ops.fp8 import attend_fp8 as attend_fp8
from jaggedtensor.ops.fp8 import dequantize_fp8 as dequantize_fp8
from jaggedtensor.ops.fp8 import quantize_fp8 as quantize_fp8
from jaggedtensor.schedules import ScheduleKind as ScheduleKind
from jaggedtensor.schedules import TileSchedule as TileSchedule
from jaggedtensor.tensor import JaggedTensor as JaggedTensor
from jaggedtensor.version import __version__ as __version__

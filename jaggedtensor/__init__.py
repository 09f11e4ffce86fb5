"""Sequences of different lengths without padding, and attention that is fast on them."""

from jaggedtensor.layout import JaggedLayout as JaggedLayout
from jaggedtensor.ops.attention import attend as attend
from jaggedtensor.tensor import JaggedTensor as JaggedTensor
from jaggedtensor import interop as interop, torch_functions as torch_functions  # noqa: I001  # register with torch
from jaggedtensor.interop import collate as collate

from jaggedtensor.version import __version__ as __version__

"""The launchers of the portable kernels."""

from jaggedtensor.kernels.portable.attention_bwd.launch import backward as backward
from jaggedtensor.kernels.portable.attention_fwd.launch import forward as forward

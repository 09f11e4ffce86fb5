"""The launchers of the Blackwell kernels."""

from jaggedtensor.kernels.blackwell.attention_bwd_broadcast.launch import backward as backward
from jaggedtensor.kernels.blackwell.attention_fwd.launch import forward as forward

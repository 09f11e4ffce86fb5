"""The launchers of the Hopper kernels."""

from jaggedtensor.kernels.hopper.attention_bwd_broadcast.launch import backward as backward
from jaggedtensor.kernels.hopper.attention_fwd.launch import forward as forward

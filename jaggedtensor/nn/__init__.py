"""Modules that take and give JaggedTensors.

torch's own act on them token by token already: `nn.Linear`, `nn.LayerNorm`, `nn.RMSNorm`, `nn.Embedding`, `nn.Dropout`,
activations and losses need no counterpart here.
"""

from jaggedtensor.nn.attention import JaggedAttention as JaggedAttention
from jaggedtensor.nn.move import from_torch as from_torch
from jaggedtensor.nn.move import to_torch as to_torch
from jaggedtensor.nn.pooling import PMAPooling as PMAPooling
from jaggedtensor.nn.rotary import Rotary as Rotary
from jaggedtensor.nn.transformer import JaggedTransformer as JaggedTransformer
from jaggedtensor.nn.transformer import JaggedTransformerLayer as JaggedTransformerLayer

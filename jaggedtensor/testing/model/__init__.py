"""A model of how long a kernel takes, by the events of its emulation; it measures nothing (docs/kernels/model.md).

>>> from jaggedtensor.testing.model import H200, replay  # doctest: +SKIP
>>> replay(case.emulate("round_robin", 0), H200).cycles  # doctest: +SKIP
"""

from jaggedtensor.testing.model.constants import B200 as B200
from jaggedtensor.testing.model.constants import H200 as H200
from jaggedtensor.testing.model.constants import Chip as Chip
from jaggedtensor.testing.model.replay import Replayed as Replayed
from jaggedtensor.testing.model.replay import replay as replay

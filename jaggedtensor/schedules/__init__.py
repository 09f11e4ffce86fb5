"""Schedules: which tiles of a batch have work, in which order, and which worker does which (docs/schedules.md)."""

from jaggedtensor.schedules.types import Merge as Merge
from jaggedtensor.schedules.types import ScheduleKind as ScheduleKind
from jaggedtensor.schedules.types import ScheduleRequest as ScheduleRequest
from jaggedtensor.schedules.types import Tile as Tile
from jaggedtensor.schedules.types import TileAxis as TileAxis
from jaggedtensor.schedules.types import TileSchedule as TileSchedule
from jaggedtensor.schedules.types import Wave as Wave

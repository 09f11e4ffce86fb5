"""Schedules go along with a layout: to another process and another device, but into no file."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch

from jaggedtensor import JaggedLayout, JaggedTensor, ScheduleKind
from jaggedtensor.testing import offsets_of


def batch(lengths=(3, 0, 5), heads=2, dim=4):
    torch.manual_seed(0)
    return JaggedTensor.from_list([torch.randn(n, heads, dim) for n in lengths])


def prepared():
    """A batch with a schedule of every sort."""
    keys = batch()
    query, mask = JaggedLayout(offsets_of([1, 1, 1])), torch.ones(3, 1, 1).bool()
    for options in (
        dict(kind=ScheduleKind.STREAM_K, q_len=4),
        dict(kind=ScheduleKind.DYNAMIC, q_len=4),
        dict(kind=ScheduleKind.ZIGZAG, q_len=keys.layout, right=0),
        dict(kind=ScheduleKind.ZIGZAG, q_len=query),
        dict(kind=ScheduleKind.ZIGZAG, q_len=4, mask=mask),
    ):
        keys.layout.schedule(heads=2, workers=2, **options)
    return keys, query, mask


def test_schedules_go_along_to_another_process():
    keys, *_ = prepared()
    arrived = pickle.loads(ForkingPickler.dumps(keys))
    layout = arrived.layout
    assert len(layout._schedules) == 3  # a query layout and a mask stay behind
    for options in (
        dict(kind=ScheduleKind.STREAM_K, q_len=4),
        dict(kind=ScheduleKind.DYNAMIC, q_len=4),
        dict(kind=ScheduleKind.ZIGZAG, q_len=layout, right=0),
    ):
        there = options | ({"q_len": keys.layout} if options["q_len"] is layout else {})
        schedule = layout.schedule(heads=2, workers=2, **options)
        original = keys.layout.schedule(heads=2, workers=2, **there)
        schedule.require(layout)
        for x, y in zip(schedule.tensors(), original.tensors(), strict=True):
            assert (x is None and y is None) or torch.equal(x, y)
            assert x is None or x.data_ptr() % 16 == 0  # a kernel reads a row at one go
    assert layout._schedules.builds == 0


class PreparedBatches(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        keys = batch((3, index, 5))
        keys.layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)
        return keys


def test_schedules_built_in_a_dataloader_worker_are_used():
    loader = torch.utils.data.DataLoader(PreparedBatches(), batch_size=None, num_workers=1)
    for index, keys in enumerate(loader):
        schedule = keys.layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)
        assert keys.layout._schedules.builds == 0
        assert int(schedule.count) == 4 + 2 * index


def test_files_and_copies_hold_no_schedules():
    keys, *_ = prepared()
    file = io.BytesIO()
    torch.save(keys, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(keys)), copy.deepcopy(keys), torch.load(file, weights_only=True)):
        assert len(copied.layout._schedules) == 0


def test_schedules_move_with_the_layout():
    keys, *_ = prepared()
    moved = keys.layout.to("meta")
    assert len(moved._schedules) == 3
    schedule = moved.schedule(ScheduleKind.STREAM_K, q_len=4, heads=2, workers=2)
    assert moved._schedules.builds == 0
    assert schedule.device.type == "meta"
    schedule.require(moved)

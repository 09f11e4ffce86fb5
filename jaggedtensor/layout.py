"""JaggedLayout: where each sequence of a packed batch begins and ends, and all that follows from it.

A layout is shared by every tensor with the same offsets, so what it works out (lengths, sequence ids, schedules) is
worked out once per batch. It is immutable but for `with_capacity` layouts, whose storage `copy_` refills.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from jaggedtensor.errors import check_integers, check_same_device, fail, is_readable
from jaggedtensor.problem import UNLIMITED
from jaggedtensor.schedules.cache import Packed, ScheduleCache
from jaggedtensor.schedules.types import Identity, Mask, ScheduleKind, ScheduleRequest, TileAxis, TileSchedule, Wave

_FROM_LENGTHS = "build offsets with JaggedTensor.from_lengths"


class JaggedLayout:
    """The structure of a jagged batch: `offsets[i]:offsets[i + 1]` are the rows of sequence i.

    >>> layout = JaggedLayout(torch.tensor([0, 3, 3, 5]))
    >>> layout.lengths()
    tensor([3, 0, 2])

    Args:
        offsets: int32 or int64 `[B + 1]`; the first is 0, none decreases, the last is the number of tokens. A batch of
            no sequences is `[0]`. The tensor is kept, not copied (but for one with strides): changing it in place
            raises at the next use.
        max_length: length that no sequence exceeds. Declaring one lets a GPU batch be used without reading its offsets
            on the host; it only sizes grids and padding, it never hides a token.
        validate: read the values and check them. For offsets on a GPU this is the one synchronisation the library
            makes, and makes every later question about lengths free; `False` skips it, and the caller answers for the
            values. Under `torch.compile` the checks become asserts inside the graph.

    Raises:
        TypeError: offsets are not an int32 or int64 tensor.
        ValueError: offsets are not of rank 1, are empty, do not start at 0, decrease, or exceed `max_length`.
    """

    def __init__(self, offsets: Tensor, *, max_length: int | None = None, validate: bool = True) -> None:
        check_integers(offsets, "offsets")
        if offsets.shape[0] == 0:
            fail("offsets", "of length B + 1 (a batch of no sequences is [0])", offsets, _FROM_LENGTHS)
        if max_length is not None and max_length < 0:
            fail("max_length", "at least 0", max_length)
        self._offsets = offsets = offsets.contiguous()  # kernels count on it
        self._version = _version_of(offsets)
        self._capacity: int | None = None
        self._num_tokens: int | None = None
        self._max_length = max_length
        self._max_length_is_bound = max_length is not None
        self._host_offsets: Tensor | None = None
        self._derived: dict[Any, Any] = {}
        self._schedules = ScheduleCache()
        self._equality: weakref.WeakKeyDictionary[JaggedLayout, bool] | None = None  # made when first asked
        if validate:
            self._validate()

    # -- other ways to make one ---------------------------------------------------------------------------------------

    @classmethod
    def from_lengths(cls, lengths: Tensor, *, max_length: int | None = None, validate: bool = True) -> Self:
        """A layout of sequences with these lengths, `[B]` int32 or int64; the offsets are int64, so sums don't wrap.

        Raises:
            ValueError: a length is negative, or exceeds `max_length`.
        """
        check_integers(lengths, "lengths")
        if validate and is_readable(lengths) and lengths.numel():
            shortest = int(lengths.min())
            if shortest < 0:
                fail("lengths", "at least 0", shortest, "clamp them with lengths.clamp(min=0)")
        offsets = torch.cat((lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)))
        return cls(offsets, max_length=max_length, validate=validate)

    @classmethod
    def with_capacity(
        cls,
        batch_size: int,
        max_tokens: int,
        max_length: int,
        *,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> Self:
        """Static storage for CUDA graphs: always `batch_size` sequences, at most `max_tokens` rows in all.

        It starts with empty sequences; `copy_` refills it. Fill up a smaller batch with empty sequences.

        >>> layout = JaggedLayout.with_capacity(batch_size=3, max_tokens=16, max_length=8)
        >>> layout.copy_(torch.tensor([0, 3, 3, 5])).lengths()
        tensor([3, 0, 2])
        """
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens), ("max_length", max_length)):
            if value < 0:
                fail(name, "at least 0", value)
        offsets = torch.zeros(batch_size + 1, dtype=dtype, device=device)
        layout = cls(offsets, max_length=max_length, validate=False)
        layout._capacity = max_tokens
        return layout

    def copy_(self, offsets: Tensor) -> Self:
        """Refill a `with_capacity` layout, without a host synchronisation on a GPU (bad values fail a device assert).

        Raises:
            TypeError: this layout was not made by `with_capacity`.
            ValueError: another number of sequences, or more tokens or a longer sequence than declared.
        """
        if self._capacity is None:
            fail(
                "layout", "made by JaggedLayout.with_capacity", "an immutable layout", "make a new one", error=TypeError
            )
        check_integers(offsets, "offsets")
        if offsets.shape != self._offsets.shape:
            fail("offsets", f"of shape {list(self._offsets.shape)}", offsets, "fill up with empty sequences")
        candidate = JaggedLayout(offsets, max_length=self._max_length, validate=False)
        candidate._capacity = self._capacity
        if offsets.device.type == "cpu":
            candidate._validate()
        else:
            candidate._assert_on_device()
        self._offsets.copy_(offsets, non_blocking=True)
        self._version = _version_of(self._offsets)
        return self

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> JaggedLayout:
        """This layout on a device. The copy is remembered, so tensors that share a layout still share one after it.

        Schedules built on a CPU go along, in one transfer; others are built again where they are used.
        """
        device = _resolve(device)
        if device == self.device:
            return self

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return self._remember(("to", device), lambda: self._converted(move))

    def pin_memory(self) -> JaggedLayout:
        """This layout with offsets in page-locked memory; the copy is remembered, as by `to`."""
        if self._offsets.is_pinned():
            return self
        return self._remember("pinned", lambda: self._converted(Tensor.pin_memory))

    def _converted(self, convert: Callable[[Tensor], Tensor]) -> JaggedLayout:
        """The same structure on other storage: what the host knows stays known."""
        layout = JaggedLayout(convert(self.offsets()), max_length=self._max_length, validate=False)
        layout._capacity = self._capacity
        layout._max_length_is_bound = self._max_length_is_bound
        if self._capacity is None:
            layout._num_tokens = self._num_tokens
            layout._host_offsets = self._offsets if self.device.type == "cpu" else self._host_offsets
        packed = self._schedules.pack(self) if self.device.type == "cpu" else None
        if packed is not None:
            layout._schedules.unpack(replace(packed, data=convert(packed.data)), layout)
        return layout

    # -- what it tells ------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Sequences, empty ones included."""
        return self._offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """Where offsets and everything that follows from them are."""
        return self._offsets.device

    @property
    def capacity(self) -> int | None:
        """Rows declared by `with_capacity`, None for an ordinary layout."""
        return self._capacity

    @property
    def is_static(self) -> bool:
        """Whether this is `with_capacity` storage, whose values may change between uses."""
        return self._capacity is not None

    @property
    def known_num_tokens(self) -> int | None:
        """The number of tokens if the host knows it without asking a GPU."""
        if self.is_static:
            return None
        if self._num_tokens is None and self.device.type == "cpu" and is_readable(self._offsets):
            self._num_tokens = int(self.offsets()[-1])
        return self._num_tokens

    @property
    def num_tokens(self) -> int:
        """Rows that belong to a sequence, `offsets[-1]`. Reads the GPU (once) if the host does not know it yet."""
        if self.known_num_tokens is not None:
            return self.known_num_tokens
        total = int(self.offsets()[-1])
        if not self.is_static:
            self._num_tokens = total
        return total

    @property
    def known_max_length(self) -> int | None:
        """The longest length, or a bound on it, if the host knows one without asking a GPU."""
        return self._max_length

    @property
    def declared_max_length(self) -> int | None:
        """The bound given when this layout was made."""
        return self._max_length if self._max_length_is_bound else None

    @property
    def max_length(self) -> int:
        """Length of the longest sequence (0 without any), or the declared bound. Reads a GPU (once) without either."""
        if self._max_length is None:
            host = self.host_offsets()
            self._max_length = int(host.diff().max()) if self.batch_size else 0
        return self._max_length

    def offsets(self) -> Tensor:
        """`[B + 1]` int32 or int64, as given."""
        self._check_unchanged()
        return self._offsets

    def host_offsets(self) -> Tensor:
        """`[B + 1]` on the CPU. Reads the GPU (once) if the host does not know them yet."""
        offsets = self.offsets()
        if self.device.type == "cpu":
            return offsets
        if self.is_static:
            return offsets.cpu()
        if self._host_offsets is None:
            self._host_offsets = offsets.cpu()
        return self._host_offsets

    def lengths(self) -> Tensor:
        """`[B]`, the dtype of offsets."""
        return self._remember("lengths", lambda: self.offsets().diff())

    def sequence_ids(self, rows: int) -> Tensor:
        """`[rows]` int64: the sequence that each row belongs to; slack rows get B."""
        return self._remember(("sequence_ids", rows), lambda: self._sequence_ids(rows))

    def positions(self, rows: int) -> Tensor:
        """`[rows]` int64: the place of each row in its sequence, from 0; undefined for slack rows."""

        def compute() -> Tensor:
            starts = self.offsets().to(torch.int64)[self.sequence_ids(rows).clamp(max=max(self.batch_size - 1, 0))]
            return torch.arange(rows, device=self.device) - starts

        return self._remember(("positions", rows), compute)

    def row_mask(self, rows: int) -> Tensor:
        """`[rows]` bool: true for tokens, false for slack."""
        return self._remember(("row_mask", rows), lambda: torch.arange(rows, device=self.device) < self.offsets()[-1])

    def has_slack(self, rows: int) -> bool:
        """Whether a tensor of this many rows has, or may have, rows past the last sequence."""
        return self.known_num_tokens is None or rows != self.known_num_tokens

    def same_as(self, other: JaggedLayout) -> bool:
        """Whether two layouts have the same sequences: by identity, else shape, else values, compared once.

        Comparing values that live on a GPU and are unknown to the host synchronises, once for each pair.
        """
        if self is other or self._offsets is other._offsets:
            return True
        if self.batch_size != other.batch_size or self.device != other.device or self.is_static or other.is_static:
            return False
        if not is_readable(self._offsets) or not is_readable(other._offsets):
            torch._assert_async((self._offsets == other._offsets).all(), "the layouts must have the same offsets")
            return True
        if self._equality is None:
            self._equality = weakref.WeakKeyDictionary()
        if other not in self._equality:
            mine, theirs = self.host_offsets(), other.host_offsets()
            self._equality[other] = torch.equal(mine.to(torch.int64), theirs.to(torch.int64))
        return self._equality[other]

    # -- schedules ----------------------------------------------------------------------------------------------------

    def schedule(
        self,
        kind: ScheduleKind,
        *,
        q_len: int | JaggedLayout,
        heads: int,
        group: int = 1,
        axis: TileAxis = TileAxis.QUERY,
        block_q: int = 128,
        block_kv: int = 128,
        workers: int | None = None,
        left: int = UNLIMITED,
        right: int = UNLIMITED,
        mask: Mask | None = None,
        mask_block: int = 0,
        tile_cost: int = 0,
        cut_last_round: int = 0,
        wave: Wave = Wave.ALL,
        run: int = 1,
        rows: int | None = None,
        q_rows: int | None = None,
    ) -> TileSchedule:
        """The tiles of attention to these sequences, in an order and with owners. Built once and kept with the layout.

        >>> layout = JaggedLayout(torch.tensor([0, 300, 300, 400]))
        >>> layout.schedule(ScheduleKind.ZIGZAG, q_len=128, heads=4, workers=132)
        TileSchedule(zigzag by query, 8 of at most 12 tiles of 128 x 128, heads=4, workers=132, device='cpu')

        Built on the layout's device without the host waiting (but for `LPT`). A `with_capacity` layout, and any under
        `torch.compile`, builds anew at every call, so that a CUDA graph rebuilds at every replay.

        Args:
            kind: order and owners.
            q_len: queries of each sequence: one number for all, or the layout of a jagged query.
            heads: key-value heads.
            group: query heads that share one. They are packed: row `i * group + g` of a sequence's queries is query i
                of head `head * group + g`, and `block_q` counts such rows.
            axis: whether q blocks or KV blocks stay with a worker.
            block_q, block_kv: packed query rows and keys of a block.
            workers: CTAs; the multiprocessors of the device if left out.
            left, right: the window as in `AttentionProblem` (-1: no limit); causal is `right=0`.
            mask: bool `[B, q blocks, kv blocks]`, or a function of (sequence, q block, kv block) index tensors, which
                broadcast against each other, that gives one. Blocks where it is false are left out. Known by identity:
                a function should depend on nothing that changes.
            mask_block: a mask of blocks of as many queries and as many keys, counted from the beginning of a sequence,
                `[B, q blocks, kv blocks]` or `[1, ...]` for all; the blocks of the schedule must divide its. 0: the
                mask has the schedule's own blocks.
            tile_cost: what starting a tile costs, in KV blocks, for `STREAM_K` and `LPT` to weigh.
            cut_last_round: for `ZIGZAG`: where the host knows that all tiles cost the same, those that are left when
                each worker has had as many as any other are cut, if at least two parts of so many passing blocks fit
                in between (0: never). Such a schedule has `slots`.
            wave: for `TileAxis.KEY` without a window or mask: of which KV blocks of each sequence.
            run: for `ZIGZAG`: how many tiles of a head are dealt before as many of the next (1: the heads of a tile
                follow each other). Few heads are then at work at once, and what their tiles share is still in L2.
            rows, q_rows: rows of the values of keys and of a jagged query: bounds for layouts on a GPU whose number of
                tokens the host does not know. Unused where it does.

        Raises:
            TypeError: an argument of another type.
            ValueError: a number out of range; nothing bounds the tokens; too many tiles for int32 places; a query
                layout of another batch size or device.
        """
        if isinstance(q_len, JaggedLayout):
            if q_len.batch_size != self.batch_size:
                fail("the batch size of the query layout", f"{self.batch_size}, as of the keys", str(q_len.batch_size))
            check_same_device(q_len.offsets(), "the query layout", self.device)
        if mask is not None and not isinstance(mask, Tensor) and not callable(mask):
            fail("mask", "a bool Tensor or a function that gives one", mask, error=TypeError)
        if workers is None:
            if self.device.type != "cuda":
                fail("workers", f"given for a layout on {self.device}", None, "for example workers=132 for an H200")
            workers = torch.cuda.get_device_properties(self.device).multi_processor_count
        query = q_len if isinstance(q_len, JaggedLayout) else None
        request = ScheduleRequest(
            kind,
            axis,
            block_q,
            block_kv,
            heads,
            group,
            workers,
            Identity(q_len) if isinstance(q_len, JaggedLayout) else q_len,
            left,
            right,
            None if mask is None else Identity(mask),
            tile_cost,
            mask_block,
            cut_last_round,
            wave,
            run,
        )
        self._check_unchanged()

        def make() -> TileSchedule:
            from jaggedtensor.schedules.build import build

            return build(request, self, query, mask, rows, q_rows)

        changes = self.is_static or not is_readable(self._offsets)
        changes = changes or (isinstance(mask, Tensor) and mask.is_inference())  # whose versions nobody counts
        if changes or (query is not None and (query.is_static or not is_readable(query._offsets))):
            return make()
        with torch.inference_mode(False):  # as in _remember
            return self._schedules.get(request, make)

    @property
    def is_complete(self) -> bool:
        """Whether every sequence is known, on the host, to have a token."""
        if not self.lengths_on_host:
            return False
        return self._remember("is_complete", lambda: bool((self.host_offsets().diff() > 0).all()))

    @property
    def lengths_on_host(self) -> bool:
        """Whether lengths can be looked at without asking a GPU."""
        if self.is_static:
            return False
        return self._host_offsets is not None or (self.device.type == "cpu" and is_readable(self._offsets))

    @property
    def longest_on_host(self) -> int | None:
        """Length of the longest sequence, whatever bound is declared; None if only a GPU knows."""
        known: int | None = self._derived.get("longest")
        if known is not None:  # quickly: each plan asks
            self._check_unchanged()
            return known
        if not self.lengths_on_host:
            return None
        return self._remember("longest", lambda: int(self.host_offsets().diff().max()) if self.batch_size else 0)

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that every tensor reachable from here is in use on `stream`."""
        for tensor in tree_leaves([self._offsets, list(self._derived.values()), self._schedules.tensors()]):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        # A static layout changes under its derived tensors; a traced one must not leak tracers into the cache.
        if self.is_static or not is_readable(self._offsets):
            return compute()
        self._check_unchanged()
        known = self._derived.get(key)
        if known is None:
            for stale in [x for x in list(self._derived) if _is_stale(x)]:
                self._derived.pop(stale, None)
            with torch.inference_mode(False):  # what one use derives under inference_mode, another may train with
                known = self._derived[key] = compute()
        return known

    def _sequence_ids(self, rows: int) -> Tensor:
        if self.known_num_tokens == rows and is_readable(self._offsets):
            sequences = torch.arange(self.batch_size, device=self.device)
            return torch.repeat_interleave(sequences, self.lengths(), output_size=rows)
        row = torch.arange(rows, device=self.device, dtype=self._offsets.dtype)
        return torch.searchsorted(self.offsets(), row, right=True) - 1

    def _check_unchanged(self) -> None:
        if not is_readable(self._offsets):
            return
        if self._version is None:  # made inside a graph, where versions are not tracked
            self._version = _version_of(self._offsets)
        if _version_of(self._offsets) != self._version:
            fail(
                "offsets",
                "unchanged since the layout was made",
                "an in-place change",
                "make a new JaggedLayout, or use JaggedLayout.with_capacity(...).copy_(offsets)",
                error=RuntimeError,
            )

    def _validate(self) -> None:
        if not is_readable(self._offsets):
            if not self._offsets.is_meta:
                self._assert_on_device()
            return
        host = self.host_offsets()
        first, total = int(host[0]), int(host[-1])
        if first != 0:
            fail("offsets[0]", "0", first, f"slice values and subtract offsets[0], or {_FROM_LENGTHS}")
        lengths = host.diff()
        if self.batch_size:
            shortest, where = (int(x) for x in lengths.min(0))
            if shortest < 0:
                fail(
                    "offsets",
                    f"non-decreasing, so offsets[{where + 1}] >= {int(host[where])}",
                    int(host[where + 1]),
                    _FROM_LENGTHS,
                )
            if self._max_length is not None and int(lengths.max()) > self._max_length:
                longest = int(lengths.max())
                fail(
                    "max_length",
                    f"at least {longest} (the longest sequence)",
                    self._max_length,
                    "declare a larger bound",
                )
        if self._capacity is not None and total > self._capacity:
            fail("offsets[-1]", f"at most {self._capacity} (max_tokens)", total, "declare a larger capacity")
        self._num_tokens = total

    def _assert_on_device(self) -> None:
        offsets = self._offsets
        lengths = offsets.diff()
        torch._assert_async(offsets[0] == 0, "offsets[0] must be 0")
        torch._assert_async((lengths >= 0).all(), "offsets must be non-decreasing")
        if self._max_length is not None:
            torch._assert_async((lengths <= self._max_length).all(), "no sequence may exceed max_length")
        if self._capacity is not None:
            torch._assert_async(offsets[-1] <= self._capacity, "offsets[-1] must be at most max_tokens")

    def __len__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        if not is_readable(self._offsets):
            return f"JaggedLayout(batch_size={self.batch_size}, device={self.device})"
        tokens = "?" if self.known_num_tokens is None else self.known_num_tokens
        return f"JaggedLayout(batch_size={self.batch_size}, num_tokens={tokens}, device='{self.device}')"

    def __getstate__(self) -> dict[str, Any]:
        """Offsets and what was declared: everything else follows from them."""
        self._check_unchanged()
        return {"offsets": self._offsets, "max_length": self.declared_max_length, "capacity": self._capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled offsets on a CPU are checked like any others; reading a GPU's would be a hidden synchronisation.
        JaggedLayout.__init__(self, state["offsets"], max_length=state["max_length"], validate=False)
        self._capacity = state["capacity"]
        if self.device.type == "cpu":
            self._validate()


def _rebuild_with_schedules(state: dict[str, Any], packed: Packed | None) -> JaggedLayout:
    layout = JaggedLayout.__new__(JaggedLayout)
    layout.__setstate__(state)
    if packed is not None:
        layout._schedules.unpack(packed, layout)
    return layout


def _reduce_with_schedules(layout: JaggedLayout) -> tuple[Any, ...]:
    packed = layout._schedules.pack(layout) if layout.device.type == "cpu" else None
    return _rebuild_with_schedules, (layout.__getstate__(), packed)


# From a DataLoader's worker schedules go along; into files and copies they don't, as they follow from the offsets.
ForkingPickler.register(JaggedLayout, _reduce_with_schedules)


def _version_of(tensor: Tensor) -> int | None:
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None  # not tracked there
    return tensor._version


def _is_stale(key: Any) -> bool:
    """Whether what is remembered under a key can't be asked for any more: of a mask or layout that is gone."""
    return isinstance(key, tuple) and any(isinstance(part, Identity) and part.is_stale for part in key)


def _resolve(device: torch.device | str) -> torch.device:
    """`cuda` means the current one, as everywhere in torch."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

"""What a request leaves on the device between rounds: paged keys and values, GDN states, conv windows, pending logs.

Which page belongs to whom is the host's business (:mod:`.pages`); here are the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import RequestError
from .ggml import Backend, Graph, Tensor, TensorSet, Type
from .ggml.dflash_ops import PAGE
from .history import History
from .pages import PagePool, pages_for, ring_pages
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .models.dflash import DFlashParams
    from .models.qwen35 import Qwen35Params

Rows = NDArray[np.int32]


class PagedKV:
    """Keys and values of some layers in pages of 16 positions, and the table that maps positions to pages.

    k[i], v[i]: [head_dim, kv_heads, 16 * (pages + 1)]: the last page is the spare one that dead rows write to.
    table: I32 [max_pages, slots].
    """

    def __init__(
        self, tensors: TensorSet, name: str, layers: Sequence[int], head_dim: int, kv_heads: int, pages: int,
        max_pages: int, slots: int, kind: Type,
    ) -> None:  # fmt: skip
        shape = (head_dim, kv_heads, PAGE * (pages + 1))
        self.name = name
        self.n_pages = pages + 1
        self.spare = PAGE * pages
        self.k = {i: tensors.new(f"{name}.k.{i}", kind, *shape) for i in layers}
        self.v = {i: tensors.new(f"{name}.v.{i}", kind, *shape) for i in layers}
        self.table = tensors.new(f"{name}.table", Type.I32, max_pages, slots)
        self.pages = np.zeros((slots, max_pages), np.int32)
        self._unsent = self.pages.size, 0

    def assign(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Logical pages first.. of `slot` lie in physical `pages`; :meth:`send` tells the device."""
        self.pages[slot, first : first + len(pages)] = pages
        entry = slot * self.pages.shape[1] + first
        if pages:
            self._unsent = min(self._unsent[0], entry), max(self._unsent[1], entry + len(pages))

    def send(self) -> None:
        """Upload the table from the first entry that is new to the last, at once."""
        start, end = self._unsent
        if start < end:
            self.table.set(self.pages.reshape(-1)[start:end], 4 * start)
            self._unsent = self.pages.size, 0

    def write(self, g: Graph, layer: int, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Put F32 keys and values of n positions at physical `rows` I32 [n]. The layer's pages behind the write."""
        pages = self.k[layer].shape
        width = pages[0] * pages[1]
        written = []
        for whole, new in ((self.k[layer], k), (self.v[layer], v)):
            n = new.nelements // width
            values = new if new.shape == (width, n, 1, 1) else g.reshape(new, width, n)
            flat = g.set_rows(g.reshape(whole, width, pages[2]), values, rows)
            written.append(g.reshape(g.effect(flat), *pages))
        return written[0], written[1]

    def spare_rows(self, n: int) -> Rows:
        """`n` rows nobody reads."""
        return (self.spare + np.arange(n) % PAGE).astype(np.int32)

    def rows(self, slot: int, start: int, n: int) -> Rows:
        """Physical rows of positions start .. start + n - 1."""
        positions = np.arange(start, start + n)
        rows: Rows = self.pages[slot, positions // PAGE] * np.int32(PAGE) + (positions % PAGE).astype(np.int32)
        return rows


class RecurrentState:
    """GDN states, conv windows and the pending log of each layer, per slot.

    state[i] [S, S, Hv, slots]; log[i] [2 S + 1, Hv, block, slots]; rows[i] [C, K - 1 + block, slots]; pending I32
    [slots] counts the leading log rows that are accepted and not yet in the state. `pending_rows` is what the host
    knows of it: what the device wrote (`accept`) comes by :meth:`note_pending` and is not sent back.
    """

    def __init__(
        self, tensors: TensorSet, layers: Sequence[int], state: int, value_heads: int, channels: int, taps: int,
        block: int, slots: int,
    ) -> None:  # fmt: skip
        f32 = Type.F32
        self.state = {i: tensors.new(f"state.{i}", f32, state, state, value_heads, slots) for i in layers}
        self.log = {i: tensors.new(f"log.{i}", f32, 2 * state + 1, value_heads, block, slots) for i in layers}
        self.rows = {i: tensors.new(f"rows.{i}", f32, channels, taps - 1 + block, slots) for i in layers}
        self.pending = tensors.new("pending", Type.I32, slots)
        self.pending_rows = np.zeros(slots, np.int32)
        self.block = block

    def set_pending(self, slot: int, n: int) -> None:
        """Accept the first `n` rows of the slot's last block."""
        if not 0 <= n <= self.block:
            raise RequestError("pending rows", n, f"0..{self.block}")
        self.pending.set(np.array([n], np.int32), 4 * slot)
        self.pending_rows[slot] = n

    def note_pending(self, slot: int, n: int) -> None:
        """The device has accepted the first `n` rows of the slot's last block and knows it."""
        self.pending_rows[slot] = n

    def use_up_pending(self, slot: int) -> None:
        """The pending rows are in the state now."""
        if self.pending_rows[slot]:
            self.set_pending(slot, 0)

    def clear(self, slot: int) -> None:
        """Start a slot anew: zero state and window, nothing pending."""
        slots = self.pending.shape[0]
        for tensor in (*self.state.values(), *self.rows.values()):
            size = tensor.nbytes // slots
            tensor.clear(slot * size, size)
        self.set_pending(slot, 0)


class LaneCache:
    """All memory of the lanes of one engine: target pages, recurrent state, histories and, with a draft, its ring.

    `n_ctx` positions per slot at most, `pool` positions of all slots together, `block` rows a round, `piece` rows a
    prefill step.
    """

    def __init__(
        self, backend: Backend, target: Qwen35Params, draft: DFlashParams | None, *, n_ctx: int, slots: int,
        block: int, piece: int, kv_type: Type, pool: int | None = None,
    ) -> None:  # fmt: skip
        self.n_ctx = n_ctx
        self.slots = slots
        per_slot = pages_for(n_ctx)
        self.pool = PagePool(per_slot * slots if pool is None else pages_for(pool))
        self._held: dict[int, list[int]] = {}
        self.tensors = TensorSet(backend, 6 * target.n_layer + 64)
        with contextlib.ExitStack() as stack:
            stack.callback(self.tensors.close)
            self.kv, self.recurrent = self._of_target(target, per_slot, block, kv_type)
            self.history = History(self.tensors, n_ctx, slots)
            self.ring = None if draft is None else self._of_draft(draft, per_slot, max(piece, block), kv_type)
            self.tensors.allocate()
            if self.ring is not None:
                self.ring.send()
            stack.pop_all()

    def _of_target(
        self, target: Qwen35Params, per_slot: int, block: int, kv_type: Type
    ) -> tuple[PagedKV, RecurrentState]:
        attention = [i for i in range(target.n_layer) if not target.recurrent[i]]
        gdn = [i for i in range(target.n_layer) if target.recurrent[i]]
        kv = PagedKV(
            self.tensors, "kv", attention, target.head_dim, target.n_head_kv, self.pool.pages, per_slot, self.slots,
            kv_type,
        )  # fmt: skip
        recurrent = RecurrentState(
            self.tensors, gdn, target.state_size, target.n_v_heads, target.conv_channels, target.conv_kernel, block,
            self.slots,
        )  # fmt: skip
        return kv, recurrent

    def _of_draft(self, draft: DFlashParams, per_slot: int, longest: int, kv_type: Type) -> PagedKV:
        pages = ring_pages(draft.window, self.n_ctx, longest)
        ring = PagedKV(
            self.tensors, "ring", range(draft.n_layer), draft.head_dim, draft.n_head_kv, pages * self.slots, per_slot,
            self.slots, kv_type,
        )  # fmt: skip
        for slot in range(self.slots):
            ring.assign(slot, 0, [slot * pages + page % pages for page in range(per_slot)])
        return ring

    def open(self, slot: int, tokens: Sequence[int], params: SamplingParams) -> None:
        """Give `slot` to a request: an empty state, no pages yet, its prompt and how it draws."""
        if slot in self._held:
            raise RequestError("slot", slot, "a slot that is free")
        self.recurrent.clear(slot)
        self.history.start(slot, tokens, params)
        self._held[slot] = []

    def grow(self, slot: int, positions: int) -> None:
        """See to it that `slot` has pages for `positions` positions; RequestError when they do not exist.

        The device knows of them behind :meth:`PagedKV.send` of `kv`, so that a round's pages go there together.
        """
        if positions > self.n_ctx:
            raise RequestError("positions", positions, f"at most n_ctx = {self.n_ctx}")
        held = self._held[slot]
        more = pages_for(positions) - len(held)
        if more > 0:
            pages = self.pool.take(more)
            self.kv.assign(slot, len(held), pages)
            held += pages

    def held(self, slot: int) -> int:
        """Pages that `slot` holds."""
        return len(self._held.get(slot, ()))

    def release(self, slot: int) -> None:
        """Take the slot and its pages back. Nothing happens when nobody has it."""
        self.pool.give(self._held.pop(slot, []))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.tensors.nbytes

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.tensors.close()

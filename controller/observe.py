"""Observe: one watch on everything below the root, into the board."""

from __future__ import annotations

from controller.board import Board
from everstep.protocol.keys import Keys
from everstep.protocol.store import Store


async def observe(store: Store, keys: Keys, board: Board) -> None:
    """Follow etcd for ever; survives its absence (the view then simply stays as it is)."""
    async for item in store.watch(f"{keys.root}/"):
        board.apply(item)

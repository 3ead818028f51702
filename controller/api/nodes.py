"""Nodes as the controller sees them."""

from __future__ import annotations

import time

from fastapi import APIRouter

from controller.api.access import Served
from controller.api.models import NodeList
from controller.summary import node_views

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("")
async def list_nodes(controller: Served) -> NodeList:
    """Registered nodes, and those that left lately."""
    return NodeList(nodes=node_views(controller.board.view, time.time()), stale=controller.stale)

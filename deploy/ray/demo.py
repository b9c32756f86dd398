"""Kills a drafter under Ray Serve, to show that answers go on without it. Serve starts another one."""

from __future__ import annotations

import asyncio
import random

import ray
from ray.exceptions import RayError

from cluster.core.membership import MemberRole, View

_NAMESPACE = "serve"
"""Where Serve keeps the actors of replicas."""


async def kill_drafter(view: View, application: str) -> bool:
    """Kill the process of a random drafter in the view. Returns whether there was one."""
    drafters = view.of(MemberRole.DRAFTER)
    if not drafters:
        return False
    deployment, _, unique_id = random.choice(drafters).id.partition("-")  # noqa: S311 - any of them will do
    return await asyncio.to_thread(_kill, f"SERVE_REPLICA::{application}#{deployment.capitalize()}#{unique_id}")


def _kill(actor: str) -> bool:
    try:
        ray.kill(ray.get_actor(actor, namespace=_NAMESPACE))
    except (ValueError, RayError):  # it has ended since the last heartbeat
        return False
    return True

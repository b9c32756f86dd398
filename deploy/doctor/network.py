"""Findings about what processes of Pilotfish and Ray show to the network."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cluster.wire.address import join_host_port
from deploy.doctor.finding import Finding
from deploy.network.listeners import Listener
from deploy.network.probe import RAY_METHOD, Demand, probe

LEASE_METHOD = "/pilotfish.v1.LeaseService/Renew"
PUBLIC_METHOD = "/pilotfish.v1.GenerationService/ListModels"
REPLICA_METHOD = "/ray.serve.ASGIService/HandleRequest"
"""A method of the server that Ray Serve opens in every replica. It unpickles what holders of Ray's token send."""
_INTERNAL_METHODS = (LEASE_METHOD, RAY_METHOD, REPLICA_METHOD)
_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Exposure:
    """A listener, and what it demands of a caller."""

    listener: Listener
    demand: Demand
    is_public: bool
    """Whether it is the public gRPC API, which has no authentication."""


def exposures(listeners: Sequence[Listener]) -> tuple[Exposure, ...]:
    """Ask every listener what it demands."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return tuple(pool.map(_exposure, listeners))


def network_findings(found: Sequence[Exposure]) -> Iterator[Finding]:
    """One line for every listener that is reachable without a credential or from other machines."""
    reachable = [one for one in found if not one.listener.is_loopback]
    closed = sum(one.demand is Demand.CREDENTIAL for one in reachable)
    if not found:
        yield Finding("listeners", "no process of Pilotfish or Ray listens")
    else:
        ports = f"{len(found)} {'port' if len(found) == 1 else 'ports'}; other machines reach"
        whom = f"{len(reachable)}, and {closed} of these demand a credential" if reachable else "none"
        yield Finding("listeners", f"{ports} {whom}")
    for one in found:
        listener = one.listener
        subject = f"{listener.process} (pid {listener.pid})"
        address = join_host_port(listener.host, listener.port)
        if one.demand is Demand.NOTHING and not one.is_public:
            yield Finding(subject, f"{address} demands no credential", _remedy(listener))
        elif one.demand is Demand.NOTHING and not listener.is_loopback:
            yield Finding(
                subject,
                f"the gRPC API at {address} is open to other machines",
                "keep server.grpc_host on loopback, or put a proxy with authentication before it",
            )


def _remedy(listener: Listener) -> str:
    if listener.process.startswith("ray::ServeReplica") and listener.is_loopback:
        return "restart it with a current `pilotfish serve`, which draws a cluster token"
    return "stop it, and start Ray with RAY_AUTH_MODE=token"


def _exposure(listener: Listener) -> Exposure:
    host = _reachable(listener.host)
    demand = probe(host, listener.port, *_INTERNAL_METHODS)
    if demand is not Demand.UNKNOWN:
        return Exposure(listener, demand, is_public=False)
    demand = probe(host, listener.port, PUBLIC_METHOD)
    return Exposure(listener, demand, is_public=demand is Demand.NOTHING)


def _reachable(host: str) -> str:
    """An address of this machine at which a listener on `host` is reached."""
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        return str(mapped)
    return "127.0.0.1" if address.is_unspecified else host

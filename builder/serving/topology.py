"""The settings of each topology's nodes.  Addresses and interfaces come from the user."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from builder.common.hints import instead
from builder.errors import UsageError, did_you_mean
from builder.serving.documents import RecipeNode, Setting, Topology

if TYPE_CHECKING:
    from builder.serving.profile import ServedProfile

TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
_TWO = ("tp2", "tp2-ray", "two-solos")
#: The port where the ranks of a model meet.  vLLM's default, written out for firewall rules
#: (vllm/config/parallel.py, master_port).
MASTER_PORT = 29501
#: Ray's own default.
RAY_PORT = 6379
_ORIGIN = "topology {}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nodes to run on."""

    topology: Topology
    addresses: tuple[str, ...] = ()
    #: the network interface between the nodes
    interface: str = ""
    #: the tool that finds and connects the nodes, if any
    launcher: str = ""


#: The missing options, by the number of given addresses.
_ADDRESSES = (
    "--address HEAD --address OTHER",
    "--address OTHER",
)
#: IPv4, IPv6 and host names (RFC 1123), without the brackets of a URL.
_ADDRESS = re.compile(r"[0-9A-Za-z][0-9A-Za-z.:-]*")
#: Linux allows 15 characters (IFNAMSIZ), but no slash and no space.
_INTERFACE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:@-]{0,14}")


def topology_named(name: str) -> Topology:
    """A topology by its name.

    Raises:
        UsageError: no such name.
    """
    for known in TOPOLOGIES:
        if known == name:
            return known
    raise UsageError(
        f"unknown topology {name!r}{did_you_mean(name, TOPOLOGIES)} "
        f"(known: {', '.join(TOPOLOGIES)})",
        hint=f"--topology {TOPOLOGIES[0]}",
    )


def nodes_of(place: Place, served: ServedProfile) -> tuple[RecipeNode, ...]:
    """The nodes, each with its settings.

    Raises:
        UsageError: an address or the interface is missing, or the release does not support it.
    """
    two = place.topology in _TWO
    if not two:
        if place.addresses or place.interface:
            raise UsageError(
                f"--address and --interface are for two nodes; topology {place.topology} has one",
                hint="--topology tp2"
                if len(place.addresses) == 2 and place.interface
                else "leave --address and --interface out",
            )
        return (RecipeNode(rank=0),)
    if place.launcher:
        return _found_later(place, served)
    if len(place.addresses) != 2:
        raise UsageError(
            f"topology {place.topology} needs the addresses of two nodes on the fast link, as "
            f"`ip -4 addr` shows them, not {len(place.addresses)}",
            hint=(*_ADDRESSES, "set --address twice")[min(len(place.addresses), 2)],
        )
    _refuse_names(place)
    if place.addresses[0] == place.addresses[1]:
        raise UsageError(
            f"both nodes have the address {place.addresses[0]}",
            hint="set the address of the head first, then that of the other node",
        )
    if place.topology == "two-solos":
        if place.interface:
            raise UsageError(
                "topology two-solos does not use --interface: its servers are not connected",
                hint="leave --interface out",
            )
        return tuple(RecipeNode(rank=n, address=a) for n, a in enumerate(place.addresses))
    if not place.interface:
        raise UsageError(
            f"topology {place.topology} needs the network interface between the nodes, as "
            f"`ip -br link` shows it on both (such as enp1s0f0np0)",
            hint="--interface NAME",
        )
    _refuse_without_ray(place, served)
    return tuple(_rank(place, rank, address) for rank, address in enumerate(place.addresses))


def _found_later(place: Place, served: ServedProfile) -> tuple[RecipeNode, ...]:
    """Two nodes whose addresses the launcher finds.

    Raises:
        UsageError: addresses are given, or the release does not support it.
    """
    if place.addresses or place.interface:
        raise UsageError(
            f"{place.launcher} finds the nodes and the interface between them itself",
            hint="leave --address and --interface out",
        )
    _refuse_without_ray(place, served)
    return tuple(RecipeNode(rank=rank) for rank in range(2))


def _refuse_without_ray(place: Place, served: ServedProfile) -> None:
    """Refuse Ray if the image does not have it.

    Raises:
        UsageError: it is requested.
    """
    if place.topology == "tp2-ray" and not served.has_ray:
        raise UsageError(
            f"vLLM {served.vllm} does not include Ray, and {served.image} does not have it; build "
            f"one with --layers {served.name},ray, or use tp2, which needs no Ray",
            hint="--topology tp2",
        )


def _refuse_names(place: Place) -> None:
    """Refuse addresses and interfaces that are not a single word in a script.

    Raises:
        UsageError: an address or the interface is malformed.
    """
    for address in place.addresses:
        if not _ADDRESS.fullmatch(address):
            raise UsageError(
                f"{address!r} is not an IP address or host name",
                hint=instead(address, "IP"),
            )
    if place.interface and not _INTERFACE.fullmatch(place.interface):
        raise UsageError(
            f"{place.interface!r} is not the name of a network interface (`ip -br link` lists "
            "them)",
            hint="--interface NAME",
        )


def _rank(place: Place, rank: int, address: str) -> RecipeNode:
    origin = _ORIGIN.format(place.topology)

    def flag(name: str, value: str | None = None) -> Setting:
        return Setting(name=name, value=value, origin=origin)

    variables = {
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": place.interface,
        "VLLM_HOST_IP": address,
    }
    flags: tuple[Setting, ...] = ()
    if place.topology == "tp2":
        flags = (
            flag("--nnodes", "2"),
            flag("--node-rank", str(rank)),
            flag("--master-addr", place.addresses[0]),
            flag("--master-port", str(MASTER_PORT)),
            *([flag("--headless")] if rank else []),
        )
    env = tuple(Setting(name=n, value=v, origin=origin) for n, v in variables.items())
    return RecipeNode(rank=rank, address=address, flags=flags, env=env)


def common_flags(topology: Topology) -> tuple[Setting, ...]:
    """Flags that every node of a topology has."""
    origin = _ORIGIN.format(topology)
    if topology == "tp2":
        return (Setting(name="--tensor-parallel-size", value="2", origin=origin),)
    if topology == "tp2-ray":
        return (
            Setting(name="--tensor-parallel-size", value="2", origin=origin),
            Setting(name="--distributed-executor-backend", value="ray", origin=origin),
        )
    return ()

"""What the names and the port between the nodes mean for a job of several."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.doctor.core.findings import Finding, ok, problem, warning

_HOSTS = "the same address on all nodes, of the one that opens it"


@dataclass(frozen=True, slots=True)
class Network:
    """What a child has seen of the end point. `trouble`: its time was over, and in what."""

    endpoint: str
    trouble: str = ""
    unresolved: str = ""  # why the end point's name has no address
    addresses: Sequence[str] = ()
    ours: bool = False  # one of them is this machine's
    port: str = ""  # ours: "free", "busy" or the error; another's: "open", "refused" or the error
    name: str = ""  # this machine's own
    name_unresolved: str = ""
    name_addresses: Sequence[str] = ()

    @classmethod
    def from_facts(cls, endpoint: str, facts: Mapping[str, Any], trouble: str) -> "Network":
        """Read what the child said; what it did not say is empty."""
        words = {name: str(facts.get(name, "")) for name in ("unresolved", "port", "name", "name_unresolved")}
        addresses, own = tuple(facts.get("addresses", ())), tuple(facts.get("name_addresses", ()))
        ours = bool(facts.get("ours"))
        return cls(endpoint, trouble, addresses=addresses, name_addresses=own, ours=ours, **words)


def judge(seen: Network) -> list[Finding]:
    """Return what it means."""
    if seen.trouble:
        mend = "Look at the name service and the routes of this node."
        return [problem("end point", f"{seen.endpoint}: {seen.trouble}", "an answer", mend)]
    found = [_endpoint(seen)]
    if not seen.unresolved:
        found.append(_port(seen))
    return [*found, _own_name(seen)]


def _endpoint(seen: Network) -> Finding:
    if seen.unresolved:
        mend = (
            "Look at the name, /etc/hosts and the name service (in Kubernetes: a headless service and its subdomain)."
        )
        return problem("end point", f"{seen.endpoint}: {seen.unresolved}", "a name with an address", mend)
    text = f"{seen.endpoint} is {_listed(seen.addresses)}{', this node' if seen.ours else ''}"
    if all(_loopback(one) for one in seen.addresses):
        mend = "Give the address by which other nodes reach the one that opens it; all on one machine, it is right."
        return warning("end point", text, _HOSTS, mend)
    return ok("end point", text)


def _port(seen: Network) -> Finding:
    what, where = "end point's port", seen.endpoint
    if seen.ours:
        if seen.port == "free":
            return ok(what, f"{where} is free to be opened here")
        mend = "Choose a free port, the same on all nodes; a job of yours that runs there already is no fault."
        return warning(what, f"{where} cannot be opened: {seen.port}", "a port that is free before the job", mend)
    if seen.port == "open":
        return ok(what, f"{where} is reached")
    if seen.port == "refused":
        return ok(what, f"{where}: the node answers, nobody listens there yet")
    mend = "Is that node up, and does a firewall, a security group or a network policy block the port?"
    return problem(what, f"{where} is not reached: {seen.port}", "an answer, if only that nobody listens yet", mend)


def _own_name(seen: Network) -> Finding:
    wanted = "an address by which other nodes reach it: gloo listens where this name points"
    mend = "Mend /etc/hosts, or name the interface: GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME for NCCL)."
    if seen.name_unresolved:
        return warning("own name", f"{seen.name}: {seen.name_unresolved}", wanted, mend)
    text = f"{seen.name} is {_listed(seen.name_addresses)}"
    if all(_loopback(one) for one in seen.name_addresses):
        return warning("own name", text, wanted, mend)
    return ok("own name", text)


def _listed(addresses: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(addresses))


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback

"""Running wrapped functions without an agent of ours: under plain torchrun, srun, by hand, or alone."""

from everstep.inprocess.peers.session import PeerSession, Rider, open_peers
from everstep.inprocess.peers.settings import Settings

__all__ = ["PeerSession", "Rider", "Settings", "open_peers"]

"""The rivals, one file each, in the order in which they are run."""

from benchmarks.rivals.base import Batch, Checkpoints, Mode, Reader, Rival, Writer
from benchmarks.rivals.cpprb_buffer import CppRB
from benchmarks.rivals.diffusion_policy_zarr import DiffusionPolicyZarr
from benchmarks.rivals.floors import MemcpyFloor, TakeFloor, TakeIntoFloor
from benchmarks.rivals.hdf5 import HDF5, HDF5Gzip
from benchmarks.rivals.rlinf_buffer import RLinf
from benchmarks.rivals.store_readers import TensorStore, ZarrPython
from benchmarks.rivals.torchrl_buffer import TorchRLMemmap, TorchRLTensor
from benchmarks.rivals.trajstore_buffer import TrajStore

OURS: Rival = TrajStore()

RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        *(RLinf(), TakeFloor(), TorchRLTensor(), CppRB(), TorchRLMemmap(), TensorStore(), ZarrPython()),
        *(HDF5(), DiffusionPolicyZarr(), HDF5Gzip(), TakeIntoFloor(), MemcpyFloor()),
    )
}
"""Every rival by name; those that bars speak of first."""

__all__ = ["OURS", "RIVALS", "Batch", "Checkpoints", "Mode", "Reader", "Rival", "Writer", "find_rival", "select_rivals"]


def find_rival(name: str) -> Rival:
    """The rival of that name, ourselves included."""
    return OURS if name == OURS.name else RIVALS[name]


def select_rivals(names: str) -> list[Rival]:
    """Rivals by a comma-separated list of names, or first parts of them (`torchrl` means both storages); empty: all.

    Raises:
        ValueError: A name fits none.
    """
    if not names.strip():
        return list(RIVALS.values())
    chosen: dict[str, Rival] = {}
    for wanted in [name.strip() for name in names.split(",") if name.strip()]:
        found = {name: rival for name, rival in RIVALS.items() if name == wanted or name.startswith(f"{wanted}-")}
        if not found:
            raise ValueError(f"no rival {wanted!r}; there are {', '.join(RIVALS)}")
        chosen |= found
    return [rival for name, rival in RIVALS.items() if name in chosen]
